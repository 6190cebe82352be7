"""Connection options of `Client` and `AsyncClient`, and the resulting gRPC channel options."""

import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from numbers import Real
from queue import Empty, SimpleQueue
from typing import Any, Literal, cast

import grpc

from attnlens.signatures import checks_arguments
from attnlens_client.addresses import (
    checked_address,
    environment_proxy,
    grpc_target,
    has_several,
    single_targets,
)
from attnlens_client.arguments import checked_int
from attnlens_client.core.calls import Session
from attnlens_client.errors import AttnlensError, ConnectionProblem

SERVICE = "attnlens.v1.EncoderService"
MAX_TIMEOUT_S = 365 * 24 * 3600.0
MAX_ATTEMPTS = 5  # gRPC's limit
UNLIMITED = -1
PRIORITY = "attnlens-priority"
"""Metadata with the priority of a call."""
PRIORITIES = ("interactive", "bulk")

# Larger requests are not retried by gRPC. Its default of 256 KiB would exclude many requests.
_INITIAL_BACKOFF = "0.2s"
_RETRY_BUFFER_BYTES = 64 << 20
# More than the five minutes below which servers with gRPC's defaults close the connection.
_KEEPALIVE_TIME_MS = 360_000
_KEEPALIVE_TIMEOUT_MS = 20_000
# gRPC's default of 30 s would hide new servers from clients for half of a call's timeout.
_DNS_INTERVAL_MS = 5_000
_HEALTH_CHECK = "/grpc.health.v1.Health/Check"
# Time for the state of a channel, and for another attempt to connect, after a call has failed.
_STATE_S = 1.0
_PROBE_S = 0.5
_MAX_PROBED = 4
_UNSPECIFIC = (ConnectionProblem.NO_SERVER, ConnectionProblem.NOT_REACHABLE)


@checks_arguments
@dataclass(eq=False, repr=False)
class Connection:
    """Connection options. The connection is established by the first call.

    Attributes:
        address: HOST:PORT, or another gRPC target such as `unix:/run/attnlens.sock`. For several servers, a
            list of HOST:PORT, the same separated by commas, or a name with several addresses in DNS: healthy
            servers receive calls in turn.
        timeout_s: Timeout of each call in seconds, including retries, up to a year. None means no timeout. A
            stream is one call for up to `batch_size` texts, and includes the time that the consumer takes.
        credentials: Credentials for TLS, such as `grpc.ssl_channel_credentials(...)`. None means no
            encryption.
        api_key: API key, sent as `authorization: Bearer KEY`. Without TLS, anyone in between can read it.
        priority: Priority of the calls. "bulk" lets calls of all interactive clients go first.
        metadata: Further metadata sent with each call.
        batch_size: Maximum number of texts per call. More texts are split into several calls.
        max_in_flight: Maximum number of concurrent calls of one method.
        max_attempts: Maximum number of attempts, up to 5, until a server has answered for the first time.
            Delays double from 0.2 s. Later failures due to an overloaded or unavailable server are retried
            until the timeout. 1 disables all retries.
        wait_for_ready: Whether to wait for the first server until the timeout, regardless of `max_attempts`.
        max_response_bytes: Maximum size of a response message. -1 means no limit.
        channel_options: Additional gRPC channel options, which override all others, such as
            `(("grpc.ssl_target_name_override", "encoder.internal"),)`.

    Raises:
        ValueError: The address is invalid, or a number is out of range.
        TypeError: An option has the wrong type.
    """

    address: str | Sequence[str]
    _: KW_ONLY
    timeout_s: float | None = 60.0
    credentials: grpc.ChannelCredentials | None = None
    api_key: str | None = None
    priority: Literal["interactive", "bulk"] = "interactive"
    metadata: Sequence[tuple[str, str | bytes]] = ()
    batch_size: int = 128
    max_in_flight: int = 4
    max_attempts: int = MAX_ATTEMPTS
    wait_for_ready: bool = False
    max_response_bytes: int = UNLIMITED
    channel_options: Sequence[tuple[str, Any]] = ()

    def __post_init__(self) -> None:
        self.address = address = checked_address(self.address)
        check_timeout(self.timeout_s)
        for name, maximum in (
            ("batch_size", math.inf),
            ("max_in_flight", math.inf),
            ("max_attempts", MAX_ATTEMPTS),
        ):
            check_number(name, getattr(self, name), maximum)
        check_key(self.api_key)
        if self.priority not in PRIORITIES:
            raise ValueError(f"priority is {self.priority!r}: use one of {', '.join(PRIORITIES)}")
        self._session = Session(
            address=address,
            timeout_s=self.timeout_s,
            batch_size=self.batch_size,
            max_in_flight=self.max_in_flight,
            max_attempts=self.max_attempts,
            uses_tls=self.credentials is not None,
            proxy=self._proxy(),
        )

    @property
    def target(self) -> str:
        """Target of the gRPC channel. Resolves the names in a list."""
        return grpc_target(self._session.address)

    @property
    def call_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """Metadata sent with each call, including key and priority."""
        priority = [(PRIORITY, self.priority)] if self.priority != PRIORITIES[0] else []
        return (*key_metadata(self.api_key), *priority, *self.metadata)

    def _proxy(self) -> str:
        options = dict(self.channel_options)
        if not options.get("grpc.enable_http_proxy", 1):
            return ""
        proxy = options.get("grpc.http_proxy")
        return environment_proxy(str(self.address)) if proxy is None else f"{proxy} of channel_options"

    def __repr__(self) -> str:
        # Keys, metadata and channel options may contain secrets.
        parts = [repr(self.address), *(["TLS"] if self.credentials is not None else [])]
        models = {model.name: f"model={model.name!r}" for model in self._session.models.values()}
        return f"{type(self).__name__}({', '.join([*parts, *models.values()])})"


