"""How `Client` makes its calls: several at a time, each again while that may help. See async_calls.py."""

import heapq
import time
from collections.abc import Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

import grpc

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens_client import replies, splitting
from attnlens_client.connection import Attempts, Connection, closed_error
from attnlens_client.errors import AttnlensError, InvalidRequestError
from attnlens_client.plans import Plan, Request, Response, Result
from attnlens_client.results import EncodedText, HeadPart, LayerPart, ModelInfo

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


@dataclass(frozen=True, slots=True)
class _Running(Generic[_Request, _Response]):
    """A call under way, and what it takes to make it again."""

    request: _Request
    attempts: Attempts
    call: "grpc.Future[_Response]"


class Calls(Connection):
    """A connection whose calls block the calling thread."""

    def _open(self) -> None:
        options, credentials = self._grpc_options(), self.credentials
        self._channel = (
            grpc.insecure_channel(self.address, options)
            if credentials is None
            else grpc.secure_channel(self.address, credentials, options)
        )
        self._stub = EncoderServiceStub(self._channel)

    def _get_model(self, name: str) -> ModelInfo:
        responses = self._call_all(self._stub.GetModel, [(0, pb.GetModelRequest(model=name))], None)
        return self._remembered(name, responses[0].model)

    def _run(
        self,
        method: "grpc.UnaryUnaryMultiCallable[Request, Response]",
        plan: Plan[Request, Response, Result],
    ) -> Result:
        """Make the calls of a plan and return its result."""
        known = None if plan.needs_fresh_model else self._models.get(plan.model)
        model = self._get_model(plan.model) if known is None and plan.needs_model else known
        try:
            return self._run_within(method, plan, model)
        except InvalidRequestError:
            # The known limits may be those of a server that was there before.
            if known is None or (model := self._get_model(plan.model)) == known:
                raise
        return self._run_within(method, plan, model)

    def _run_within(
        self,
        method: "grpc.UnaryUnaryMultiCallable[Request, Response]",
        plan: Plan[Request, Response, Result],
        model: ModelInfo | None,
    ) -> Result:
        return self._result(plan, self._call_all(method, plan.requests(model, self.batch_size), model), model)

    def _call_all(
        self,
        method: "grpc.UnaryUnaryMultiCallable[_Request, _Response]",
        requests: Iterable[tuple[int, _Request]],
        model: ModelInfo | None,
    ) -> dict[int, _Response]:
        """Make the calls, a few at a time, and return the responses by the number of their first text."""
        limit = splitting.calls_at_a_time(self.max_in_flight, self.batch_size, model)
        waiting = iter(requests)
        running: dict[int, _Running[_Request, _Response]] = {}
        ended: SimpleQueue[int] = SimpleQueue()  # of those running, filled by gRPC's threads
        resting: list[tuple[float, int]] = []  # of those running, by the time of the next attempt
        responses: dict[int, _Response] = {}

        def start(first: int, request: _Request, attempts: Attempts) -> None:
            with self._translated(first):
                call = method.future(request, **self._call_options(attempts))
            running[first] = _Running(request, attempts, call)
            call.add_done_callback(lambda _: ended.put(first))

        try:
            while True:
                while len(running) < limit and (following := next(waiting, None)) is not None:
                    start(*following, self._attempts())
                if not running:
                    return responses
                try:
                    first = ended.get(timeout=_seconds_until(resting[0][0]) if resting else None)
                except Empty:
                    _, first = heapq.heappop(resting)
                    start(first, running[first].request, running[first].attempts)
                    continue
                try:
                    responses[first] = self._response(first, running[first].call)
                except AttnlensError as error:
                    if not self._may_pass(error):
                        raise
                    delay_s = running[first].attempts.delay_s(error)
                    heapq.heappush(resting, (time.monotonic() + delay_s, first))
                else:
                    self._has_answered = True
                    del running[first]
        finally:
            for each in running.values():
                each.call.cancel()

    def _response(self, first: int, call: "grpc.Future[_Response]") -> _Response:
        try:
            with self._translated(first):
                return call.result()
        except grpc.FutureCancelledError as error:  # by `close` in another thread, or by the server
            raise (closed_error() if self._closed else self._failure(call, first)) from error

    def _parts(
        self, plan: Plan[pb.EncodeRequest, pb.EncodeResponse, list[EncodedText]]
    ) -> Generator[HeadPart | LayerPart]:
        # Asked for each time: what a stream has yielded can't be taken back when a limit has changed.
        model = self._get_model(plan.model) if plan.needs_model else None
        texts = replies.EncodeReader(plan.template)
        for first, request in plan.requests(model, self.batch_size):
            reader = replies.StreamReader(texts, first, len(request.inputs))
            with closing(self._responses(first, pb.EncodeStreamRequest(encode=request))) as responses:
                for response in responses:
                    yield reader.part(response)
            reader.finish()

    def _responses(self, first: int, request: pb.EncodeStreamRequest) -> Generator[pb.EncodeStreamResponse]:
        """Yield the messages of one streaming call, made again while the first has not come."""
        attempts, received = self._attempts(), 0
        while True:
            try:
                with self._translated(first):
                    stream = self._stub.EncodeStream(request, **self._call_options(attempts))
                    try:
                        for response in stream:
                            received += 1
                            self._has_answered = True
                            yield response
                    finally:
                        stream.cancel()
            except AttnlensError as error:
                if received or not self._may_pass(error):
                    raise
                time.sleep(attempts.delay_s(error))
            else:
                return

    def _assembled(
        self, plan: Plan[pb.EncodeRequest, pb.EncodeResponse, list[EncodedText]]
    ) -> Generator[EncodedText]:
        assembler = replies.Assembler()
        with closing(self._parts(plan)) as parts:
            for part in parts:
                yield from assembler.add(part)
        yield from assembler.finish()


def _seconds_until(moment: float) -> float:
    return max(0.0, moment - time.monotonic())
