"""What `Client` and `AsyncClient` share: the address, the options, and how calls travel and are tried again.

gRPC's own retries bridge a moment: five attempts, with the delay that the server names. A server that is
overloaded or restarts may take longer, so `Attempts` goes on until the call's deadline, with growing random
delays that keep many clients from coming back together.
"""

import json
import math
import operator
import random
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

import grpc

from attnlens_client import replies
from attnlens_client.errors import (
    AttnlensError,
    DeadlineExceededError,
    OverloadedError,
    UnavailableError,
    from_rpc_error,
)

if TYPE_CHECKING:
    from attnlens.v1.encoder_service_pb2 import Model
    from attnlens_client.plans import Plan, Request, Response, Result
    from attnlens_client.results import ModelInfo

SERVICE = "attnlens.v1.EncoderService"
MAX_TIMEOUT_S = 365 * 24 * 3600.0
MAX_ATTEMPTS = 5  # gRPC's limit
UNLIMITED = -1

_HOST_AND_PORT = re.compile(r"(?:[\w.-]+|\[[\w:.%-]+\]):([0-9]{1,5})")
_OTHER_TARGET = re.compile(r"(?:unix|unix-abstract|dns|ipv4|ipv6|vsock|xds):.+")
_MAX_PORT = 65535

# Requests up to this size are kept for a retry; gRPC's own 256 KiB would exclude many of ours.
_RETRY_BUFFER_BYTES = 64 << 20
# Above the five minutes below which a server with gRPC's defaults closes the connection as abused.
_KEEPALIVE_TIME_MS = 360_000
_KEEPALIVE_TIMEOUT_MS = 20_000

_FIRST_DELAY_S = 0.1
_MAX_DELAY_S = 5.0


def checked_address(address: str) -> str:
    """Return `address`: HOST:PORT, or one of gRPC's other forms such as `unix:/run/attnlens.sock`.

    Raises:
        ValueError: it is neither. gRPC itself would go to port 443, or to the port modulo 65536.
    """
    parts = _HOST_AND_PORT.fullmatch(address)
    valid = 1 <= int(parts[1]) <= _MAX_PORT if parts else _OTHER_TARGET.fullmatch(address)
    if not valid:
        raise ValueError(f"address is {address!r}: give HOST:PORT, the port from 1 to {_MAX_PORT}")
    return address


