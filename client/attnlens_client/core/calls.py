"""The methods of the client as steps: calls, retries and progress.

gRPC retries UNAVAILABLE up to five times, which bridges a moment without a server, except for streams.
`Attempts` also retries calls that an overloaded or restarting server rejects, until the deadline of the call,
with increasing random delays and not before the server's retry delay.
"""

import heapq
import random
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.model_pb2 import Model
from attnlens_client.core import models, requests, splitting
from attnlens_client.core.events import Cancel, Ended, Event, Failed, Item, Method, Reply, Start, Steps, Wait
from attnlens_client.core.plans import (
    ComparePlan,
    EmbedIterPlan,
    EmbedPlan,
    EncodePlan,
    Plan,
    Request,
    Response,
    Result,
)
from attnlens_client.core.streams import Assembler, EncodeReader, StreamReader
from attnlens_client.errors import (
    AttnlensError,
    ConnectionFailure,
    ConnectionProblem,
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    RateLimitedError,
    UnavailableError,
    connection_problem,
    from_rpc_error,
    is_reset,
)
from attnlens_client.explanations import Comparison
from attnlens_client.model_info import ModelInfo
from attnlens_client.progress import Report, reporting
from attnlens_client.results import AttentionPart, Embeddings, EncodedText, TextPart

_FIRST_DELAY_S = 0.1
_MAX_DELAY_S = 5.0
# Between attempts to reach a server that does not answer, so that a restarted one is used soon.
_MAX_AWAY_DELAY_S = 2.0

# What a problem means if the server has answered before.
_LATER = {
    ConnectionProblem.NO_SERVER: ConnectionProblem.NOT_REACHABLE,
    ConnectionProblem.NO_SERVER_OR_TLS: ConnectionProblem.LOST,
    ConnectionProblem.NO_SERVER_OR_CERTIFICATE: ConnectionProblem.LOST,
}
# A proxy can cause these problems.
_PROXIED = (
    ConnectionProblem.NO_SERVER,
    ConnectionProblem.NO_SERVER_OR_TLS,
    ConnectionProblem.NOT_REACHABLE,
    ConnectionProblem.UNKNOWN_HOST,
)


