"""The options of every command that asks a server, and the messages when no server answers."""

import functools
import logging
import math
import os
import signal
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypedDict

import click

from attnlens_cli.files.text_lines import is_sendable
from attnlens_cli.frame.failures import BadReplyFailure, variable_of_command
from attnlens_cli.frame.sections import SectionOption

if TYPE_CHECKING:
    import grpc

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_MAX_TIMEOUT_S = 31_536_000  # a year, as for the client


class ServerOption(SectionOption):
    """An option that has a variable for all commands, such as ATTNLENS_ADDRESS, beside that of the command.

    The variable of the command, such as ATTNLENS_EMBED_ADDRESS, comes first.
    """

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """Return the value of the variable of the command, else of the one for all."""
        return super().resolve_envvar_value(ctx) or os.environ.get(self._shared_variable(ctx)) or None

    def variable(self, ctx: click.Context) -> str:
        """Return the name of the variable that has the value."""
        return (
            variable_of_command(self, ctx)
            if super().resolve_envvar_value(ctx)
            else self._shared_variable(ctx)
        )

    def _shared_variable(self, ctx: click.Context) -> str:
        return f"{ctx.find_root().auto_envvar_prefix}_{str(self.name).upper()}"


_option = functools.partial(click.option, cls=ServerOption, section="Server")
_ADDRESS = _option(
    "--address",
    default="127.0.0.1:50051",
    show_default=True,
    metavar="ADDRESS",
    help="The server: HOST:PORT or unix:PATH. For all commands: ATTNLENS_ADDRESS.",
)
_MODEL = _option("--model", default="", help="The model's name.  [default: the server's only one]")
_TLS = (
    _option("--tls", is_flag=True, help="Use TLS, and trust the roots that gRPC brings."),
    _option("--tls-ca", type=_FILE, help="Use TLS, and trust these roots (PEM)."),
    _option("--tls-cert", type=_FILE, help="Use TLS, and identify with this certificate (PEM)."),
    _option("--tls-key", type=_FILE, help="The private key of --tls-cert (PEM)."),
    _option("--tls-server-name", metavar="NAME", help="The name to expect in the server's certificate."),
)


def _timeout(default_s: float) -> Any:  # noqa: ANN401 - what `click.option` returns
    return _option(
        "--timeout-s",
        type=click.FloatRange(min=0, min_open=True, max=_MAX_TIMEOUT_S),
        default=default_s,
        show_default=True,
        help="Seconds that a call may take, retries included.",
    )