@dataclass(eq=False, repr=False)
class Connection(ABC):
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
        max_message_bytes: the largest message to accept. -1: any.
        channel_options: further gRPC options, which take precedence over all of the above, for
            instance `(("grpc.ssl_target_name_override", "encoder.internal"),)`.

    Raises:
        ValueError: the address is none, or a number is out of range.
        TypeError: a number is none.
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
    max_message_bytes: int = UNLIMITED
    channel_options: Sequence[tuple[str, Any]] = ()

    def __post_init__(self) -> None:
        checked_address(self.address)
        if self.timeout_s is not None and not 0 < self.timeout_s <= MAX_TIMEOUT_S:
            raise ValueError(
                f"timeout_s is {self.timeout_s}: give seconds above 0 and up to {MAX_TIMEOUT_S:.0f}, "
                "or None for no deadline"
            )
        for name, most in (
            ("batch_size", math.inf),
            ("max_in_flight", math.inf),
            ("max_attempts", MAX_ATTEMPTS),
        ):
            _check_number(name, getattr(self, name), most)
        # Those seen, by the name asked for. Their limits serve to split requests; a server that comes up
        # again may have others, so nothing else is taken from here, and a refusal asks for them again.
        self._models: dict[str, ModelInfo] = {}
        self._closed = False
        self._has_answered = False
        self._open()

    @abstractmethod
    def _open(self) -> None:
        """Make the channel."""

    def _grpc_options(self) -> list[tuple[str, Any]]:
        """Return the options of the channel; those of the user win."""
        options: dict[str, Any] = {
            "grpc.service_config": json.dumps(service_config(self.max_attempts, self.wait_for_ready)),
            "grpc.per_rpc_retry_buffer_size": _RETRY_BUFFER_BYTES,
            "grpc.max_receive_message_length": self.max_message_bytes,
            "grpc.max_send_message_length": UNLIMITED,
            "grpc.keepalive_time_ms": _KEEPALIVE_TIME_MS,
            "grpc.keepalive_timeout_ms": _KEEPALIVE_TIMEOUT_MS,
            # Try a server that is not there again soon: within the time that the retries take.
            "grpc.initial_reconnect_backoff_ms": 200,
            "grpc.max_reconnect_backoff_ms": 5_000,
        }
        return list({**options, **dict(self.channel_options)}.items())

    def _call_options(self, attempts: "Attempts") -> dict[str, Any]:
        return {"timeout": attempts.timeout_s(), "metadata": tuple(self.metadata)}

    def _attempts(self) -> "Attempts":
        return Attempts(self.timeout_s, may_retry=self.max_attempts > 1)

    def _may_pass(self, error: AttnlensError) -> bool:
        """Tell whether the same call may succeed later."""
        return isinstance(error, OverloadedError) or (
            isinstance(error, UnavailableError) and self._has_answered and not self._closed
        )

    @contextmanager
    def _translated(self, first_index: int) -> Iterator[None]:
        """Raise what gRPC raises within the block as an AttnlensError. See `from_rpc_error`."""
        try:
            if self._closed:
                raise closed_error()
            yield
        except grpc.RpcError as error:
            raise (closed_error() if self._closed else self._failure(error, first_index)) from error
        except (ValueError, grpc.aio.UsageError) as error:  # what the two APIs say of a closed channel
            if not self._closed:
                raise
            raise closed_error() from error

    def _failure(self, error: "grpc.RpcError | grpc.Future[Any]", first_index: int) -> AttnlensError:
        """Return the exception for a failed call, and forget what may change while no server answers."""
        failure = from_rpc_error(error, first_index)
        if isinstance(failure, UnavailableError):
            self._models.clear()
        if isinstance(failure, DeadlineExceededError) and not failure.reason:  # gRPC has no words for it
            message = (
                f"a call to {self.address} took more than {self.timeout_s:g} s: give a larger timeout_s"
                if self._has_answered
                else f"no server answered at {self.address} within {self.timeout_s:g} s: start one there, "
                "give another address, or a larger timeout_s"
            )
            return DeadlineExceededError(message, failure.code)
        return failure

    def _remembered(self, name: str, message: "Model") -> "ModelInfo":
        """Read a model, and keep it for its limits.

        Raises:
            BadReplyError: it is not the one that was asked for, or can't be.
        """
        self._models[name] = replies.model(name, message)
        return self._models[name]

    def _result(
        self,
        plan: "Plan[Request, Response, Result]",
        responses: "dict[int, Response]",
        model: "ModelInfo | None",
    ) -> "Result":
        """Read the responses, and forget the model where another one answered.

        Raises:
            BadReplyError: a response is not what was asked for.
        """
        if model is not None and any(each.model != model.name for each in responses.values()):
            self._models.clear()
        return plan.result(responses, model)


def _check_number(name: str, value: int, most: float) -> None:
    try:
        number = operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name} is {value!r}: give a whole number") from error
    if not 1 <= number <= most:
        raise ValueError(
            f"{name} is {value}: give 1 or more" + (f", up to {most}" if most < math.inf else "")
        )


def closed_error() -> AttnlensError:
    """Return what a call on a closed client raises."""
    return AttnlensError("the client was closed", grpc.StatusCode.CANCELLED)


def service_config(max_attempts: int, wait_for_ready: bool) -> dict[str, Any]:
    """Return the gRPC service config: what to retry, how often, and when to give up."""
    method: dict[str, Any] = {"name": [{"service": SERVICE}], "waitForReady": wait_for_ready}
    if max_attempts > 1:
        method["retryPolicy"] = {
            "maxAttempts": max_attempts,
            "initialBackoff": "0.2s",
            "maxBackoff": "5s",
            "backoffMultiplier": 2,
            "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
        }
    # Each failure takes a token and each success gives one back; no retries below half of them.
    return {"methodConfig": [method], "retryThrottling": {"maxTokens": 1000, "tokenRatio": 1.0}}


class Attempts:
    """The attempts of one call, from now to its deadline."""

    def __init__(self, timeout_s: float | None, *, may_retry: bool) -> None:
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._may_retry = may_retry
        self._delay_s = _FIRST_DELAY_S

    def timeout_s(self) -> float | None:
        """Return what is left of the deadline, for the next attempt. None: there is no deadline."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def delay_s(self, error: AttnlensError) -> float:
        """Return how long to wait before the next attempt.

        Raises:
            AttnlensError: `error`, where the deadline leaves no time for one.
        """
        self._delay_s = min(2 * self._delay_s, _MAX_DELAY_S)
        delay_s = self._delay_s * random.uniform(0.5, 1.0)  # noqa: S311 - spreads load, guards no secret
        left_s = self.timeout_s()
        if not self._may_retry or (left_s is not None and left_s <= delay_s):
            raise error
        return delay_s
