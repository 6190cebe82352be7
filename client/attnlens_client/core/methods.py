"""The methods of the client as steps: many calls, a few at a time, each made again while that may help.

See events.py.
"""

import heapq
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeAlias, TypeVar

from google.protobuf.message import Message

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens_client.core import models, splitting
from attnlens_client.core.events import Cancel, Ended, Event, Failed, Item, Method, Reply, Start, Steps, Wait
from attnlens_client.core.explanations.plans import ComparePlan
from attnlens_client.core.plans import EmbedIterPlan, EmbedPlan, EncodePlan, Plan, Request, Response, Result
from attnlens_client.core.replies import EncodeReader
from attnlens_client.core.session import Attempts, Session
from attnlens_client.core.streams import Assembler, StreamReader
from attnlens_client.errors import InvalidRequestError
from attnlens_client.explanations import Comparison
from attnlens_client.model_info import ModelInfo
from attnlens_client.progress import Report, reporting
from attnlens_client.results import AttentionPart, Embeddings, EncodedText, TextPart

_T = TypeVar("_T")
# Steps that end with a value of their own, for the steps around them.
_Part: TypeAlias = Generator[Start | Wait | Cancel, Event | None, _T]


def run(session: Session, plan: Plan[Request, Response, Result]) -> Steps[Result]:
    """Make the calls of a plan and hand out its result, the only item."""
    known = None if plan.needs_fresh_model else session.models.get(plan.model)
    model = known
    if model is None and plan.needs_model:
        model = yield from _model(session, plan.model)
    with reporting(plan.progress) as report:
        try:
            responses = yield from _call_all(session, plan, model, report)
        except InvalidRequestError:
            # The known limits may be those of a server that was there before.
            yield Cancel()
            if known is None or (model := (yield from _model(session, plan.model))) == known:
                raise
            responses = yield from _call_all(session, plan, model, report)
    session.forget_if_replaced(model, responses)
    yield Item(plan.result(responses, model))


def embed_iter(session: Session, plan: EmbedIterPlan) -> Steps[Embeddings]:
    """Hand out the vectors of each call in the order of the texts, which are read a few calls ahead."""
    batch_size, limit = plan.batch_size or session.batch_size, plan.in_flight or session.max_in_flight
    model = yield from _model(session, plan.template.model)
    limit = splitting.calls_at_a_time(limit, batch_size, model)
    waiting = (
        (batch, *call) for batch in plan.batches(batch_size) for call in batch.requests(model, batch_size)
    )
    calls = _Calls(session, "Embed")
    order: deque[tuple[EmbedPlan, int, int]] = deque()  # those that were started and not handed out
    came: dict[int, pb.EmbedResponse] = {}
    with reporting(plan.progress) as report:
        report(0, plan.total)
        while True:
            while len(order) < limit and (following := next(waiting, None)) is not None:
                batch, first, request = following
                order.append((batch, first, len(request.inputs)))
                yield calls.start(first, request)
            if not order:
                return
            batch, first, count = order.popleft()
            while first not in came:
                number, response = yield from calls.next_reply()
                came[number] = response
            result = batch.parse([(first, count, came.pop(first))], model)
            report(first + count, plan.total)
            yield Item(result)


def compare(session: Session, plan: ComparePlan) -> Steps[Comparison]:
    """Compare two texts in one call."""
    yield Item(plan.parse((yield from _call(session, "Compare", plan.request))))


def get_model(session: Session, name: str) -> Steps[ModelInfo]:
    """Ask for one model; "" is the server's only one."""
    yield Item((yield from _model(session, name)))


def list_models(session: Session) -> Steps[list[ModelInfo]]:
    """Ask for all models."""
    response = yield from _call(session, "ListModels", pb.ListModelsRequest())
    yield Item([models.model("", message) for message in response.models])


def encode_stream_parts(session: Session, plan: EncodePlan) -> Steps[TextPart | AttentionPart]:
    """Hand out the parts of each text as they come."""
    return _stream(session, plan, lambda part: [part])


def encode_stream(session: Session, plan: EncodePlan) -> Steps[EncodedText]:
    """Hand out each text when all its parts have come."""
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
    """Make the calls of a plan, some at a time; return the responses by the number of their first text."""
    limit = splitting.calls_at_a_time(session.max_in_flight, session.batch_size, model)
    waiting = plan.requests(model, session.batch_size)
    calls = _Calls(session, plan.method)
    num_texts: dict[int, int] = {}
    responses: dict[int, Response] = {}
    num_done = 0
    report(0, len(plan.inputs))
    while True:
        while len(calls) < limit and (following := next(waiting, None)) is not None:
            first, request = following
            num_texts[first] = len(request.inputs)
            yield calls.start(first, request)
        if not len(calls):
            return responses
        first, responses[first] = yield from calls.next_reply()
        num_done += num_texts[first]
        report(num_done, len(plan.inputs))


class _Calls:
    """Calls of one method that run or wait for their next attempt, by the number of their first text."""

    def __init__(self, session: Session, method: Method) -> None:
        self._session = session
        self._method = method
        self._running: dict[int, tuple[Message, Attempts]] = {}
        self._resting: list[tuple[float, int]] = []  # of those running, by the time of the next attempt

    def __len__(self) -> int:
        return len(self._running)

    def start(self, first: int, request: Message) -> Start:
        """Return the command that starts a new call."""
        self._running[first] = request, Attempts(self._session)
        return self._start(first)

    def _start(self, first: int) -> Start:
        request, attempts = self._running[first]
        return Start(first, self._method, request, attempts.timeout_s())

    def next_reply(self) -> _Part[tuple[int, Any]]:
        """Wait for the next reply, and return it behind its number. A call that may pass is made again."""
        session, resting = self._session, self._resting
        while True:
            event = yield Wait(max(0.0, resting[0][0] - session.clock()) if resting else None)
            if isinstance(event, Reply):
                session.has_answered = True
                del self._running[event.call_id]
                return event.call_id, event.message
            if isinstance(event, Failed):
                error = session.failure(event.error, event.call_id)
                _, attempts = self._running[event.call_id]
                delay_s = attempts.delay_s(error)
                heapq.heappush(resting, (session.clock() + delay_s, event.call_id))
            elif resting:
                yield self._start(heapq.heappop(resting)[1])


def _stream(
    session: Session, plan: EncodePlan, complete: Callable[[TextPart | AttentionPart], Iterable[_T]]
) -> Steps[_T]:
    """Hand out what `complete` makes of the parts of all texts."""
    # Asked for each time: what a stream has yielded can't be taken back when a limit has changed.
    model = (yield from _model(session, plan.model)) if plan.needs_model else None
    texts = EncodeReader(plan.template, plan.inputs, plan.queries)
    for first, request in plan.requests(model, session.batch_size):
        reader = StreamReader(texts, first, len(request.inputs))
        for_stream = pb.EncodeStreamRequest.FromString(request.SerializeToString())  # the same fields
        attempts, has_begun = Attempts(session), False
        yield Start(first, "EncodeStream", for_stream, attempts.timeout_s())
        while not isinstance(event := (yield Wait()), Ended):
            if isinstance(event, Reply):
                session.has_answered = has_begun = True
                for item in complete(reader.part(event.message)):
                    yield Item(item)
            elif isinstance(event, Failed):
                error = session.failure(event.error, first)
                if has_begun:  # what was handed out can't be taken back
                    raise error
                yield Wait(attempts.delay_s(error))
                yield Start(first, "EncodeStream", for_stream, attempts.timeout_s())
        reader.finish()
