"""How `AsyncClient` makes its calls: several at a time, each again while that may help. See calls.py."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing, contextmanager
from typing import TypeVar

import grpc

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens_client import replies, splitting
from attnlens_client.connection import Connection, closed_error
from attnlens_client.errors import AttnlensError, InvalidRequestError, no_message_error
from attnlens_client.plans import Plan, Request, Response, Result
from attnlens_client.results import EncodedText, HeadPart, LayerPart, ModelInfo

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class AsyncCalls(Connection):
    """A connection whose calls are awaited, all in one event loop."""

    def _open(self) -> None:
        options, credentials = self._grpc_options(), self.credentials
        self._channel = (
            grpc.aio.insecure_channel(self.address, options)
            if credentials is None
            else grpc.aio.secure_channel(self.address, credentials, options)
        )
        self._stub = EncoderServiceStub(self._channel)
        self._calls: set[grpc.aio.Call] = set()  # those under way

    async def _get_model(self, name: str) -> ModelInfo:
        responses = await self._call_all(self._stub.GetModel, [(0, pb.GetModelRequest(model=name))], None)
        return self._remembered(name, responses[0].model)

    async def _run(
        self,
        method: "grpc.aio.UnaryUnaryMultiCallable[Request, Response]",
        plan: Plan[Request, Response, Result],
    ) -> Result:
        """Make the calls of a plan and return its result."""
        known = None if plan.needs_fresh_model else self._models.get(plan.model)
        model = await self._get_model(plan.model) if known is None and plan.needs_model else known
        try:
            return await self._run_within(method, plan, model)
        except InvalidRequestError:
            # The known limits may be those of a server that was there before.
            if known is None or (model := await self._get_model(plan.model)) == known:
                raise
        return await self._run_within(method, plan, model)

    async def _run_within(
        self,
        method: "grpc.aio.UnaryUnaryMultiCallable[Request, Response]",
        plan: Plan[Request, Response, Result],
        model: ModelInfo | None,
    ) -> Result:
        responses = await self._call_all(method, plan.requests(model, self.batch_size), model)
        return self._result(plan, responses, model)

    async def _call_all(
        self,
        method: "grpc.aio.UnaryUnaryMultiCallable[_Request, _Response]",
        requests: Iterable[tuple[int, _Request]],
        model: ModelInfo | None,
    ) -> dict[int, _Response]:
        """Make the calls, a few at a time, and return the responses by the number of their first text."""
        shared = iter(requests)  # each worker takes the next call
        responses: dict[int, _Response] = {}

        async def worker() -> None:
            for first, request in shared:
                responses[first] = await self._call(method, first, request)
                self._has_answered = True

        limit = splitting.calls_at_a_time(self.max_in_flight, self.batch_size, model)
        workers = [asyncio.ensure_future(worker()) for _ in range(limit)]
        try:
            await asyncio.gather(*workers)
        finally:
            for task in workers:
                task.cancel()
        return responses

    async def _call(
        self, method: "grpc.aio.UnaryUnaryMultiCallable[_Request, _Response]", first: int, request: _Request
    ) -> _Response:
        """Make one call, again while that may help. `first` is the number of its first text."""
        attempts = self._attempts()
        while True:
            try:
                with self._translated(first):
                    call = method(request, **self._call_options(attempts))
                    with self._running(call):
                        return _message(await call)
            except AttnlensError as error:
                if not self._may_pass(error):
                    raise
                await asyncio.sleep(attempts.delay_s(error))

    @contextmanager
    def _running(self, call: grpc.aio.Call) -> Iterator[None]:
        """Cancel `call` when the block is left, or by `close`, which is not the waiting task's own end."""
        self._calls.add(call)
        try:
            yield
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if not self._closed or (task is not None and task.cancelling()):
                raise
            raise closed_error() from error
        finally:
            self._calls.discard(call)
            call.cancel()

    async def _parts(
        self, plan: Plan[pb.EncodeRequest, pb.EncodeResponse, list[EncodedText]]
    ) -> AsyncGenerator[HeadPart | LayerPart]:
        # Asked for each time: what a stream has yielded can't be taken back when a limit has changed.
        model = await self._get_model(plan.model) if plan.needs_model else None
        texts = replies.EncodeReader(plan.template)
        for first, request in plan.requests(model, self.batch_size):
            reader = replies.StreamReader(texts, first, len(request.inputs))
            async with aclosing(self._responses(first, pb.EncodeStreamRequest(encode=request))) as responses:
                async for response in responses:
                    yield reader.part(response)
            reader.finish()

    async def _responses(
        self, first: int, request: pb.EncodeStreamRequest
    ) -> AsyncGenerator[pb.EncodeStreamResponse]:
        """Yield the messages of one streaming call, made again while the first has not come."""
        attempts, received = self._attempts(), 0
        while True:
            try:
                with self._translated(first):
                    stream = self._stub.EncodeStream(request, **self._call_options(attempts))
                    with self._running(stream):
                        async for response in stream:
                            received += 1
                            self._has_answered = True
                            yield _message(response)
            except AttnlensError as error:
                if received or not self._may_pass(error):
                    raise
                await asyncio.sleep(attempts.delay_s(error))
            else:
                return

    async def _assembled(
        self, plan: Plan[pb.EncodeRequest, pb.EncodeResponse, list[EncodedText]]
    ) -> AsyncGenerator[EncodedText]:
        assembler = replies.Assembler()
        async with aclosing(self._parts(plan)) as parts:
            async for part in parts:
                for text in assembler.add(part):
                    yield text
        for text in assembler.finish():
            yield text


def _message(response: _Response | None) -> _Response:
    """Return `response`, which grpc.aio leaves out where the bytes are no message."""
    if response is None:
        raise no_message_error()
    return response
