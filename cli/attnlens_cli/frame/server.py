"""Connection options of client commands, and messages for connection failures."""

import functools
import logging
import math
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import click

from attnlens_cli.frame.failures import BadReplyFailure
from attnlens_cli.frame.options import TEXT, JoinedOption, Option
from attnlens_cli.frame.signals import interrupt_on_signals

if TYPE_CHECKING:
    import grpc

    from attnlens_client.errors import ConnectionFailure

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_MAX_TIMEOUT_S = 31_536_000  # one year, as in the client


_option = functools.partial(click.option, cls=Option, section="Server", is_shared=True)
_ADDRESS = _option(
    "--address",
    default="127.0.0.1:50051",
    show_default=True,
    metavar="ADDRESS",
    help="Address of the server: HOST:PORT or unix:PATH. ATTNLENS_ADDRESS sets it for all commands.",
)


def _split(ctx: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    """Return the addresses. In ipv4: and ipv6: targets, commas separate the addresses of one server."""
    del ctx, parameter
    parts = [value] if value.startswith(("ipv4:", "ipv6:")) else value.split(",")
    return tuple(dict.fromkeys(part.strip() for part in parts))


_ADDRESSES = click.option(
    "--address",
    cls=JoinedOption,
    section="Server",
    is_shared=True,
    default="127.0.0.1:50051",
    show_default=True,
    metavar="ADDRESS,...",
    callback=_split,
    help="Address of the server: HOST:PORT or unix:PATH. Several servers share the texts: separate their "
    "addresses by commas, or repeat the option.",
)
_API_KEY = _option(
    "--api-key",
    metavar="KEY",
    type=TEXT,
    help="API key of the server. Set it by ATTNLENS_API_KEY: other users of this machine can see options.",
)
_MODEL = _option("--model", type=TEXT, default="", help="Name of the model.  [default: the server's model]")
_TLS = (
    _option("--tls", is_flag=True, help="Use TLS with gRPC's root certificates."),
    _option("--tls-ca", type=_FILE, help="Use TLS with these root certificates (PEM)."),
    _option("--tls-cert", type=_FILE, help="Use TLS with this client certificate (PEM)."),
    _option("--tls-key", type=_FILE, help="Private key of --tls-cert (PEM)."),
    _option(
        "--tls-server-name",
        metavar="NAME",
        type=TEXT,
        help="Host name to verify in the server's certificate.",
    ),
)


def _timeout(default_s: float) -> Any:  # noqa: ANN401 - a decorator
    return _option(
        "--timeout-s",
        type=click.FloatRange(min=0, min_open=True, max=_MAX_TIMEOUT_S),
        default=default_s,
        show_default=True,
        help="Maximum duration of a call in seconds, including retries.",
    )


class ClientSettings(TypedDict):
    """Keyword arguments of `Client` and `AsyncClient`."""

    timeout_s: float
    credentials: "grpc.ChannelCredentials | None"
    api_key: str | None
    channel_options: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """The connection options.

    Attributes:
        address: Address of the server, or of the first one.
        model: Name of the model. Empty in commands without --model.
        addresses: Addresses of all servers. A command with a single server has one.
    """

    address: str
    model: str
    timeout_s: float
    api_key: str | None
    tls: bool
    tls_ca: Path | None
    tls_cert: Path | None
    tls_key: Path | None
    tls_server_name: str | None
    addresses: tuple[str, ...]

    def __post_init__(self) -> None:
        from attnlens_client.addresses import checked_address  # noqa: PLC0415 - heavy
        from attnlens_client.connection import check_key  # noqa: PLC0415 - heavy

        try:
            for address in self.addresses:
                checked_address(address)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="'--address'") from error
        try:
            check_key(self.api_key)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="'--api-key'") from error
        if math.isnan(self.timeout_s):
            raise click.BadParameter("it is not a number", param_hint="'--timeout-s'")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise click.UsageError("only one of --tls-cert and --tls-key is set: set both or neither")
        if self.tls_server_name and not self._uses_tls:
            raise click.UsageError("--tls-server-name needs TLS: use --tls or --tls-ca")

    @property
    def _name(self) -> str:
        """The servers in messages."""
        return ", ".join(self.addresses)

    @property
    def _uses_tls(self) -> bool:
        return bool(self.tls or self.tls_ca or self.tls_cert)

    def client_settings(self) -> ClientSettings:
        """Return the keyword arguments of `Client` and `AsyncClient`."""
        name = self.tls_server_name
        return {
            "timeout_s": self.timeout_s,
            "credentials": self._credentials(),
            "api_key": self.api_key,
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
        """Load the files with OpenSSL. gRPC would fail later, without a reason."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        defect, option = f"{self.tls_ca} has no valid certificate", "--tls-ca"
        try:
            if self.tls_ca:
                context.load_verify_locations(self.tls_ca)
            defect = f"{self.tls_cert} and {self.tls_key} are not a certificate and its private key"
            option = "--tls-cert"
            if self.tls_cert:
                context.load_cert_chain(self.tls_cert, self.tls_key, password="")
        except ssl.SSLError as error:
            raise click.BadParameter(f"{defect} ({error.reason})", param_hint=f"'{option}'") from error

    @contextmanager
    def failures_explained(self) -> Iterator[None]:
        """Convert connection failures into messages with a remedy."""
        from attnlens_client import (  # noqa: PLC0415 - heavy
            AttnlensError,
            BadReplyError,
            InvalidRequestError,
        )

        try:
            yield
        except InvalidRequestError as error:
            fields = {violation.field: violation.description for violation in error.violations}
            ctx = click.get_current_context()
            option = next((option for option in ctx.command.params if option.name in fields), None)
            if not isinstance(option, click.Option):
                raise
            raise click.BadParameter(fields[str(option.name)], ctx, option) from error
        except BadReplyError as error:
            raise BadReplyFailure(f"{self._name}: {error.message}") from error
        except AttnlensError as error:
            if error.connection is None:  # the response of an attnlens server
                raise
            raise click.ClickException(self._connection_message(error.connection)) from error

    def _connection_message(self, failure: "ConnectionFailure") -> str:
        from attnlens_client.errors import ConnectionProblem as Problem  # noqa: PLC0415 - heavy

        where = f"--address {self.address}" if self.address.startswith("unix") else "--port PORT"
        start = f"start one with `attnlens serve DIR {where}`, or use another --address"
        return failure.message(
            self._name,
            {
                Problem.NO_SERVER: start,
                Problem.NO_SERVER_OR_TLS: f"{start}, or --tls if the server uses TLS",
                Problem.NO_SERVER_OR_CERTIFICATE: f"{start}, or --tls-cert and --tls-key with a valid "
                "certificate of a CA that the server trusts",
                Problem.NOT_REACHABLE: f"{start}, or see the server's log if it runs",
                Problem.NO_ANSWER: "check the address, or use a larger --timeout-s",
                Problem.SLOW: "use a larger --timeout-s, or see the server's log if it never answers",
                Problem.NO_SOCKET: start,
                Problem.OTHER_PROGRAM: "use another --address, such as the gRPC port instead of the HTTP "
                "port, or --tls for TLS",
                Problem.NO_TLS: "omit all TLS options, or use another --address",
                Problem.OTHER_NAME: "use an --address in the certificate, or --tls-server-name",
                Problem.UNTRUSTED: "use the certificate of the server's CA as --tls-ca",
                Problem.TLS_HANDSHAKE: "check --tls-ca, --tls-cert and --tls-server-name, or omit all TLS "
                "options",
            },
        )


def _read_pem(path: Path | None, option: str, part: str) -> bytes | None:
    content = path.read_bytes() if path else None
    if content is not None and b"-----BEGIN" not in content:
        raise click.BadParameter(f"{path} is not a PEM file", param_hint=f"'{option}'")
    if content is not None and f"{part}-----".encode() not in content:
        raise click.BadParameter(f"{path} has no PEM {part}", param_hint=f"'{option}'")
    return content


def server_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the connection options to `command`, which receives them as the argument `server`."""
    return _with_options(command, (_ADDRESS, _API_KEY, _MODEL, _timeout(60.0), *_TLS))


def servers_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return `server_options` with an --address that accepts several servers."""
    return _with_options(command, (_ADDRESSES, _API_KEY, _MODEL, _timeout(60.0), *_TLS))


def connection_options(timeout_s: float) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return `server_options` without --model. `timeout_s` is the default of --timeout-s."""
    return functools.partial(_with_options, options=(_ADDRESS, _API_KEY, _timeout(timeout_s), *_TLS))


def _with_options(command: Callable[..., None], options: tuple[Any, ...]) -> Callable[..., None]:
    names = [field.name for field in fields(ServerOptions) if field.name != "addresses"]

    @functools.wraps(command)
    def with_server(*args: Any, **given: Any) -> None:  # noqa: ANN401 - as in click
        values = {name: given.pop(name, "") for name in names}
        address = values.pop("address")
        addresses = address if isinstance(address, tuple) else (address,)
        server = ServerOptions(address=addresses[0], addresses=addresses, **values)
        interrupt_on_signals()
        logging.getLogger("grpc").setLevel(logging.CRITICAL)  # its failures are raised as exceptions
        with server.failures_explained():
            command(*args, server=server, **given)

    for option in reversed(options):
        with_server = option(with_server)
    return with_server