def check_timeout(timeout_s: float | None) -> None:
    """Validate the timeout of a call.

    Raises:
        ValueError: `timeout_s` is out of range.
        TypeError: `timeout_s` is not a number.
    """
    if timeout_s is None:
        return
    if not isinstance(timeout_s, Real):
        raise TypeError(f"timeout_s is {timeout_s!r}: use a number of seconds, or None for no timeout")
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ValueError(
            f"timeout_s is {timeout_s}: use more than 0 and up to {MAX_TIMEOUT_S:.0f} seconds, or None for "
            "no timeout"
        )


def check_key(api_key: str | None) -> None:
    """Validate an API key, which is not part of the message.

    Raises:
        ValueError: The key is empty, or contains a character that metadata cannot contain.
        TypeError: The key is not a string.
    """
    if api_key is None:
        return
    if not isinstance(api_key, str):
        raise TypeError(f"api_key is {type(api_key).__name__}: use a str, or None for no key")
    if not re.fullmatch("[!-~]+", api_key):
        raise ValueError("api_key is empty or contains a space, or is not ASCII: use a key of the server")


def key_metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """Return the metadata that contains an API key."""
    return () if api_key is None else (("authorization", f"Bearer {api_key}"),)


def check_number(name: str, value: int, maximum: float = math.inf) -> None:
    """Validate an integer from 1 to `maximum`.

    Raises:
        ValueError: `value` is out of range.
        TypeError: `value` is not an integer.
    """
    if not 1 <= checked_int(name, value) <= maximum:
        raise ValueError(
            f"{name} is {value}: use 1 " + (f"to {maximum}" if maximum < math.inf else "or more")
        )


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """Return metadata with the trace context of the caller. Empty unless the process uses OpenTelemetry."""
    # A process that has not imported the API has no current span.
    if "opentelemetry.trace" not in sys.modules:
        return ()
    from opentelemetry.propagate import inject  # noqa: PLC0415 - not a dependency

    carrier: dict[str, str] = {}
    inject(carrier)
    return tuple((name.lower(), value) for name, value in carrier.items())


def grpc_options(connection: Connection) -> list[tuple[str, Any]]:
    """Return the channel options. The user's options take precedence."""
    address = connection._session.address  # noqa: SLF001 - validated
    config = service_config(connection.max_attempts, connection.wait_for_ready, balances=has_several(address))
    options: dict[str, Any] = {
        "grpc.service_config": json.dumps(config),
        "grpc.per_rpc_retry_buffer_size": _RETRY_BUFFER_BYTES,
        "grpc.max_receive_message_length": connection.max_response_bytes,
        "grpc.max_send_message_length": UNLIMITED,
        "grpc.keepalive_time_ms": _KEEPALIVE_TIME_MS,
        "grpc.keepalive_timeout_ms": _KEEPALIVE_TIMEOUT_MS,
        # Reconnect within the time that retries take.
        "grpc.initial_reconnect_backoff_ms": 200,
        "grpc.max_reconnect_backoff_ms": 2_000,
        "grpc.dns_min_time_between_resolutions_ms": _DNS_INTERVAL_MS,
    }
    if "," in address and not address.startswith(("ipv4:", "ipv6:")):
        options["grpc.default_authority"] = address.partition(",")[0]
    return list({**options, **dict(connection.channel_options)}.items())


