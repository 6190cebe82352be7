"""What the calls of one client share: its limits, the models seen, and when a failed call is made again.

gRPC's own retries bridge a moment in which no server is there: five attempts. A server that is overloaded or
restarts may take longer, so `Attempts` goes on until the call's deadline, with growing random delays, so that
many clients do not come back together, and not before the server says.
"""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc

from attnlens.v1.model_pb2 import Model
from attnlens_client.core import models
from attnlens_client.errors import (
    AttnlensError,
    DeadlineExceededError,
    OverloadedError,
    RateLimitedError,
    ServerError,
    Trouble,
    UnavailableError,
    from_rpc_error,
    trouble_of,
)
from attnlens_client.model_info import ModelInfo

_FIRST_DELAY_S = 0.1
_MAX_DELAY_S = 5.0


@dataclass(slots=True, kw_only=True)
class Session:
    """The settings and the memory of one client. Threads share it: each field changes as a whole.

    Attributes:
        address, timeout_s, batch_size, max_in_flight: as in `Connection`.
        may_retry: whether a call may be made again at all.
        uses_tls: whether the connection is encrypted.
        clock: seconds that never go back.
        spread: a random share of a delay, from 0.5 to 1.
        models: those seen, by the name asked for. Their limits serve to split requests; a server that comes
            up again may have others, so nothing else is taken from here, and a refusal asks for them again.
        has_answered: whether a server has ever answered.
    """

    address: str
    timeout_s: float | None
    batch_size: int
    max_in_flight: int
    may_retry: bool
    uses_tls: bool = False
    clock: Callable[[], float] = time.monotonic
    spread: Callable[[], float] = lambda: random.uniform(0.5, 1.0)  # noqa: S311 - spreads load, guards no secret
    models: Mapping[str, ModelInfo] = field(default_factory=dict)
    has_answered: bool = False
    may_come_back: bool = True  # a model in this process does not, once its engine has stopped

    def remember(self, name: str, message: Model) -> ModelInfo:
        """Read a model, and keep it for its limits.

        Raises:
            BadReplyError: it is not the one that was asked for, or can't be.
        """
        model = models.model(name, message)
        self.models = {**self.models, name: model}  # a new dictionary, since other threads may read this one
        return model

    def forget_if_replaced(self, model: ModelInfo | None, responses: Mapping[int, Any]) -> None:
        """Forget the models where another one has answered than `model`, by whose limits calls were made."""
        known = None if model is None else {(model.name, model.version)}
        found = {(response.model, response.model_version) for response in responses.values()}
        if known is not None and found and found != known:
            self.models = {}

    def may_pass(self, error: AttnlensError) -> bool:
        """Tell whether the same call may succeed later: the server says so, or did answer before."""
        return (
            error.retry_delay_s is not None
            or isinstance(error, OverloadedError | RateLimitedError)
            or (isinstance(error, UnavailableError) and self.has_answered and self.may_come_back)
        )

    def failure(self, error: grpc.RpcError, first_index: int) -> AttnlensError:
        """Return the exception for a failed call, and forget what may change while no server answers."""
        failure = from_rpc_error(error, first_index)
        if isinstance(failure, UnavailableError):
            self.models = {}
        # gRPC has no words for it. Without a deadline of ours, the words are those of whoever had one.
        if isinstance(failure, DeadlineExceededError) and not failure.reason and self.timeout_s is not None:
            message = (
                f"a call to {self.address} took more than {self.timeout_s:g} s: give a larger timeout_s"
                if self.has_answered
                else f"no server answered at {self.address} within {self.timeout_s:g} s: start one there, "
                "give another address, or a larger timeout_s"
            )
            failure = DeadlineExceededError(message, failure.code)
        if not failure.reason and self._is_of_no_server(failure):
            failure = type(failure)(self._where_no_server_is(error, failure), failure.code)
        failure.__cause__ = error
        return failure

    def _is_of_no_server(self, failure: AttnlensError) -> bool:
        """Whether no attnlens server has answered. Other faults of servers have messages of their own."""
        is_unknown_method = failure.code is grpc.StatusCode.UNIMPLEMENTED and not self.has_answered
        return isinstance(failure, UnavailableError) or is_unknown_method

    def _where_no_server_is(self, error: grpc.RpcError, failure: AttnlensError) -> str:
        answered = isinstance(failure, ServerError)
        trouble, cause = trouble_of(error, answered=answered, uses_tls=self.uses_tls)
        start = "start one with `attnlens serve DIR`, or give another address"
        match trouble:
            case Trouble.OTHER_TLS:
                remedy = "check the credentials, or leave them out for a server without TLS"
                message = f"no TLS with {self.address}: {remedy}"
            case Trouble.OTHER_PROGRAM:
                remedy = "give another address, or credentials where the server uses TLS"
                message = f"the program at {self.address} is not an attnlens server: {remedy}"
            case Trouble.NO_SERVER_OR_TLS:
                message = f"no server answers at {self.address}: {start}, or credentials for TLS"
            case _:
                message = f"no server answers at {self.address}: {start}"
        return f"{message} ({cause})" if cause else message


class Attempts:
    """The attempts of one call, from now to its deadline."""

    def __init__(self, session: Session) -> None:
        self._session = session
        timeout_s = session.timeout_s
        self._deadline = None if timeout_s is None else session.clock() + timeout_s
        self._delay_s = _FIRST_DELAY_S

    def timeout_s(self) -> float | None:
        """Return what is left of the deadline, for the next attempt. None: there is no deadline."""
        return None if self._deadline is None else max(0.0, self._deadline - self._session.clock())

    def delay_s(self, error: AttnlensError) -> float:
        """Return how long to wait before the next attempt: as long as the server says, if that is longer.

        Raises:
            AttnlensError: `error`, where it will not pass or the deadline leaves no time for an attempt.
        """
        self._delay_s = min(2 * self._delay_s, _MAX_DELAY_S)
        delay_s = max(self._delay_s * self._session.spread(), error.retry_delay_s or 0.0)
        left_s = self.timeout_s()
        is_last = not self._session.may_retry or (left_s is not None and left_s <= delay_s)
        if is_last or not self._session.may_pass(error):
            raise error
        return delay_s
