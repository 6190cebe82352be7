"""The life of a call: from the bytes that came to the end that its client sees.

Three things are done here because grpc.aio does not do them:

- It parses requests outside of the handlers, where a failure is a traceback in the log and no error of ours.
  Here handlers get bytes, and parse them.
- A request of millions of small messages takes many times its size once it is parsed, and blocks the event
  loop until then. Here such messages are counted first, nested ones too: when a oneof is set repeatedly, the
  parser keeps each replaced value until the whole message is freed.
- It can't end a call whose client does not read: whatever is sent, the status too, waits behind the message
  that has no room. Here such a call is dropped, and gRPC resets its stream. The accept loop of grpc.aio keeps
  a reference to the last call that it accepted, so `Calls.on_dropped` is there to accept another one.
"""

import asyncio
import functools
import logging
import secrets
import time
import traceback
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import grpc
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from attnlens.wire import LENGTH_DELIMITED, Field, read_fields
from attnlens_server import errors
from attnlens_server.grpc_api.responses import SENDING_COPIES
from attnlens_server.grpc_api.status import CallStatus, call_status
from attnlens_server.serving.admission import Admission, Budget, Reservation
from attnlens_server.serving.jobs import Job
from attnlens_server.serving.request_log import RequestRecord, peer_of, request_id_of
from attnlens_server.serving.workers import Workers

logger = logging.getLogger(__name__)

Request = TypeVar("Request", bound=Message)
AnyJob = TypeVar("AnyJob")
Context = grpc.aio.ServicerContext[bytes, bytes]
AnyTask = asyncio.Task[Any]

