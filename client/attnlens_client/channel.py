"""How calls travel: retries, message limits and keepalive, as gRPC channel options."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc

SERVICE = "attnlens.v1.EncoderService"
UNLIMITED = -1

# Requests up to this size are kept for a retry; gRPC's own 256 KiB would exclude many of ours.
_RETRY_BUFFER_BYTES = 64 << 20
# Above the five minutes below which a server with gRPC's defaults closes the connection as abused.
_KEEPALIVE_TIME_MS = 360_000
_KEEPALIVE_TIMEOUT_MS = 20_000


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options that `Client` and `AsyncClient` share.

    Attributes:
        timeout_s: the deadline of each call, retries included. A stream is one call for up to
            `batch_size` texts, and the time that its consumer takes counts. None: no deadline.
        credentials: for TLS, `grpc.ssl_channel_credentials(...)`. None: no encryption.
        metadata: pairs sent with each call, for instance `(("authorization", "Bearer ..."),)`.
        batch_size: the most texts in one call. More texts become several calls.
        max_in_flight: the most calls that one method keeps running at a time.
        max_attempts: how often a call is tried while the server is unavailable, 5 at most (gRPC's
            limit), after delays that double from 0.2 s. An overloaded server is tried with the delays
            that it names, and until the deadline. 1: no retries at all.
        wait_for_ready: wait for a server until the deadline, where the default is to fail as soon
            as the attempts are used up.
        max_message_bytes: the largest message to accept. -1: any.
        channel_options: further gRPC options, which take precedence over all of the above, for
            instance `(("grpc.ssl_target_name_override", "encoder.internal"),)`.

    Raises:
        ValueError: a number is out of range.
    """

    timeout_s: float | None = 60.0
    credentials: grpc.ChannelCredentials | None = None
    metadata: Sequence[tuple[str, str | bytes]] = ()
    batch_size: int = 128
    max_in_flight: int = 4
    max_attempts: int = 5
    wait_for_ready: bool = False
    max_message_bytes: int = UNLIMITED
    channel_options: Sequence[tuple[str, Any]] = ()

    def __post_init__(self) -> None:
        if self.timeout_s is not None and self.timeout_s <= 0:
            raise ValueError(
                f"timeout_s is {self.timeout_s}: give a positive number, or None for no deadline"
            )
        for name in ("batch_size", "max_in_flight", "max_attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give 1 or more")


def service_config(settings: Settings) -> dict[str, Any]:
    """Return the gRPC service config: what to retry, how often, and when to give up."""
    method: dict[str, Any] = {"name": [{"service": SERVICE}], "waitForReady": settings.wait_for_ready}
    if settings.max_attempts > 1:
        method["retryPolicy"] = {
            "maxAttempts": settings.max_attempts,
            "initialBackoff": "0.2s",
            "maxBackoff": "5s",
            "backoffMultiplier": 2,
            "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
        }
    # Each failure takes a token and each success gives one back; no retries below half of them.
    return {"methodConfig": [method], "retryThrottling": {"maxTokens": 1000, "tokenRatio": 1.0}}


def channel_options(settings: Settings) -> list[tuple[str, Any]]:
    """Return the options of the channel; those of the user win."""
    options: dict[str, Any] = {
        "grpc.service_config": json.dumps(service_config(settings)),
        "grpc.per_rpc_retry_buffer_size": _RETRY_BUFFER_BYTES,
        "grpc.max_receive_message_length": settings.max_message_bytes,
        "grpc.max_send_message_length": UNLIMITED,
        "grpc.keepalive_time_ms": _KEEPALIVE_TIME_MS,
        "grpc.keepalive_timeout_ms": _KEEPALIVE_TIMEOUT_MS,
        # Try a server that is not there again soon: within the time that the retries take.
        "grpc.initial_reconnect_backoff_ms": 200,
        "grpc.max_reconnect_backoff_ms": 5_000,
    }
    return list({**options, **dict(settings.channel_options)}.items())