@dataclass(slots=True, kw_only=True)
class Session:
    """Settings and state of one client. Threads share it, so each field is replaced as a whole.

    Attributes:
        address, timeout_s, batch_size, max_in_flight, max_attempts: See `Connection`.
        uses_tls: Whether the connection is encrypted.
        proxy: Proxy that the environment sets for this address, or "".
        clock: Monotonic clock in seconds.
        jitter: Returns a random factor from 0.5 to 1 for delays.
        models: Cached models by requested name. Only their limits are used, to split requests. They are
            requested again when the server rejects a request, since a restarted server may have different
            limits.
        has_answered: Whether a server has ever answered.
        may_restart: Whether an unavailable server may become available again. False for models in this
            process.
    """

    address: str
    timeout_s: float | None
    batch_size: int
    max_in_flight: int
    max_attempts: int
    uses_tls: bool = False
    proxy: str = ""
    clock: Callable[[], float] = time.monotonic
    jitter: Callable[[], float] = lambda: random.uniform(0.5, 1.0)  # noqa: S311 - not for security
    models: Mapping[str, ModelInfo] = field(default_factory=dict)
    has_answered: bool = False
    may_restart: bool = True

    def remember(self, name: str, message: Model) -> ModelInfo:
        """Cache and return a model.

        Raises:
            BadReplyError: The reply is invalid, or has a different model.
        """
        model = models.model(name, message)
        self.models = {**self.models, name: model}  # other threads may read the old dictionary
        return model

    def forget_if_replaced(self, model: ModelInfo | None, responses: Mapping[int, Any]) -> None:
        """Clear the cache if a different model than `model` has answered."""
        expected = None if model is None else {(model.name, model.version)}
        actual = {(response.model, response.model_version) for response in responses.values()}
        if expected is not None and actual and actual != expected:
            self.models = {}

    def is_transient(self, error: AttnlensError) -> bool:
        """Return whether a retry may succeed."""
        is_away = isinstance(error, UnavailableError) or is_reset(error)
        return (
            error.retry_delay_s is not None
            or isinstance(error, OverloadedError | RateLimitedError)
            or (is_away and self.has_answered and self.may_restart)
        )

    def failure(
        self, error: grpc.RpcError, first_index: int, *, is_connected: bool = True, elapsed_s: float = 0.0
    ) -> AttnlensError:
        """Return the exception for a failed call. Clears the cache if the server is unavailable.

        Args:
            error: Error of gRPC.
            first_index: The caller's index of the first text of the call.
            is_connected: See `Failed`.
            elapsed_s: Duration of all attempts of the call in seconds.
        """
        failure = from_rpc_error(error, first_index)
        if isinstance(failure, UnavailableError):
            self.models = {}
        found = None if failure.reason else self._connection_failure(error, failure, is_connected, elapsed_s)
        if found is not None:
            is_gone = self.has_answered and found.problem is ConnectionProblem.NOT_REACHABLE
            failure = self._connection_error(
                UnavailableError if is_gone else type(failure), failure.code, found
            )
        failure.__cause__ = error
        return failure

    def specified(
        self, error: AttnlensError, failure: ConnectionFailure, cause: grpc.RpcError
    ) -> AttnlensError:
        """Return `error`, a connection failure, after another attempt has failed with `cause`."""
        problem, details = connection_problem(cause, answered=False, uses_tls=self.uses_tls)
        is_specific = problem is not ConnectionProblem.NO_SERVER
        found = replace(failure, problem=problem if is_specific else failure.problem, cause=details)
        specified = self._connection_error(type(error), error.code, found)
        specified.__cause__ = error.__cause__
        return specified

    def _connection_error(
        self, kind: type[AttnlensError], code: grpc.StatusCode, found: ConnectionFailure
    ) -> AttnlensError:
        error = kind(found.message(self.address), code)
        error.connection = found
        if found.problem is ConnectionProblem.UNHEALTHY:
            error.retry_delay_s = 0.0
        return error

    def _connection_failure(
        self, error: grpc.RpcError, failure: AttnlensError, is_connected: bool, elapsed_s: float
    ) -> ConnectionFailure | None:
        """Return why no attnlens server has answered, or None if there is another reason."""
        cause = ""
        if isinstance(failure, DeadlineExceededError):
            if self.timeout_s is None:  # someone else has set the deadline
                return None
            problem = ConnectionProblem.SLOW if self.has_answered else ConnectionProblem.NO_ANSWER
            if is_connected:
                elapsed_s = self.timeout_s
            else:
                problem = ConnectionProblem.NOT_REACHABLE
                elapsed_s = min(elapsed_s or self.timeout_s, self.timeout_s)
        else:
            is_unknown_method = failure.code is grpc.StatusCode.UNIMPLEMENTED and not self.has_answered
            if not (isinstance(failure, UnavailableError) or is_unknown_method):
                return None
            problem, cause = connection_problem(error, answered=is_unknown_method, uses_tls=self.uses_tls)
            if self.has_answered:
                problem = _LATER.get(problem, problem)
            if problem is ConnectionProblem.NOT_REACHABLE and elapsed_s < 1:
                problem = ConnectionProblem.NO_SERVER
        if self.proxy and problem in _PROXIED:
            problem = ConnectionProblem.PROXY
        return ConnectionFailure(problem, cause, elapsed_s, self.proxy)


class Attempts:
    """Attempts of one call until its deadline.

    Args:
        session: Session.
        is_stream: Whether the call is a stream, which gRPC does not retry.
    """

    def __init__(self, session: Session, *, is_stream: bool = False) -> None:
        self._session = session
        self._left_to_connect = session.max_attempts - 1 if is_stream and session.may_restart else 0
        timeout_s = session.timeout_s
        # When the server may have become unreachable: a stream works until its first failure.
        self._away_since = None if is_stream else session.clock()
        self._deadline = None if timeout_s is None else session.clock() + timeout_s
        self._delay_s = _FIRST_DELAY_S

    def timeout_s(self) -> float | None:
        """Return the remaining time in seconds, or None if there is no deadline."""
        return None if self._deadline is None else max(0.0, self._deadline - self._session.clock())

    def failure(self, event: Failed, first_index: int) -> AttnlensError:
        """Return the exception for a failed attempt."""
        now = self._session.clock()
        self._away_since = now if self._away_since is None else self._away_since
        return self._session.failure(
            event.error, first_index, is_connected=event.is_connected, elapsed_s=now - self._away_since
        )

    def delay_s(self, error: AttnlensError) -> float:
        """Return the delay before the next attempt, in seconds.

        Raises:
            AttnlensError: `error`, if it is not transient or the deadline leaves no time for another attempt.
        """
        maximum_s = _MAX_AWAY_DELAY_S if isinstance(error, UnavailableError) else _MAX_DELAY_S
        self._delay_s = min(2 * self._delay_s, maximum_s)
        delay_s = max(self._delay_s * self._session.jitter(), error.retry_delay_s or 0.0)
        left_s = self.timeout_s()
        is_last = self._session.max_attempts == 1 or (left_s is not None and left_s <= delay_s)
        may_connect = isinstance(error, UnavailableError) and self._left_to_connect > 0
        if is_last or not (may_connect or self._session.is_transient(error)):
            raise error
        self._left_to_connect -= 1
        return delay_s


