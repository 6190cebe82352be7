"""The methods of the client as steps: many calls, a few at a time, each made again while that may help.

See events.py.
"""

import heapq
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from google.protobuf.message import Message

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens_client.core import models, splitting
from attnlens_client.core.events import Cancel, Ended, Event, Failed, Item, Method, Reply, Start, Steps, Wait
from attnlens_client.core.explanations.plans import ComparePlan
from attnlens_client.core.plans import EncodePlan, Plan, Request, Response, Result
from attnlens_client.core.replies import EncodeReader
from attnlens_client.core.session import Attempts, Session
from attnlens_client.core.streams import Assembler, StreamReader
from attnlens_client.errors import InvalidRequestError
from attnlens_client.explanations import Comparison
from attnlens_client.model_info import ModelInfo
from attnlens_client.results import EncodedText, HeadPart, LayerPart

_T = TypeVar("_T")
# Steps that end with a value of their own, for the steps around them.
_Part: TypeAlias = Generator[Start | Wait | Cancel, Event | None, _T]


@dataclass(frozen=True, slots=True)
class _Running:
    """A call that runs or waits for its next attempt, and what it takes to make it again."""

    request: Message
    attempts: Attempts


def run(session: Session, plan: Plan[Request, Response, Result]) -> Steps[Result]:
    """Make the calls of a plan and hand out its result, the only item."""
    known = None if plan.needs_fresh_model else session.models.get(plan.model)
    model = known
    if model is None and plan.needs_model:
        model = yield from _model(session, plan.model)
    try:
        responses = yield from _call_all(session, plan, model)
    except InvalidRequestError:
        # The known limits may be those of a server that was there before.
        yield Cancel()
        if known is None or (model := (yield from _model(session, plan.model))) == known:
            raise
        responses = yield from _call_all(session, plan, model)
    session.forget_if_replaced(model, responses)
    yield Item(plan.result(responses, model))


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


def stream_parts(session: Session, plan: EncodePlan) -> Steps[HeadPart | LayerPart]:
    """Hand out the parts of each text as they come."""
    return _stream(session, plan, lambda part: [part])


def stream(session: Session, plan: EncodePlan) -> Steps[EncodedText]:
    """Hand out each text when all its parts have come."""
    return _stream(session, plan, Assembler(plan.queries).add)


def _model(session: Session, name: str) -> _Part[ModelInfo]:
    response = yield from _call(session, "GetModel", pb.GetModelRequest(model=name))
    return session.remember(name, response.model)


def _call(session: Session, method: Method, request: Message) -> _Part[Any]:
    responses = yield from _calls(session, method, [(0, request)], limit=1)
    return responses[0]


def _call_all(
    session: Session, plan: Plan[Request, Response, Result], model: ModelInfo | None
) -> _Part[dict[int, Response]]:
    limit = splitting.calls_at_a_time(session.max_in_flight, session.batch_size, model)
    return (yield from _calls(session, plan.method, plan.requests(model, session.batch_size), limit))


def _calls(
    session: Session, method: Method, requests: Iterable[tuple[int, Message]], limit: int
) -> _Part[dict[int, Any]]:
    """Make calls, `limit` at a time, and return the responses by the number of their first text."""
    waiting = iter(requests)
    running: dict[int, _Running] = {}
    resting: list[tuple[float, int]] = []  # of those running, by the time of the next attempt
    responses: dict[int, Any] = {}

    def start(first: int) -> Start:
        call = running[first]
        return Start(first, method, call.request, call.attempts.timeout_s())

    while True:
        while len(running) < limit and (following := next(waiting, None)) is not None:
            first, request = following
            running[first] = _Running(request, Attempts(session))
            yield start(first)
        if not running:
            return responses
        event = yield Wait(max(0.0, resting[0][0] - session.clock()) if resting else None)
        if isinstance(event, Reply):
            session.has_answered = True
            responses[event.call_id] = event.message
            del running[event.call_id]
        elif isinstance(event, Failed):
            error = session.failure(event.error, event.call_id)
            delay_s = running[event.call_id].attempts.delay_s(error)
            heapq.heappush(resting, (session.clock() + delay_s, event.call_id))
        elif resting:
            yield start(heapq.heappop(resting)[1])


def _stream(
    session: Session, plan: EncodePlan, complete: Callable[[HeadPart | LayerPart], Iterable[_T]]
) -> Steps[_T]:
    """Hand out what `complete` makes of the parts of all texts."""
    # Asked for each time: what a stream has yielded can't be taken back when a limit has changed.
    model = (yield from _model(session, plan.model)) if plan.needs_model else None
    texts = EncodeReader(plan.template, plan.queries)
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
