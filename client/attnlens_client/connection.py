"""The options of `Client` and `AsyncClient`, and what gRPC is told of them."""

import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from numbers import Real
from typing import Any
from urllib.parse import unquote_to_bytes

import grpc

from attnlens.signatures import checks_arguments
from attnlens_client.arguments import whole_number
from attnlens_client.core.session import Session

SERVICE = "attnlens.v1.EncoderService"
MAX_TIMEOUT_S = 365 * 24 * 3600.0
MAX_ATTEMPTS = 5  # gRPC's limit
UNLIMITED = -1

_HOST_AND_PORT = re.compile(r"(?:[\w.-]+|\[[\w:.%-]+\]):([0-9]{1,5})")
_OTHER_TARGET = re.compile(r"(?:unix|unix-abstract|dns|ipv4|ipv6|vsock|xds):.+")
_MAX_PORT = 65535
# sun_path of sockaddr_un has 108 bytes on Linux and 104 on macOS, one of them for the 0 at the end.
_MAX_PATH_BYTES = 107 if sys.platform == "linux" else 103

# Requests up to this size are kept for a retry; gRPC's own 256 KiB would exclude many of ours.
_INITIAL_BACKOFF = "0.2s"
_RETRY_BUFFER_BYTES = 64 << 20
# Above the five minutes below which a server with gRPC's defaults closes the connection as abused.
_KEEPALIVE_TIME_MS = 360_000
_KEEPALIVE_TIMEOUT_MS = 20_000


def checked_address(address: str) -> str:
    """Return `address`: HOST:PORT, or one of gRPC's other forms such as `unix:/run/attnlens.sock`.

    Raises:
        TypeError: it is no str.
        ValueError: it is neither, or a path that is too long. gRPC itself would go to port 443, or to the
            port modulo 65536.
    """
    if not isinstance(address, str):
        raise TypeError(f"address is {address!r}: give a str, HOST:PORT or unix:PATH")
    parts = _HOST_AND_PORT.fullmatch(address)
    valid = 1 <= int(parts[1]) <= _MAX_PORT if parts else _OTHER_TARGET.fullmatch(address)
    if not valid:
        raise ValueError(
            f"address is {address!r}: give HOST:PORT, the port from 1 to {_MAX_PORT}, or unix:PATH"
        )
    num_bytes = len(unquote_to_bytes(address.removeprefix("unix:").removeprefix("//")))
    if address.startswith("unix:") and num_bytes > _MAX_PATH_BYTES:
        raise ValueError(
            f"address has a path of {num_bytes} bytes, {address!r}: the system takes at most "
            f"{_MAX_PATH_BYTES} for a socket, use a relative path or a shorter one"
        )
    return address


@checks_arguments
@dataclass(eq=False, repr=False)
class Connection:
    """The options of `Client` and `AsyncClient`. The connection itself is made with the first call.

    Attributes:
        address: HOST:PORT, or another target of gRPC such as `unix:/run/attnlens.sock`.
        timeout_s: the deadline of each call, retries included, a year at most. A stream is one call for
            up to `batch_size` texts, and the time that its consumer takes counts. None: no deadline.
        credentials: for TLS, `grpc.ssl_channel_credentials(...)`. None: no encryption.
        metadata: pairs sent with each call, for instance `(("authorization", "Bearer ..."),)`.
        batch_size: the most texts in one call. More texts become several calls.
        max_in_flight: the most calls that one method keeps running at a time.
        max_attempts: how often a call is tried while no server has answered yet, 5 at most (gRPC's
            limit), after delays that double from 0.2 s. A server that is overloaded, or goes away after
            it has answered, is tried until the deadline. 1: no retries at all.
        wait_for_ready: wait for a first server until the deadline, where the default is to fail as soon
            as the attempts are used up.
        max_response_bytes: the largest message to accept. -1: any.
        channel_options: further gRPC options, which take precedence over all of the above, for
            instance `(("grpc.ssl_target_name_override", "encoder.internal"),)`.

    Raises:
        ValueError: the address has the wrong form, or a number is out of range.
        TypeError: the address is not a str, or a number is not a number.
    """

    address: str
    _: KW_ONLY
    timeout_s: float | None = 60.0
    credentials: grpc.ChannelCredentials | None = None
    metadata: Sequence[tuple[str, str | bytes]] = ()
    batch_size: int = 128
    max_in_flight: int = 4
    max_attempts: int = MAX_ATTEMPTS
    wait_for_ready: bool = False
    max_response_bytes: int = UNLIMITED
    channel_options: Sequence[tuple[str, Any]] = ()

    def __post_init__(self) -> None:
        checked_address(self.address)
        check_timeout(self.timeout_s)
        for name, most in (
            ("batch_size", math.inf),
            ("max_in_flight", math.inf),
            ("max_attempts", MAX_ATTEMPTS),
        ):
            check_number(name, getattr(self, name), most)
        self._session = Session(
            address=self.address,
            timeout_s=self.timeout_s,
            batch_size=self.batch_size,
            max_in_flight=self.max_in_flight,
            may_retry=self.max_attempts > 1,
            uses_tls=self.credentials is not None,
        )

    def __repr__(self) -> str:
        # Metadata and options may hold secrets.
        parts = [repr(self.address), *(["TLS"] if self.credentials is not None else [])]
        models = {model.name: f"model={model.name!r}" for model in self._session.models.values()}
        return f"{type(self).__name__}({', '.join([*parts, *models.values()])})"


