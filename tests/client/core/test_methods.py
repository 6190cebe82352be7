"""The sans-I/O core, driven by a simulated clock and scripted responses."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import pytest

import scripted
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens_client import (
    AttentionQuery,
    BadReplyError,
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    RateLimitedError,
    UnavailableError,
)
from attnlens_client.core import calls, plans
from attnlens_client.core.calls import Attempts, Session
from attnlens_client.core.events import Cancel, Ended, Event, Failed, Item, Reply, Start, Steps

_T = TypeVar("_T")


class Refusal(grpc.RpcError):
    """A failed call, as reported by gRPC."""

    def __init__(
        self, code: grpc.StatusCode, message: str = "", reason: str = "", *told: Any, **details: Any
    ) -> None:
        self._code, self._message = code, message
        self._details = scripted.error_details(reason, *told, **details).SerializeToString()

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._message

    def trailing_metadata(self) -> Any:
        return (("attnlens-error-bin", self._details),)


OVERLOADED = Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", "OVERLOADED")
AWAY = Refusal(grpc.StatusCode.UNAVAILABLE, "away")
LATE = Refusal(grpc.StatusCode.DEADLINE_EXCEEDED)


@dataclass
class Simulation:
    """Driver without I/O: `answer` returns the events of each call.

    Attributes:
        now: Simulated time. It advances only while the core waits.
        pick: Selects the index of the next event to deliver.
        log: Requests of the core.
    """

    answer: Callable[[Start], list[Event]]
    now: float = 0.0
    pick: Callable[[list[Event]], int] = lambda _: 0
    log: list[Start | float] = field(default_factory=list)
    most_running: int = 0

    def session(self, **settings: Any) -> Session:
        settings = {
            "address": "there:1",
            "timeout_s": 60.0,
            "batch_size": 128,
            "max_in_flight": 4,
            "max_attempts": 5,
            **settings,
        }
        return Session(**settings, clock=lambda: self.now, jitter=lambda: 1.0)

    def items(self, steps: Steps[_T]) -> Iterator[_T]:
        ready: list[Event] = []
        event: Event | None = None
        while True:
            try:
                command = steps.send(event)
            except StopIteration:
                return
            event = None
            if isinstance(command, Item):
                yield command.value
            elif isinstance(command, Start):
                self.log.append(command)
                ready += self.answer(command)
                self.most_running = max(self.most_running, len(ready))
            elif isinstance(command, Cancel):
                ready.clear()
            elif ready:
                event = ready.pop(self.pick(ready))
            else:
                assert command.seconds is not None, "the core waits for ever"
                self.log.append(command.seconds)
                self.now += command.seconds

    @property
    def methods(self) -> list[str]:
        return [entry.method for entry in self.log if isinstance(entry, Start)]

    @property
    def waits(self) -> list[float]:
        return [entry for entry in self.log if isinstance(entry, float)]


def served(start: Start, **limits: int) -> list[Event]:
    """Return the response of the scripted server."""
    if start.method == "GetModel":
        return [Reply(start.call_id, pb.GetModelResponse(model=scripted.model(**limits)))]
    if start.method == "EncodeStream":
        parts = scripted.streamed(start.request)
        return [*(Reply(start.call_id, part) for part in parts), Ended(start.call_id)]
    return [Reply(start.call_id, scripted.vectors(start.request))]


def failing(*errors: Refusal, method: str = "Embed") -> Callable[[Start], list[Event]]:
    """Fail the first calls of a method, then respond normally."""
    left = iter(errors)

    def answer(start: Start) -> list[Event]:
        error = next(left, None) if start.method == method else None
        return served(start) if error is None else [Failed(start.call_id, error)]

    return answer


def test_one_short_text_takes_one_call() -> None:
    simulation = Simulation(served)
    [result] = simulation.items(calls.run(simulation.session(), plans.embed(["abc"])))
    assert result.vectors.tolist() == [[3.0] * 4]
    assert simulation.methods == ["Embed"]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_results_keep_text_order_when_calls_finish_out_of_order(order: tuple[int, ...]) -> None:
    simulation = Simulation(served)
    ranks = dict(enumerate(order))
    simulation.pick = lambda ready: min(
        range(len(ready)), key=lambda place: ranks.get(ready[place].call_id, 0)
    )
    session = simulation.session(batch_size=1)
    [result] = simulation.items(calls.run(session, plans.embed(["a", "bb", "ccc"])))
    assert result.vectors[:, 0].tolist() == [1, 2, 3]
    assert simulation.methods == ["GetModel", *["Embed"] * 3]
    assert simulation.most_running == 3


def test_concurrent_calls_are_limited() -> None:
    simulation = Simulation(served)
    session = simulation.session(batch_size=1, max_in_flight=2)
    list(simulation.items(calls.run(session, plans.embed(["a"] * 9))))
    assert simulation.methods.count("Embed") == 9
    assert simulation.most_running == 2


def test_overload_is_retried_with_exponential_backoff() -> None:
    simulation = Simulation(failing(*[OVERLOADED] * 8))
    [result] = simulation.items(calls.run(simulation.session(), plans.embed(["abc"])))
    assert result.vectors.shape == (1, 4)
    assert simulation.waits == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0])
    timeouts = [entry.timeout_s for entry in simulation.log if isinstance(entry, Start)]
    assert timeouts == pytest.approx([60, 59.8, 59.4, 58.6, 57, 53.8, 48.8, 43.8, 38.8])


def test_retry_waits_for_the_delay_from_the_server() -> None:
    soon = Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "soon", "RATE_LIMITED", retry_delay_s=3.0)
    simulation = Simulation(failing(soon, soon, OVERLOADED))
    list(simulation.items(calls.run(simulation.session(), plans.embed(["abc"]))))
    assert simulation.waits == pytest.approx([3.0, 3.0, 0.8])
    too_late = Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "tomorrow", "RATE_LIMITED", retry_delay_s=86_400)
    simulation = Simulation(failing(too_late))
    with pytest.raises(RateLimitedError, match="tomorrow"):
        list(simulation.items(calls.run(simulation.session(), plans.embed(["abc"]))))
    assert simulation.waits == []


def test_results_of_two_model_versions_are_not_mixed() -> None:
    versions = iter(["1", "2"])

    def answer(start: Start) -> list[Event]:
        [event] = served(start)
        assert isinstance(event, Reply)
        if start.method == "Embed":
            event.message.model_version = next(versions)
        return [event]

    simulation = Simulation(answer)
    session = simulation.session(batch_size=1)
    with pytest.raises(BadReplyError, match=r"model version of texts\[1:2\] is '2', expected '1'"):
        list(simulation.items(calls.run(session, plans.embed(["a", "b"]))))
    assert session.models == {}


def test_stream_sends_the_same_request_as_encode() -> None:
    fields = [
        [(field.number, field.name, field.type) for field in kind.DESCRIPTOR.fields]
        for kind in (pb.EncodeRequest, pb.EncodeStreamRequest)
    ]
    assert fields[0] == fields[1]


def test_deadline_ends_retries_with_the_last_server_error() -> None:
    simulation = Simulation(failing(*[OVERLOADED] * 50))
    with pytest.raises(OverloadedError, match="full") as caught:
        list(simulation.items(calls.run(simulation.session(timeout_s=2.5), plans.embed(["abc"]))))
    assert caught.value.__cause__ is OVERLOADED
    assert simulation.waits == pytest.approx([0.2, 0.4, 0.8])  # the next delay would end after the deadline
    simulation = Simulation(failing(*[OVERLOADED] * 50))
    with pytest.raises(OverloadedError):
        list(simulation.items(calls.run(simulation.session(max_attempts=1), plans.embed(["abc"]))))
    assert simulation.waits == []


def test_retries_continue_without_a_deadline() -> None:
    simulation = Simulation(failing(*[OVERLOADED] * 500))
    session = simulation.session(timeout_s=None)
    assert len(list(simulation.items(calls.run(session, plans.embed(["abc"]))))) == 1
    assert Attempts(session).timeout_s() is None


def test_unavailable_server_is_retried_after_it_has_answered_once() -> None:
    simulation = Simulation(failing(AWAY))
    session = simulation.session()
    with pytest.raises(UnavailableError, match="away"):
        list(simulation.items(calls.run(session, plans.embed(["abc"]))))
    assert simulation.waits == []
    assert (
        len(list(simulation.items(calls.run(session, plans.embed(["abc"]))))) == 1
    )  # a successful call before the outage
    simulation.answer = failing(AWAY, AWAY)
    assert len(list(simulation.items(calls.run(session, plans.embed(["abc"]))))) == 1
    assert simulation.waits == pytest.approx([0.2, 0.4])


def test_rejected_call_is_retried_while_others_are_in_flight() -> None:
    """The oldest call never completes before the rejected call is retried."""
    held: list[Event] = []
    starts: list[int] = []

    def answer(start: Start) -> list[Event]:
        if start.method != "Embed":
            return served(start)
        starts.append(start.call_id)
        if start.call_id == 0:
            held.extend(served(start))
            return []
        return [Failed(1, OVERLOADED)] if starts.count(1) == 1 else served(start) + held

    simulation = Simulation(answer)
    steps = calls.run(simulation.session(batch_size=1), plans.embed(["oldest", "b"]))
    [result] = simulation.items(steps)
    assert result.vectors[:, 0].tolist() == [6, 1]
    assert starts == [0, 1, 1]


def test_permanent_failure_is_raised_with_the_callers_text_index() -> None:
    def answer(start: Start) -> list[Event]:
        if start.call_id != 2:
            return served(start)
        code = grpc.StatusCode.INVALID_ARGUMENT
        told = scripted.violation("inputs[0].text", "is bad", 0)
        return [Failed(2, Refusal(code, "", "INVALID_FIELD", told))]

    simulation = Simulation(answer)
    session = simulation.session(batch_size=1)
    with pytest.raises(InvalidRequestError, match=r"^texts\[2\] is bad") as caught:
        list(simulation.items(calls.run(session, plans.embed(["a", "b", "c"]))))
    assert caught.value.text_index == 2


def test_rejection_refreshes_the_limits() -> None:
    limits = {"max_inputs_per_request": 4}

    def answer(start: Start) -> list[Event]:
        if start.method == "Embed" and len(start.request.inputs) > limits["max_inputs_per_request"]:
            code = grpc.StatusCode.INVALID_ARGUMENT
            return [Failed(start.call_id, Refusal(code, "too many", "INVALID_FIELD"))]
        return served(start, **limits)

    simulation = Simulation(answer)
    session = simulation.session()
    list(simulation.items(calls.run(session, plans.embed(["a"] * 4))))
    limits["max_inputs_per_request"] = 2
    simulation.log.clear()
    [result] = simulation.items(calls.run(session, plans.embed(["a"] * 4)))
    assert result.vectors.shape == (4, 4)
    assert simulation.methods == ["Embed", "GetModel", "Embed", "Embed"]
    simulation.log.clear()
    simulation.answer = failing(*[Refusal(grpc.StatusCode.INVALID_ARGUMENT, "bad")] * 9)
    with pytest.raises(InvalidRequestError, match="bad"):  # with limits that are requested once first
        list(simulation.items(calls.run(simulation.session(), plans.embed(["a"] * 4))))
    assert simulation.methods == ["GetModel", "Embed"]


def test_earlier_calls_are_canceled_when_limits_are_refreshed() -> None:
    """The second call is rejected while the first is in flight. Its late response must be ignored."""
    refused: list[int] = []

    def answer(start: Start) -> list[Event]:
        if start.method == "Embed" and not refused and start.call_id == 2:
            refused.append(2)
            error = Refusal(grpc.StatusCode.INVALID_ARGUMENT, "too many", "INVALID_FIELD")
            return [Failed(start.call_id, error)]
        return served(start, max_text_bytes=9 + len(refused))

    simulation = Simulation(answer)
    session = simulation.session(batch_size=2)
    list(simulation.items(calls.run(session, plans.embed(["a", "b"]))))
    simulation.pick = lambda ready: len(ready) - 1  # deliver the failure first
    [result] = simulation.items(calls.run(session, plans.embed(["a", "bb", "ccc", "dddd"])))
    assert result.vectors[:, 0].tolist() == [1, 2, 3, 4]


def test_timeout_reports_whether_a_server_ever_answered() -> None:
    simulation = Simulation(failing(LATE))
    session = simulation.session(timeout_s=0.3)
    with pytest.raises(DeadlineExceededError, match=r"no server answered at there:1 within 0.3 s: start one"):
        list(simulation.items(calls.run(session, plans.embed(["a"]))))
    list(simulation.items(calls.run(session, plans.embed(["a"]))))
    simulation.answer = failing(LATE)
    with pytest.raises(DeadlineExceededError, match=r"a call to there:1 took more than 0.3 s: use a larger"):
        list(simulation.items(calls.run(session, plans.embed(["a"]))))


def test_stream_yields_each_text_when_it_is_complete() -> None:
    simulation = Simulation(served)
    steps = calls.encode_stream(simulation.session(batch_size=2), plans.encode(["a", "bb", "ccc"]))
    texts = simulation.items(steps)
    assert next(texts).num_tokens == 1
    assert simulation.methods == ["GetModel", "EncodeStream"]  # the second call starts on demand
    assert [text.num_tokens for text in texts] == [2, 3]
    assert simulation.methods == ["GetModel", "EncodeStream", "EncodeStream"]


def test_stream_is_retried_before_its_first_message() -> None:
    simulation = Simulation(failing(OVERLOADED, OVERLOADED, method="EncodeStream"))
    texts = list(simulation.items(calls.encode_stream(simulation.session(), plans.encode(["ab"]))))
    assert [text.num_tokens for text in texts] == [2]
    assert simulation.waits == pytest.approx([0.2, 0.4])


def test_first_connection_of_a_stream_is_attempted_up_to_the_maximum() -> None:
    """For other calls, gRPC makes these attempts."""
    simulation = Simulation(failing(*[AWAY] * 4, method="EncodeStream"))
    assert len(list(simulation.items(calls.encode_stream(simulation.session(), plans.encode(["ab"]))))) == 1
    simulation = Simulation(failing(*[AWAY] * 5, method="EncodeStream"))
    with pytest.raises(UnavailableError, match="no server answers at there:1"):
        list(simulation.items(calls.encode_stream(simulation.session(), plans.encode(["ab"]))))
    assert simulation.waits == pytest.approx([0.2, 0.4, 0.8, 1.6])


@pytest.mark.parametrize(
    "error",
    [
        Refusal(grpc.StatusCode.CANCELLED),
        Refusal(grpc.StatusCode.UNKNOWN, "Stream removed"),
        Refusal(grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2"),
    ],
)
def test_call_that_a_stopping_server_or_a_proxy_resets_is_retried(error: Refusal) -> None:
    simulation = Simulation(served)
    session = simulation.session()
    list(simulation.items(calls.run(session, plans.embed(["abc"]))))
    simulation.answer = failing(error)
    assert len(list(simulation.items(calls.run(session, plans.embed(["abc"]))))) == 1


UNHEALTHY = Refusal(grpc.StatusCode.UNAVAILABLE, "all failing; last error: ipv4:1.2.3.4:1: backend unhealthy")


def test_servers_that_are_starting_are_retried_until_the_deadline() -> None:
    simulation = Simulation(failing(*[UNHEALTHY] * 8))
    assert len(list(simulation.items(calls.run(simulation.session(), plans.embed(["abc"]))))) == 1
    simulation = Simulation(failing(*[UNHEALTHY] * 8))
    with pytest.raises(UnavailableError, match=r"no server at there:1 is healthy: wait"):
        list(simulation.items(calls.run(simulation.session(timeout_s=1), plans.embed(["abc"]))))


def cut(*numbers: int) -> Callable[[Start], list[Event]]:
    """Serve streams, but end one after each of these numbers of messages as if its server had been killed."""
    left = iter(numbers)

    def answer(start: Start) -> list[Event]:
        number = next(left, None) if start.method == "EncodeStream" else None
        replies = served(start)
        return replies if number is None else [*replies[:number], Failed(start.call_id, AWAY)]

    return answer


# A text and the parts of two layers: three messages for each of three texts.
STREAMED = plans.encode(["a", "bb", "ccc"], attention=AttentionQuery())


@pytest.mark.parametrize("numbers", [*((n,) for n in range(10)), *itertools.permutations((1, 2, 3, 5, 7), 3)])
def test_stream_continues_at_the_first_unfinished_text(numbers: tuple[int, ...]) -> None:
    methods: list[Any] = [calls.encode_stream, calls.encode_stream_parts]
    for method in methods:
        expected = list(Simulation(served).items(method(Simulation(served).session(), STREAMED)))
        simulation = Simulation(cut(*numbers))
        received = list(simulation.items(method(simulation.session(), STREAMED)))
        assert list(map(repr, received)) == list(map(repr, expected))
    [_, first, *more] = [entry.request for entry in simulation.log if isinstance(entry, Start)]
    assert len(first.inputs) == 3
    if numbers[0] == 9:  # all texts were complete
        assert more == []
    else:
        assert [text.text for text in more[0].inputs] == ["a", "bb", "ccc"][numbers[0] // 3 :]


def test_resumed_stream_must_have_the_same_model() -> None:
    serve, versions = cut(4), iter(["1", "2"])

    def answer(start: Start) -> list[Event]:
        events = serve(start)
        if start.method == "EncodeStream":
            version = next(versions)
            for event in events:
                if isinstance(event, Reply) and event.message.model_version:
                    event.message.model_version = version
        return events

    simulation = Simulation(answer)
    with pytest.raises(BadReplyError, match=r"model version of texts\[1\] is '2', expected '1'"):
        list(simulation.items(calls.encode_stream(simulation.session(), STREAMED)))


def test_permanent_failure_of_a_resumed_stream_has_the_callers_text_index() -> None:
    serve = cut(7)

    def answer(start: Start) -> list[Event]:
        if start.method != "EncodeStream" or len(start.request.inputs) == 3:
            return serve(start)
        told = scripted.violation("inputs[0].text", "is bad", 0)
        return [Failed(0, Refusal(grpc.StatusCode.INVALID_ARGUMENT, "", "INVALID_FIELD", told))]

    simulation = Simulation(answer)
    with pytest.raises(InvalidRequestError, match=r"^texts\[2\] is bad"):
        list(simulation.items(calls.encode_stream(simulation.session(), STREAMED)))


def test_truncated_stream_is_an_invalid_response() -> None:
    simulation = Simulation(lambda start: [*served(start)[:2], Ended(start.call_id)])
    plan = plans.encode(["ab"], attention=AttentionQuery())
    with pytest.raises(BadReplyError, match=r"1 .*, expected 2"):
        list(simulation.items(calls.encode_stream_parts(simulation.session(), plan)))


def test_model_cache_is_invalidated_when_the_model_changes() -> None:
    simulation = Simulation(served)
    session = simulation.session()
    list(simulation.items(calls.run(session, plans.embed(["a", "b"]))))
    assert list(session.models) == [""]

    def renamed(start: Start) -> list[Event]:
        [event] = served(start)
        assert isinstance(event, Reply)
        event.message.model = "other"
        return [event]

    simulation.answer = renamed
    list(simulation.items(calls.run(session, plans.embed(["a", "b"]))))
    assert session.models == {}


def test_retry_delays_of_two_clients_differ() -> None:
    session = Simulation(served).session()
    random_session = Session(address="there:1", timeout_s=None, batch_size=1, max_in_flight=1, max_attempts=5)
    fixed, spread = Attempts(session), Attempts(random_session)
    error = OverloadedError("full")
    delays = [(fixed.delay_s(error), spread.delay_s(error)) for _ in range(9)]
    assert all(most / 2 <= delay <= most for most, delay in delays)
    assert len({most / delay for most, delay in delays}) > 1


def test_models_can_be_read_while_another_thread_adds_one() -> None:
    session = Session(address="there:1", timeout_s=None, batch_size=1, max_in_flight=1, max_attempts=5)
    session.remember("", scripted.model())
    seen = iter(session.models.values())
    session.remember("scripted", scripted.model())
    assert [model.name for model in seen] == ["scripted"]
    names = iter(session.models)
    session.failure(AWAY, 0)
    assert list(names) == ["", "scripted"]
    assert not session.models