_T = TypeVar("_T")
# Steps that return a value.
_Part: TypeAlias = Generator[Start | Wait | Cancel, Event | None, _T]


def run(session: Session, plan: Plan[Request, Response, Result]) -> Steps[Result]:
    """Execute a plan and yield its result as the only item."""
    cached = None if plan.needs_fresh_model else session.models.get(plan.model)
    model = cached
    if model is None and plan.needs_model:
        model = yield from _model(session, plan.model)
    with reporting(plan.progress) as report:
        try:
            responses = yield from _call_all(session, plan, model, report)
        except InvalidRequestError:
            # The cached limits may be those of a previous server at this address.
            yield Cancel()
            if cached is None or (model := (yield from _model(session, plan.model))) == cached:
                raise
            responses = yield from _call_all(session, plan, model, report)
    session.forget_if_replaced(model, responses)
    yield Item(plan.result(responses, model))


def embed_iter(session: Session, plan: EmbedIterPlan) -> Steps[Embeddings]:
    """Yield the embeddings of each call in the order of the texts."""
    batch_size, limit = plan.batch_size or session.batch_size, plan.in_flight or session.max_in_flight
    model = yield from _model(session, plan.template.model)
    limit = splitting.max_concurrent_calls(limit, batch_size, model)
    remaining = (
        (batch, *call) for batch in plan.batches(batch_size) for call in batch.requests(model, batch_size)
    )
    calls = _Calls(session, "Embed")
    started: deque[tuple[EmbedPlan, int, int]] = deque()
    received: dict[int, pb.EmbedResponse] = {}
    with reporting(plan.progress) as report:
        report(0, plan.total)
        while True:
            while len(started) < limit and (following := next(remaining, None)) is not None:
                batch, first, request = following
                started.append((batch, first, len(request.inputs)))
                yield calls.start(first, request)
            if not started:
                return
            batch, first, count = started.popleft()
            while first not in received:
                call_id, response = yield from calls.next_reply()
                received[call_id] = response
            result = batch.parse([(first, count, received.pop(first))], model)
            report(first + count, plan.total)
            yield Item(result)


def compare(session: Session, plan: ComparePlan) -> Steps[Comparison]:
    """Compare two texts."""
    yield Item(plan.parse((yield from _call(session, "Compare", plan.request))))


def get_model(session: Session, name: str) -> Steps[ModelInfo]:
    """Request one model. An empty name selects the default model."""
    yield Item((yield from _model(session, name)))


def list_models(session: Session) -> Steps[list[ModelInfo]]:
    """Request all models."""
    response = yield from _call(session, "ListModels", pb.ListModelsRequest())
    yield Item([models.model("", message) for message in response.models])


def encode_stream_parts(session: Session, plan: EncodePlan) -> Steps[TextPart | AttentionPart]:
    """Yield the parts of each text as they arrive."""
    return _stream(session, plan, lambda part: [part])


def encode_stream(session: Session, plan: EncodePlan) -> Steps[EncodedText]:
    """Yield each text once it is complete."""
    return _stream(session, plan, Assembler(plan.queries).add)


def _model(session: Session, name: str) -> _Part[ModelInfo]:
    response = yield from _call(session, "GetModel", pb.GetModelRequest(model=name))
    return session.remember(name, response.model)


def _call(session: Session, method: Method, request: Message) -> _Part[Any]:
    calls = _Calls(session, method)
    yield calls.start(0, request)
    _, response = yield from calls.next_reply()
    return response