class ClientSettings(TypedDict):
    """Keyword arguments of the client."""

    timeout_s: float
    credentials: "grpc.ChannelCredentials | None"
    channel_options: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Which server to ask, and how. The fields are the options above."""

    address: str
    model: str
    timeout_s: float
    tls: bool
    tls_ca: Path | None
    tls_cert: Path | None
    tls_key: Path | None
    tls_server_name: str | None

    def __post_init__(self) -> None:
        from attnlens_client.connection import checked_address  # noqa: PLC0415 - heavy

        try:
            checked_address(self.address)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="'--address'") from error
        if math.isnan(self.timeout_s):
            raise click.BadParameter("it is not a number", param_hint="'--timeout-s'")
        for option, value in (("--model", self.model), ("--tls-server-name", self.tls_server_name or "")):
            if not is_sendable(value):
                raise click.BadParameter("it is not UTF-8", param_hint=f"'{option}'")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise click.UsageError("--tls-cert and --tls-key belong together: give both or neither")
        if self.tls_server_name and not self._uses_tls:
            raise click.UsageError("--tls-server-name needs TLS: give --tls or --tls-ca")

    @property
    def _uses_tls(self) -> bool:
        return bool(self.tls or self.tls_ca or self.tls_cert)

    def client_settings(self) -> ClientSettings:
        """Return the keyword arguments for `Client` and `AsyncClient`."""
        name = self.tls_server_name
        return {
            "timeout_s": self.timeout_s,
            "credentials": self._credentials(),
            "channel_options": (("grpc.ssl_target_name_override", name),) if name else (),
        }

    def _credentials(self) -> "grpc.ChannelCredentials | None":
        if not self._uses_tls:
            return None
        import grpc  # noqa: PLC0415 - heavy

        ca = _read_pem(self.tls_ca, "--tls-ca", "CERTIFICATE")
        certificate = _read_pem(self.tls_cert, "--tls-cert", "CERTIFICATE")
        key = _read_pem(self.tls_key, "--tls-key", "PRIVATE KEY")
        self._check_tls_files()
        return grpc.ssl_channel_credentials(ca, key, certificate)

    def _check_tls_files(self) -> None:
        """Load the files as TLS does: gRPC fails later, without a reason."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        what, option = f"{self.tls_ca} has no valid certificate", "--tls-ca"
        try:
            if self.tls_ca:
                context.load_verify_locations(self.tls_ca)
            what = f"{self.tls_cert} and {self.tls_key} are not a certificate and its private key"
            option = "--tls-cert"
            if self.tls_cert:
                context.load_cert_chain(self.tls_cert, self.tls_key, password="")
        except ssl.SSLError as error:
            raise click.BadParameter(f"{what} ({error.reason})", param_hint=f"'{option}'") from error

    @contextmanager
    def failures_explained(self) -> Iterator[None]:
        """Turn failures to reach the server into messages that say what to do."""
        from attnlens_client import (  # noqa: PLC0415 - heavy
            BadReplyError,
            DeadlineExceededError,
            InvalidRequestError,
            ServerError,
            UnavailableError,
        )

        try:
            yield
        except InvalidRequestError as error:
            fields = {violation.field: violation.description for violation in error.violations}
            ctx = click.get_current_context()
            option = next((each for each in ctx.command.params if each.name in fields), None)
            if not isinstance(option, click.Option):
                raise
            raise click.BadParameter(fields[str(option.name)], ctx, option) from error
        except BadReplyError as error:
            raise BadReplyFailure(f"{self.address}: {error.message}") from error
        except (UnavailableError, ServerError) as error:
            if error.reason:  # an attnlens server said so itself
                raise
            answered = isinstance(error, ServerError)
            raise click.ClickException(self._explained(error.__cause__, answered=answered)) from error
        except DeadlineExceededError as error:
            raise click.ClickException(
                f"no server answered at {self.address} within {self.timeout_s:g} s: is one there? If so, "
                "give a larger --timeout-s"
            ) from error

    def _explained(self, error: BaseException | None, *, answered: bool) -> str:
        from attnlens_client.errors import Trouble, trouble_of  # noqa: PLC0415 - heavy

        trouble, cause = trouble_of(error, answered=answered, uses_tls=self._uses_tls)
        if trouble is Trouble.OTHER_TLS:
            return (
                f"no TLS with {self.address}: check --tls-ca, --tls-cert and --tls-server-name, or leave "
                f"out these and --tls for a server without TLS ({cause})"
            )
        if trouble is Trouble.OTHER_PROGRAM:
            remedy = "give another --address, or --tls where the server uses TLS"
            return f"the program at {self.address} is not an attnlens server: {remedy} ({cause})"
        where = f"--address {self.address}" if self.address.startswith("unix") else "--port PORT"
        remedy = f"start one with `attnlens serve DIR {where}`, or give another --address"
        if trouble is Trouble.NO_SERVER_OR_TLS:
            remedy += ", or --tls where the server uses TLS"
        return f"no server answers at {self.address}: {remedy} ({cause})"


SHARED_NAMES = frozenset(field.name.upper() for field in fields(ServerOptions))
"""The ends of the variables for all commands: ATTNLENS_ADDRESS and so on."""


def _read_pem(path: Path | None, option: str, part: str) -> bytes | None:
    content = path.read_bytes() if path else None
    if content is not None and b"-----BEGIN" not in content:
        raise click.BadParameter(f"{path} is not a PEM file", param_hint=f"'{option}'")
    if content is not None and f"{part}-----".encode() not in content:
        raise click.BadParameter(f"{path} has no {part} in PEM", param_hint=f"'{option}'")
    return content


def server_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options to `command`, which gets them as one argument, `server`."""
    return _with_options(command, (_ADDRESS, _MODEL, _timeout(60.0), *_TLS))


def connection_options(timeout_s: float) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return the same without a model, for a command that asks for none; `timeout_s` is its default."""
    return functools.partial(_with_options, options=(_ADDRESS, _timeout(timeout_s), *_TLS))


def _with_options(command: Callable[..., None], options: tuple[Any, ...]) -> Callable[..., None]:
    names = [field.name for field in fields(ServerOptions)]

    @functools.wraps(command)
    def with_server(*args: Any, **given: Any) -> None:  # noqa: ANN401 - whatever click passes
        server = ServerOptions(**{name: given.pop(name, "") for name in names})
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup leaves SIGHUP
                signal.signal(number, _interrupt)
        logging.getLogger("grpc").setLevel(logging.CRITICAL)  # gRPC's failures come as exceptions
        with server.failures_explained():
            command(*args, server=server, **given)

    for option in reversed(options):
        with_server = option(with_server)
    return with_server


def _interrupt(_number: int, frame: FrameType | None) -> None:
    """Do what SIGINT does, so that a run that is asked to end leaves no partial file."""
    handler = signal.getsignal(signal.SIGINT)
    (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, frame)