def check_timeout(timeout_s: float | None) -> None:
    """Check the deadline of a call.

    Raises:
        ValueError: it is out of range.
        TypeError: it is no number.
    """
    if timeout_s is None:
        return
    if not isinstance(timeout_s, Real):
        raise TypeError(f"timeout_s is {timeout_s!r}: give a number of seconds, or None for no deadline")
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ValueError(
            f"timeout_s is {timeout_s}: give seconds above 0 and up to {MAX_TIMEOUT_S:.0f}, or None for no "
            "deadline"
        )


def check_number(name: str, value: int, most: float = math.inf) -> None:
    """Check a whole number from 1.

    Raises:
        ValueError: it is out of range.
        TypeError: it is not a whole number.
    """
    if not 1 <= whole_number(name, value) <= most:
        raise ValueError(
            f"{name} is {value}: give 1 or more" + (f", up to {most}" if most < math.inf else "")
        )


def grpc_options(connection: Connection) -> list[tuple[str, Any]]:
    """Return the options of the channel; those of the user win."""
    config = service_config(connection.max_attempts, connection.wait_for_ready)
    options: dict[str, Any] = {
        "grpc.service_config": json.dumps(config),
        "grpc.per_rpc_retry_buffer_size": _RETRY_BUFFER_BYTES,
        "grpc.max_receive_message_length": connection.max_response_bytes,
        "grpc.max_send_message_length": UNLIMITED,
        "grpc.keepalive_time_ms": _KEEPALIVE_TIME_MS,
        "grpc.keepalive_timeout_ms": _KEEPALIVE_TIMEOUT_MS,
        # Try a server that is not there again soon: within the time that the retries take.
        "grpc.initial_reconnect_backoff_ms": 200,
        "grpc.max_reconnect_backoff_ms": 5_000,
    }
    return list({**options, **dict(connection.channel_options)}.items())


def service_config(max_attempts: int, wait_for_ready: bool) -> dict[str, Any]:
    """Return the gRPC service config: what to retry, how often, and when to give up.

    A server that is overloaded says when to try again, or refuses for good what will never fit: that is for
    the core.
    """
    method: dict[str, Any] = {"name": [{"service": SERVICE}], "waitForReady": wait_for_ready}
    if max_attempts > 1:
        method["retryPolicy"] = {
            "maxAttempts": max_attempts,
            "initialBackoff": _INITIAL_BACKOFF,
            "maxBackoff": "5s",
            "backoffMultiplier": 2,
            "retryableStatusCodes": ["UNAVAILABLE"],
        }
    # Each failure takes a token and each success gives one back; no retries below half of them.
    return {"methodConfig": [method], "retryThrottling": {"maxTokens": 1000, "tokenRatio": 1.0}}