def open_channel(
    target: str, credentials: grpc.ChannelCredentials | None, options: Sequence[tuple[str, Any]]
) -> grpc.Channel:
    """Return a channel."""
    if credentials is None:
        return grpc.insecure_channel(target, options)
    return grpc.secure_channel(target, credentials, options)


def is_connected(channel: grpc.Channel) -> bool:
    """Return whether a channel has a connection to a server."""
    states: SimpleQueue[grpc.ChannelConnectivity] = SimpleQueue()
    channel.subscribe(states.put)
    try:
        return states.get(timeout=_STATE_S) is grpc.ChannelConnectivity.READY
    except Empty:
        return False
    finally:
        channel.unsubscribe(states.put)


def specified(connection: Connection, error: AttnlensError) -> AttnlensError:
    """Return `error` with a more specific cause, if new connections to single addresses of a server have one.

    gRPC reports one of the errors of several addresses, and none if the deadline has passed.
    """
    session, failure = connection._session, error.connection  # noqa: SLF001 - of the same client
    if failure is None or failure.problem not in _UNSPECIFIC:
        return error
    targets = single_targets(session.address)[:_MAX_PROBED]
    if failure.cause and targets == [session.address]:  # there are no other addresses
        return error
    for cause in filter(None, (_probe(connection, target) for target in targets)):
        found = session.specified(error, failure, cause)
        if found.connection is not None and found.connection.problem not in _UNSPECIFIC:
            return found
        error = error if failure.cause else found
    return error


def _probe(connection: Connection, target: str) -> grpc.RpcError | None:
    """Return the error of a new connection, or None if it succeeds or takes too long."""
    authority = connection._session.address.partition(",")[0]  # noqa: SLF001 - validated
    options = {"grpc.default_authority": authority} if target != authority else {}
    options |= dict(grpc_options(connection)) | {
        "grpc.service_config": "{}",
        "grpc.use_local_subchannel_pool": 1,
    }
    with open_channel(target, connection.credentials, list(options.items())) as channel:
        check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_HEALTH_CHECK)
        try:
            check(b"", timeout=_PROBE_S)
        except grpc.RpcError as error:
            is_away = cast("grpc.Call", error).code() is grpc.StatusCode.UNAVAILABLE
            return error if is_away else None
    return None


def service_config(max_attempts: int, wait_for_ready: bool, *, balances: bool = False) -> dict[str, Any]:
    """Return the gRPC service config with the retry policy.

    The core retries calls that an overloaded server rejects, because it respects the server's retry delay. It
    also retries streams: after retries by gRPC 1.80, a stream may never end, not even at its deadline.

    Args:
        max_attempts: See `Connection`.
        wait_for_ready: See `Connection`.
        balances: Whether to connect to all addresses and distribute calls between healthy servers.
    """
    stream = {"name": [{"service": SERVICE, "method": "EncodeStream"}], "waitForReady": wait_for_ready}
    method: dict[str, Any] = {"name": [{"service": SERVICE}], "waitForReady": wait_for_ready}
    if max_attempts > 1:
        method["retryPolicy"] = {
            "maxAttempts": max_attempts,
            "initialBackoff": _INITIAL_BACKOFF,
            "maxBackoff": "5s",
            "backoffMultiplier": 2,
            "retryableStatusCodes": ["UNAVAILABLE"],
        }
    config: dict[str, Any] = {
        "methodConfig": [method, stream],
        # A failure costs one token and a success returns one. Below half of the tokens, gRPC does not retry.
        "retryThrottling": {"maxTokens": 1000, "tokenRatio": 1.0},
    }
    if balances:
        config["loadBalancingConfig"] = [{"round_robin": {}}]
        config["healthCheckConfig"] = {"serviceName": SERVICE}
    return config
