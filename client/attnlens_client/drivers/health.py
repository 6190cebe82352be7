"""Asks a server whether it serves, by gRPC's health protocol, with what the base install has.

The messages of grpc.health.v1 are those of two wrappers of protobuf, byte by byte: a request is a string with
the number 1, a response an enumeration with the number 1. So grpcio-health-checking is not needed.
"""

import time
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from attnlens_client.connection import SERVICE, checked_address
from attnlens_client.errors import BadReplyError, DeadlineExceededError, UnavailableError, from_rpc_error

HealthStatus: TypeAlias = Literal["unknown", "serving", "not_serving", "service_unknown"]

ATTENTIONS = f"{SERVICE}.attentions"
_METHOD = "/grpc.health.v1.Health/Check"
# By their numbers in grpc.health.v1.HealthCheckResponse.
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
    channel_options: Sequence[tuple[str, Any]] = (),
) -> HealthStatus:
    """Return what the server at `address` says of `service`.

    Args:
        address: as of `Client`.
        service: the name of a service: that of attnlens, or `ATTENTIONS`, its graph for attention weights.
        timeout_s: the deadline of one question.
        wait_s: ask again until the answer is "serving", for so many seconds at most.
        credentials: as of `Client`.
        channel_options: as of `Client`.

    Raises:
        ValueError: the address has the wrong form.
        BadReplyError: the reply is no answer.
        AttnlensError: there is no server, or another program, at the end of `wait_s`.

    >>> check_health(address)
    'serving'
    """
    checked_address(address)
    options = [*_CHANNEL_OPTIONS, *channel_options]
    deadline = time.monotonic() + wait_s
    with (
        grpc.insecure_channel(address, options)
        if credentials is None
        else grpc.secure_channel(address, credentials, options)
    ) as channel:
        while True:
            left_s = deadline - time.monotonic()
            try:
                status = _ask(
                    channel, service, min(timeout_s, max(_PAUSE_S, left_s)) if wait_s else timeout_s
                )
            except (DeadlineExceededError, UnavailableError):
                if time.monotonic() >= deadline:
                    raise
            else:
                if time.monotonic() >= deadline or status == "serving":
                    return status
            time.sleep(max(0.0, min(_PAUSE_S, deadline - time.monotonic())))


def _ask(channel: grpc.Channel, service: str, timeout_s: float) -> HealthStatus:
    ask: grpc.UnaryUnaryMultiCallable[StringValue, bytes]
    ask = channel.unary_unary(_METHOD, request_serializer=StringValue.SerializeToString)
    try:
        reply = ask(StringValue(value=service), timeout=timeout_s)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            return "service_unknown"
        raise from_rpc_error(error) from error
    try:
        return _STATUSES[Int32Value.FromString(reply).value]
    except (DecodeError, KeyError) as error:
        raise BadReplyError("the reply is wrong: its bytes are no answer about health") from error