REQUEST_ID = "x-request-id"  # the header by which a client names a call for the log
CALL_RETRY_S = 0.25
STATUS_GRACE_S = 1.0  # how long the status of a call that is given up may wait for room
SMALL_BYTES = 1 << 16  # a request up to this size is parsed without a look
MAX_OTHER_FIELDS = 1024  # of a larger one beside its texts
FIELDS_PER_TEXT = 4  # nested fields: a compared pair has two inputs with one field each
REQUEST_COPIES = 2  # its bytes, which gRPC keeps, and the message; small messages in it are counted as texts

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

    def __init__(
        self, task: AnyTask, memory: Reservation, record: RequestRecord, on_dropped: Callable[[], None]
    ) -> None:
        self.memory = memory
        self.record = record
        self._on_dropped = on_dropped
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
        self.record.ended(errors.SlowConsumerError.status, errors.SlowConsumerError.reason)
        for reference in self._tasks:
            task = reference() if reference else None
            if task is not None:
                task.cancel()
        self._on_dropped()

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
        record: what the log tells of it.
    """

    def __init__(self, context: Context, life: _Life, stall_timeout_s: float) -> None:
        self.request_bytes = life.record.request_bytes
        self.memory = life.memory
        self.record = life.record
        self._context = context
        self._life = life
        self._stall_timeout_s = stall_timeout_s
        self._has_sent_headers = False

    def budget(self) -> Budget:
        """Return what the call may take."""
        remaining_s = self._context.time_remaining()
        deadline = None if remaining_s is None else time.monotonic() + remaining_s
        self.record.deadline = deadline
        return Budget(self.memory, deadline, self.record.spent)

    async def write(self, message: bytes) -> None:
        """Send a message of a stream; returns when the connection has room for the next.

        Raises:
            SlowConsumerError: the client does not read.
            CancelledError: the client has left.
        """
        try:
            # Not `wait_for`, which loses a cancellation that arrives as the write completes (Python 3.11).
            async with asyncio.timeout(self._stall_timeout_s):
                # On their own, since flow control does not hold headers up: gRPC rejects a status while the
                # batch that has them waits with the first message.
                if not self._has_sent_headers:
                    self._has_sent_headers = True
                    await self._context.send_initial_metadata(())
                await self._context.write(message)
        except grpc.aio.InternalError as error:  # nobody to tell, nothing wrong here
            raise asyncio.CancelledError from error
        except TimeoutError as error:
            raise errors.SlowConsumerError(
                f"the client left a message unread for {self._stall_timeout_s:g} s: read them as they come"
            ) from error
        self.record.reply_bytes += len(message)

    def replied(self, reply: bytes) -> None:
        """From now on nothing but the reply is kept, and the client has the stall timeout to read it."""
        self.record.reply_bytes = len(reply)
        self.memory.shrink_to(self.request_bytes + SENDING_COPIES * len(reply))
        self._life.end_after(self._stall_timeout_s)

    async def abort(self, status: CallStatus, *, client_reads: bool) -> None:
        """End the call with a status, or without one where the client does not read. Does not return."""
        self.record.ended(status.code.name, status.reason)
        self._life.end_after(self._stall_timeout_s if client_reads else STATUS_GRACE_S)
        with suppress(grpc.aio.InternalError):  # the client has left
            await self._context.abort(status.code, status.message, status.trailers)
        self._life.end()
        await asyncio.sleep(0)  # is cancelled


class Calls:
    """All calls that are not over, that is, whose clients do not have everything yet.

    Attributes:
        on_dropped: Called after a call was dropped because its client did not read.
    """

    def __init__(
        self,
        admission: Admission,
        check_serving: Callable[[], None],
        workers: Workers,
        *,
        max_calls: int,
        stall_timeout_s: float,
        log_requests: bool = False,
    ) -> None:
        """Count from nothing. `check_serving` raises where calls are not welcome now."""
        self.on_dropped: Callable[[], None] = lambda: None
        self._log_requests = log_requests
        self._admission = admission
        self._max_calls = max_calls
        self._check_serving = check_serving
        self._workers = workers
        self._stall_timeout_s = stall_timeout_s
        self._count = 0
        self._none = asyncio.Event()
        self._none.set()

    def _check_count(self) -> None:
        if self._count > self._max_calls:
            raise errors.OverloadedError(
                f"{self._max_calls} other calls run or wait for their clients, no more may: try again later",
                retry_after_s=CALL_RETRY_S,
            )

    def _begin(self, context: Context, method: str, request_bytes: int) -> Call:
        """Count a call until it is over."""
        self._count += 1
        self._none.clear()
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - gRPC runs each handler in a task of its own
        record = RequestRecord(method, request_bytes=request_bytes)
        if self._log_requests:
            record.peer = peer_of(context.peer())
            record.request_id = _request_id(context)
        life = _Life(task, Reservation(self._admission), record, self.on_dropped)

        def over(_: object) -> None:
            life.over()
            self._count -= 1
            if self._count == 0:
                self._none.set()
            if self._log_requests:
                record.write()

        # The context's own add_done_callback would make a cycle of context and call: dropped ones would stay.
        task.add_done_callback(over)
        return Call(context, life, self._stall_timeout_s)

    async def wait_until_none(self) -> None:
        """Return when no call is running."""
        await self._none.wait()

    def handler(
        self,
        parser: "Parser[Request, AnyJob]",
        method: Callable[[AnyJob, Call], Awaitable[bytes | None]],
        name: str,
    ) -> Callable[[bytes, Context], Awaitable[bytes | None]]:
        """Return what gRPC calls with the bytes of a request: `method`, within the life of a call.

        Every exception becomes a status with details: a fault of ours, too, a panic in the tokenizer's Rust
        included, which is no Exception.
        """

        async def handle(data: bytes, context: Context) -> bytes | None:
            call = self._begin(context, name, len(data))
            job: AnyJob | None
            try:
                self._check_serving()
                self._check_count()
                call.memory.grow(REQUEST_COPIES * call.request_bytes)
                job = await self._parse(parser, data)
                data = b""
                if isinstance(job, Job):
                    call.record.spent.num_inputs = len(job.inputs)
                    call.memory.grow(job.memory_bytes)
                reply = await method(job, call)
            except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
                call.record.left()
                raise
            except BaseException as error:  # noqa: BLE001 - the outermost edge of a call
                # Not the exception itself: its traceback holds the frames of the call, and what it brought.
                status = _status(error, name)
                client_reads = not isinstance(error, errors.SlowConsumerError)
                traceback.clear_frames(error.__traceback__)
            else:
                if reply is not None:
                    call.replied(reply)
                return reply
            data, job = b"", None  # gRPC keeps what ends the call, and with it this frame
            await call.abort(status, client_reads=client_reads)
            raise AssertionError  # abort does not return

        return handle

    async def _parse(self, parser: "Parser[Request, AnyJob]", data: bytes) -> AnyJob:
        """Make a job of the bytes of a request: of many in a worker thread."""
        return await self._workers.run_if(len(data) > SMALL_BYTES, parser.parse, data)


@dataclass(frozen=True, slots=True)
class Parser(Generic[Request, AnyJob]):
    """Turns the bytes of a request into a job.

    Attributes:
        message_class: what they are.
        translate: makes a job of the message.
        inputs_number: of the field with its texts; None where it has none.
        max_texts: how many it may have.
    """

    message_class: type[Request]
    translate: Callable[[Request], AnyJob]
    inputs_number: int | None
    max_texts: int

    def parse(self, data: bytes) -> AnyJob:
        """Parse.

        Raises:
            MalformedRequestError: they are not a message of that type.
            InvalidFieldsError: there are too many texts to begin with.
        """
        try:
            if self.inputs_number is not None and len(data) > SMALL_BYTES:
                self._check_counts(data, self.inputs_number)
            request = self.message_class.FromString(data)
        except (DecodeError, ValueError, IndexError) as error:
            full_name: str = self.message_class.DESCRIPTOR.full_name
            raise errors.MalformedRequestError(len(data), full_name) from error
        return self.translate(request)

    def _check_counts(self, data: bytes, inputs_number: int) -> None:
        """Look at no more fields than a request needs.

        Raises:
            InvalidFieldsError: there are too many texts, other fields or nested fields.
            ValueError, IndexError: there is something that no message of ours has.
        """
        num_texts = num_others = num_nested = 0
        max_nested = FIELDS_PER_TEXT * self.max_texts + MAX_OTHER_FIELDS
        view = memoryview(data)
        descriptor = cast("Descriptor", self.message_class.DESCRIPTOR)
        for field in read_fields(view, 0, len(data)):
            is_text = (field.number, field.wire_type) == (inputs_number, LENGTH_DELIMITED)
            num_texts, num_others = num_texts + is_text, num_others + (not is_text)
            if num_texts > self.max_texts:
                self._refuse(f"has more than {self.max_texts} texts, a request may have {self.max_texts}")
            if num_others > MAX_OTHER_FIELDS:
                self._refuse(f"is among more than {MAX_OTHER_FIELDS} other fields")
            for _ in _nested_fields(view, field, descriptor):
                num_nested += 1
                if num_nested > max_nested:
                    self._refuse(f"and the other fields have more than {max_nested} nested fields")

    def _refuse(self, what: str) -> None:
        violation = errors.FieldViolation("inputs", f"{what}: send several requests")
        raise errors.InvalidFieldsError([violation])


def _nested_fields(data: memoryview, field: Field, descriptor: Descriptor) -> Iterator[Field]:
    """Yield the nested fields of a field.

    Messages without submessages, such as TokenIds, are not entered: parsed, they take little more than their
    bytes.
    """
    known = descriptor.fields_by_number.get(field.number)
    inner = known.message_type if known is not None else None
    if inner is None or field.wire_type != LENGTH_DELIMITED or not _has_messages(inner):
        return
    for each in read_fields(data, field.content, field.end):
        yield each
        yield from _nested_fields(data, each, inner)


@functools.cache
def _has_messages(descriptor: Descriptor) -> bool:
    return any(field.message_type is not None for field in descriptor.fields)


def _request_id(context: Context) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID:
            return request_id_of(value)
    return ""


def _status(error: BaseException, method: str) -> CallStatus:
    """Return how a call ends that has failed. A fault of ours is logged: the client gets only its number."""
    if isinstance(error, errors.RequestError):
        return call_status(error)
    error_id = secrets.token_hex(6)
    logger.error("%s failed, error id %s", method, error_id, exc_info=error)
    message = f"the server failed; its log has more under error id {error_id}"
    return call_status(errors.InternalError(message, metadata={"error_id": error_id}))
