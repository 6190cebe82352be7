"""The options of every command that asks a server, and what to say when none answers."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import click

if TYPE_CHECKING:
    import grpc

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_OPTIONS = (
    click.option(
        "--address", default="127.0.0.1:50051", show_default=True, metavar="HOST:PORT", help="The server."
    ),
    click.option("--model", default="", help="The model's name.  [default: the server's only one]"),
    click.option(
        "--timeout",
        type=click.FloatRange(min=0, min_open=True),
        default=60.0,
        show_default=True,
        help="Seconds that a call may take, retries included.",
    ),
    click.option("--tls", is_flag=True, help="Use TLS, and trust the roots that gRPC brings."),
    click.option("--tls-ca", type=_FILE, help="Use TLS, and trust these roots (PEM)."),
    click.option("--tls-cert", type=_FILE, help="Use TLS, and identify with this certificate (PEM)."),
    click.option("--tls-key", type=_FILE, help="The private key of --tls-cert (PEM)."),
    click.option("--tls-server-name", metavar="NAME", help="The name to expect in the server's certificate."),
)


class ClientSettings(TypedDict):
    """Keyword arguments of the client."""

    timeout_s: float
    credentials: "grpc.ChannelCredentials | None"
    channel_options: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The server to ask. The fields are the options above."""

    address: str
    model: str
    timeout: float
    tls: bool
    tls_ca: Path | None
    tls_cert: Path | None
    tls_key: Path | None
    tls_server_name: str | None

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise click.UsageError("--tls-cert and --tls-key belong together: give both or neither")

    def client_settings(self) -> ClientSettings:
        """Return the keyword arguments for `Client` and `AsyncClient`."""
        name = self.tls_server_name
        return {
            "timeout_s": self.timeout,
            "credentials": self._credentials(),
            "channel_options": (("grpc.ssl_target_name_override", name),) if name else (),
        }

    def _credentials(self) -> "grpc.ChannelCredentials | None":
        if not (self.tls or self.tls_ca or self.tls_cert):
            return None
        import grpc  # noqa: PLC0415 - heavy

        ca, key, certificate = (
            path.read_bytes() if path else None for path in (self.tls_ca, self.tls_key, self.tls_cert)
        )
        return grpc.ssl_channel_credentials(ca, key, certificate)

    @contextmanager
    def failures_explained(self) -> Iterator[None]:
        """Say what to do where no server answers, or not in time."""
        from attnlens_client import DeadlineExceededError, UnavailableError  # noqa: PLC0415 - heavy

        try:
            yield
        except UnavailableError as error:
            if error.reason:  # an attnlens server said so itself
                raise
            remedy = "start one with `attnlens serve DIR --port PORT`, or give another --address"
            cause = error.message.rpartition("last error: ")[2]
            raise click.ClickException(f"no server answers at {self.address}: {remedy} ({cause})") from error
        except DeadlineExceededError as error:
            raise click.ClickException(
                f"{self.address} did not answer within {self.timeout:g} s: give a larger --timeout"
            ) from error


def server_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options to `command`, which gets them as one argument, `server`."""
    names = [field.name for field in fields(Server)]

    @functools.wraps(command)
    def with_server(*args: Any, **options: Any) -> None:  # noqa: ANN401 - whatever click passes
        server = Server(**{name: options.pop(name) for name in names})
        with server.failures_explained():
            command(*args, server=server, **options)

    for option in reversed(_OPTIONS):
        with_server = option(with_server)
    return with_server
