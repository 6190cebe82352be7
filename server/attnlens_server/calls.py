"""The life of a call: from the bytes that came to the end that its client sees.

Three things are done here because grpc.aio does not do them:

- It parses requests outside of the handlers, where a failure is a traceback in the log and no error of ours.
  Here handlers get bytes, and parse them.
- A request of millions of small messages takes many times its size once it is parsed, and blocks the event
  loop until then. Here such messages are counted first.
- It can't end a call whose client does not read: whatever is sent, the status too, waits behind the message
  that has no room. Here such a call is dropped, and gRPC resets its stream.
"""

import asyncio
import logging
import secrets
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from attnlens.wire import LENGTH_DELIMITED, read_fields
from attnlens_server import errors
from attnlens_server.admission import Admission, Reservation

logger = logging.getLogger(__name__)

Request = TypeVar("Request", bound=Message)
Context = grpc.aio.ServicerContext[bytes, bytes]
AnyTask = asyncio.Task[Any]

STATUS_GRACE_S = 1.0  # how long the status of a call that is given up may wait for room
SMALL_BYTES = 1 << 16  # a request up to this size is parsed without a look
REQUEST_COPIES = 2  # its bytes, which gRPC keeps, and the message

_creator: ContextVar[weakref.ref[AnyTask] | None] = ContextVar("creator", default=None)


def remember_creators(loop: asyncio.AbstractEventLoop) -> None:
    """From now on let each task know the task that made it, which `_Life.end` needs."""

    def make_task(
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, Any],
        **options: Any,  # noqa: ANN401 - whatever asyncio passes
    ) -> AnyTask:
        creator = asyncio.current_task(loop)
        token = _creator.set(weakref.ref(creator) if creator else None)
        try:
            return asyncio.Task(coroutine, loop=loop, **options)  # copies the context
        finally:
            _creator.reset(token)

    loop.set_task_factory(make_task)  # type: ignore[arg-type]  # its stub asks for a future, too


class _Life:
    """What must happen at the end of a call. It holds nothing of gRPC's, so that a call can be dropped."""

    def __init__(self, task: AnyTask, memory: Reservation) -> None:
        self.memory = memory
        self._loop = asyncio.get_running_loop()
        self._tasks = [weakref.ref(task), _creator.get()]
        self._timer: asyncio.TimerHandle | None = None

    def end_after(self, seconds: float) -> None:
        """End the call unless it is over by then."""
        self._timer = self._loop.call_later(seconds, self.end)

    def end(self) -> None:
        """Drop the call, read or not.

        gRPC runs a handler in a task that a second one has made, which waits for the client to leave. The two
        hold the call of the C core between them. Without them it is destroyed, which resets its stream.
        """
        for reference in self._tasks:
            task = reference() if reference else None
            if task is not None:
                task.cancel()

    def over(self) -> None:
        """The client has everything, or has left, or was left."""
        self.memory.release()
        if self._timer is not None:
            self._timer.cancel()


class Call:
    """A call that is running.

    Attributes:
        request_bytes: the size of its request.
        memory: what it has reserved; given back when it is over.
    """

    def __init__(self, context: Context, life: _Life, request_bytes: int, stall_timeout_s: float) -> None:
        self.request_bytes = request_bytes
        self.memory = life.memory
        self._context = context
        self._life = life
        self._stall_timeout_s = stall_timeout_s

    def deadline(self) -> float | None:
        """Return when it must be over, on the clock of `time.monotonic`; None: never."""
        remaining_s = self._context.time_remaining()
        return None if remaining_s is None else time.monotonic() + remaining_s

    async def write(self, message: bytes) -> None:
        """Send a message of a stream; returns when the connection has room for the next.

        Raises:
            SlowReaderError: the client does not read.
            CancelledError: the client has left.
        """
        try:
            await asyncio.wait_for(self._context.write(message), self._stall_timeout_s)
        except grpc.aio.InternalError as error:  # nobody to tell, nothing wrong here
            raise asyncio.CancelledError from error
        except TimeoutError as error:
            raise errors.SlowReaderError(
                f"the client read nothing for {self._stall_timeout_s:g} s: read messages as they come"
            ) from error

    def replied(self) -> None:
        """From now on the client has the stall timeout to read its only message."""
        self._life.end_after(self._stall_timeout_s)

    async def abort(self, status: errors.CallStatus, *, is_read: bool) -> None:
        """End the call with a status, or without one where the client does not read. Does not return."""
        self._life.end_after(self._stall_timeout_s if is_read else STATUS_GRACE_S)
        with suppress(grpc.aio.InternalError):  # the client has left, or its first message waits for room
            await self._context.abort(status.code, status.message, status.trailers)
        self._life.end()
        await asyncio.sleep(0)  # is cancelled