def _call_all(
    session: Session, plan: Plan[Request, Response, Result], model: ModelInfo | None, report: Report
) -> _Part[dict[int, Response]]:
    """Execute the calls of a plan and return the responses by the index of their first text."""
    limit = splitting.max_concurrent_calls(session.max_in_flight, session.batch_size, model)
    remaining = plan.requests(model, session.batch_size)
    calls = _Calls(session, plan.method)
    num_texts: dict[int, int] = {}
    responses: dict[int, Response] = {}
    num_done = 0
    report(0, len(plan.inputs))
    while True:
        while len(calls) < limit and (following := next(remaining, None)) is not None:
            first, request = following
            num_texts[first] = requests.num_inputs(request)
            yield calls.start(first, request)
        if not len(calls):
            return responses
        first, responses[first] = yield from calls.next_reply()
        num_done += num_texts[first]
        report(num_done, len(plan.inputs))


class _Calls:
    """Running calls of one method, including those that wait for a retry. IDs are indices of first texts."""

    def __init__(self, session: Session, method: Method) -> None:
        self._session = session
        self._method = method
        self._running: dict[int, tuple[Message, Attempts]] = {}
        self._retries: list[tuple[float, int]] = []  # heap of (time of the next attempt, call ID)

    def __len__(self) -> int:
        return len(self._running)

    def start(self, first: int, request: Message) -> Start:
        """Return the command that starts a call."""
        self._running[first] = request, Attempts(self._session)
        return self._start(first)

    def _start(self, first: int) -> Start:
        request, attempts = self._running[first]
        return Start(first, self._method, request, attempts.timeout_s())

    def next_reply(self) -> _Part[tuple[int, Any]]:
        """Return the ID and the reply of the next completed call. Retries transient failures."""
        session, retries = self._session, self._retries
        while True:
            event = yield Wait(max(0.0, retries[0][0] - session.clock()) if retries else None)
            if isinstance(event, Reply):
                session.has_answered = True
                del self._running[event.call_id]
                return event.call_id, event.message
            if isinstance(event, Failed):
                _, attempts = self._running[event.call_id]
                delay_s = attempts.delay_s(attempts.failure(event, event.call_id))
                heapq.heappush(retries, (session.clock() + delay_s, event.call_id))
            elif retries:
                yield self._start(heapq.heappop(retries)[1])


def _stream(
    session: Session, plan: EncodePlan, complete: Callable[[TextPart | AttentionPart], Iterable[_T]]
) -> Steps[_T]:
    """Yield the items that `complete` returns for each part, which it receives once and in order.

    After a failure, a stream continues at the first text that has not been received completely.
    """
    # Not from the cache: a stream cannot be restarted with new limits after it has yielded items.
    model = (yield from _model(session, plan.model)) if plan.needs_model else None
    texts = EncodeReader(plan.template, plan.inputs, plan.queries)
    for first, request in plan.requests(model, session.batch_size):
        for_stream = pb.EncodeStreamRequest.FromString(request.SerializeToString())  # the same fields
        reader, attempts = StreamReader(texts, first, len(request.inputs)), Attempts(session, is_stream=True)
        num_repeated = 0  # parts that are received again
        yield Start(first, "EncodeStream", for_stream, attempts.timeout_s())
        while not isinstance(event := (yield Wait()), Ended):
            if isinstance(event, Reply):
                session.has_answered = True
                part = reader.part(event.message)
                if num_repeated:
                    num_repeated -= 1
                    continue
                for item in complete(part):
                    yield Item(item)
            elif isinstance(event, Failed):
                error = attempts.failure(event, reader.first)
                if reader.is_complete:
                    break
                yield Wait(attempts.delay_s(error))
                num_repeated += reader.num_unfinished_parts
                reader = reader.rest()
                for_stream = _without_texts(for_stream, len(for_stream.inputs) - reader.count)
                yield Start(first, "EncodeStream", for_stream, attempts.timeout_s())
        reader.finish()


def _without_texts(request: pb.EncodeStreamRequest, count: int) -> pb.EncodeStreamRequest:
    """Return a copy without the first texts."""
    rest = pb.EncodeStreamRequest()
    rest.CopyFrom(request)
    del rest.inputs[:count]
    return rest
