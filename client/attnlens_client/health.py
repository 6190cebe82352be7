"""Health checks by the grpc.health.v1 protocol.

Its messages have the wire format of protobuf's wrapper types, so grpcio-health-checking is not required:
requests are a StringValue, responses an Int32Value.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from attnlens_client.connection import SERVICE, Connection, is_connected, open_channel, specified
from attnlens_client.errors import BadReplyError, DeadlineExceededError, UnavailableError

HealthStatus: TypeAlias = Literal["unknown", "serving", "not_serving", "service_unknown"]

ATTENTIONS = f"{SERVICE}.attentions"
_METHOD = "/grpc.health.v1.Health/Check"
# By number in grpc.health.v1.HealthCheckResponse.
_STATUSES: dict[int, HealthStatus] = {0: "unknown", 1: "serving", 2: "not_serving", 3: "service_unknown"}
_PAUSE_S = 0.2
_CHANNEL_OPTIONS = (("grpc.initial_reconnect_backoff_ms", 200), ("grpc.max_reconnect_backoff_ms", 1_000))


def check_health(
    address: str,
    *,
    service: str = SERVICE,
    timeout_s: float = 5.0,
    wait_s: float = 0.0,
    credentials: grpc.ChannelCredentials | None = None,
    api_key: str | None = None,
    channel_options: Sequence[tuple[str, Any]] = (),
) -> HealthStatus:
    """Return the health of a service.

    Args:
        address: See `Client`. Of several servers, one is asked.
        service: Name of the service. `ATTENTIONS` is the health of the attention graph.
        timeout_s: Timeout of one check in seconds.
        wait_s: Maximum time in seconds to wait until the status is "serving".
        credentials: See `Client`.
        api_key: See `Client`. Only needed if the server restricts health checks.
        channel_options: See `Client`.

    Raises:
        ValueError: The address is invalid.
        BadReplyError: The reply is invalid.
        AttnlensError: No attnlens server answered within `wait_s`.

    >>> check_health(address)
    'serving'
    """
    options = (*_CHANNEL_OPTIONS, *channel_options)
    connection = Connection(
        address, timeout_s=timeout_s, credentials=credentials, api_key=api_key, channel_options=options
    )
    deadline = time.monotonic() + wait_s
    with open_channel(connection.target, credentials, options) as channel:
        while True:
            left_s = deadline - time.monotonic()
            try:
                once_s = min(timeout_s, max(_PAUSE_S, left_s)) if wait_s else timeout_s
                status = _check(channel, service, once_s, connection)
            except (DeadlineExceededError, UnavailableError) as error:
                if time.monotonic() >= deadline:
                    raise specified(connection, error) from error.__cause__
            else:
                if time.monotonic() >= deadline or status == "serving":
                    return status
            time.sleep(max(0.0, min(_PAUSE_S, deadline - time.monotonic())))


def _check(channel: grpc.Channel, service: str, timeout_s: float, connection: Connection) -> HealthStatus:
    check: grpc.UnaryUnaryMultiCallable[StringValue, bytes]
    check = channel.unary_unary(_METHOD, request_serializer=StringValue.SerializeToString)
    try:
        reply = check(StringValue(value=service), timeout=timeout_s, metadata=connection.call_metadata)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            return "service_unknown"
        is_late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        session = replace(connection._session, timeout_s=timeout_s)  # noqa: SLF001 - for its messages
        raise session.failure(error, 0, is_connected=not is_late or is_connected(channel)) from error
    try:
        return _STATUSES[Int32Value.FromString(reply).value]
    except (DecodeError, KeyError) as error:
        raise BadReplyError("invalid reply: not a message of grpc.health.v1") from error