class Calls:
    """All calls that are not over, that is, whose clients do not have everything yet."""

    def __init__(
        self, admission: Admission, stall_timeout_s: float, check_serving: Callable[[], None]
    ) -> None:
        """Count from nothing. `check_serving` raises where calls are not welcome now."""
        self._admission = admission
        self._check_serving = check_serving
        self._stall_timeout_s = stall_timeout_s
        self._count = 0
        self._none = asyncio.Event()
        self._none.set()

    def _begin(self, context: Context, request_bytes: int) -> Call:
        """Count a call until it is over."""
        self._count += 1
        self._none.clear()
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - gRPC runs each handler in a task of its own
        life = _Life(task, Reservation(self._admission))

        def over(_: object) -> None:
            life.over()
            self._count -= 1
            if self._count == 0:
                self._none.set()

        # That of the context would tie context and call into a cycle, which keeps calls that are dropped.
        task.add_done_callback(over)
        return Call(context, life, request_bytes, self._stall_timeout_s)

    async def wait_until_none(self) -> None:
        """Return when no call is running."""
        await self._none.wait()

    def handler(
        self, parser: "Parser[Request]", method: Callable[[Request, Call], Awaitable[bytes | None]], name: str
    ) -> Callable[[bytes, Context], Awaitable[bytes | None]]:
        """Return what gRPC calls with the bytes of a request: `method`, within the life of a call.

        Every exception becomes a status with details: a fault of ours, too, a panic in the tokenizer's Rust
        included, which is no Exception.
        """

        async def handle(data: bytes, context: Context) -> bytes | None:
            call = self._begin(context, len(data))
            try:
                self._check_serving()
                call.memory.grow(REQUEST_COPIES * call.request_bytes)
                reply = await method(parser.parse(data), call)
            except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # noqa: BLE001 - the outermost edge of a call
                # Not the exception itself, which would tie its traceback and the call into a cycle.
                status, is_read = _status(error, name), not isinstance(error, errors.SlowReaderError)
            else:
                if reply is not None:
                    call.replied()
                return reply
            await call.abort(status, is_read=is_read)
            raise AssertionError  # abort does not return

        return handle


@dataclass(frozen=True, slots=True)
class Parser(Generic[Request]):
    """Turns the bytes of a request into a message.

    Attributes:
        message_class: what they are.
        path: the names and numbers of the fields that lead to its texts; empty where it has none.
        max_texts: how many it may have.
    """

    message_class: type[Request]
    path: Mapping[str, int]
    max_texts: int

    def parse(self, data: bytes) -> Request:
        """Parse.

        Raises:
            MalformedRequestError: they are not a message of that type.
            InvalidFieldsError: there are too many texts to begin with.
        """
        if self.path and len(data) > SMALL_BYTES and self._has_too_many_texts(data):
            limit = self.max_texts
            description = f"has more than {limit} texts, a request may have {limit}: send several requests"
            raise errors.InvalidFieldsError([errors.FieldViolation(".".join(self.path), description)])
        try:
            return self.message_class.FromString(data)
        except DecodeError as error:
            full_name: str = self.message_class.DESCRIPTOR.full_name
            raise errors.MalformedRequestError(len(data), full_name) from error

    def _has_too_many_texts(self, data: bytes) -> bool:
        values = iter([memoryview(data)])
        for number in self.path.values():
            values = _values(values, number)
        return next(islice(values, self.max_texts, None), None) is not None


def _values(messages: Iterator[memoryview], number: int) -> Iterator[memoryview]:
    """Yield what field `number` of each message holds. What is no message has none: a parser tells why."""
    for message in messages:
        with suppress(ValueError, IndexError):
            for field in read_fields(message, 0, len(message)):
                if (field.number, field.wire_type) == (number, LENGTH_DELIMITED):
                    yield message[field.content : field.end]


def _status(error: BaseException, method: str) -> errors.CallStatus:
    """Return how a call ends that has failed. A fault of ours is logged: the client gets only its number."""
    if isinstance(error, errors.RequestError):
        return errors.call_status(error)
    error_id = secrets.token_hex(6)
    logger.error("%s failed, error id %s", method, error_id, exc_info=error)
    message = f"the server failed; its log has more under error id {error_id}"
    return errors.call_status(errors.InternalError(message, metadata={"error_id": error_id}))
