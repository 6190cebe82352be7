"""Lifecycle of gRPC calls: request parsing, limits, error status, and slow clients.

Four things are done here because grpc.aio does not do them:

- It receives the whole request before it calls a handler. Handlers here check the identity of the sender and
  admit the call before they receive it, see `Receiver`.
- It deserializes requests outside of handlers, where a failure becomes a traceback in the log and a status
  without details. Handlers here receive bytes and parse them.
- Millions of small submessages take many times their size once parsed and block the event loop meanwhile.
  They are counted before parsing, including nested ones: when a oneof is set repeatedly, the parser keeps
  each replaced value until the message is freed.
- It cannot end a call whose client does not read: everything sent, including the status, waits in the queue
  of the blocked stream. Such a call is dropped here, and gRPC resets its stream. The accept loop of grpc.aio
  keeps a reference to the last accepted call, so `Calls.on_dropped` lets the server accept another one.
"""

import asyncio
import functools
import logging
import secrets
import time
import traceback
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast

import grpc
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtobufMessage

from attnlens.wire import LENGTH_DELIMITED, Field, read_fields
from attnlens_server import errors
from attnlens_server.clients import BULK, PRIORITY, Client, client_at
from attnlens_server.core.admission import Admission, Budget, Pool, Reservation
from attnlens_server.core.execution import Workers
from attnlens_server.core.request_record import RequestRecord
from attnlens_server.core.stages import mark
from attnlens_server.grpc_api.receiving import Receiver
from attnlens_server.grpc_api.responses import SENDING_COPIES
from attnlens_server.grpc_api.status import CallStatus, call_status
from attnlens_server.observing.observer import Observer
from attnlens_server.operations.inputs import Request, too_many_inputs

logger = logging.getLogger(__name__)

Message = TypeVar("Message", bound=ProtobufMessage)
Parsed = TypeVar("Parsed")
Context = grpc.aio.ServicerContext[bytes, bytes]
AnyTask = asyncio.Task[Any]

REQUEST_ID = "x-request-id"  # header with the client's identifier of a call, for the log
STATUS_GRACE_S = 1.0  # time to send the status of a call whose client does not read
SMALL_BYTES = 1 << 16  # messages up to this size are parsed on the event loop, without counting fields
MAX_OTHER_FIELDS = 1024  # maximum number of other fields in a larger message
FIELDS_PER_TEXT = 4  # nested fields of a pair: two inputs with one field each
MAX_ARRIVING = 64
"""Maximum number of requests that arrive at the same time, if the memory of the process has no limit."""
REQUEST_TIMEOUT_S = 30.0
TEXT_COPIES = 4  # of a character that Python stores in four bytes, which may be one byte of the message
REQUEST_COPIES = 2  # the bytes, which gRPC keeps, and the message without its texts

_creator: ContextVar[weakref.ref[AnyTask] | None] = ContextVar("creator", default=None)


def remember_creators(loop: asyncio.AbstractEventLoop) -> None:
    """Make each new task of `loop` remember the task that created it, for `_Lifetime.end`."""

    def make_task(
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, Any],
        **options: Any,  # noqa: ANN401 - as asyncio passes them
    ) -> AnyTask:
        creator = asyncio.current_task(loop)
        token = _creator.set(weakref.ref(creator) if creator else None)
        try:
            return asyncio.Task(coroutine, loop=loop, **options)  # copies the context
        finally:
            _creator.reset(token)

    loop.set_task_factory(make_task)  # type: ignore[arg-type]  # typeshed expects a Future


class _Lifetime:
    """Cleanup at the end of a call. Holds no gRPC objects, so that the call can be dropped."""

    def __init__(
        self, task: AnyTask, memory: Reservation, record: RequestRecord, on_dropped: Callable[[], None]
    ) -> None:
        self.memory = memory
        self.record = record
        self.counted_in: Pool | None = None
        self.has_request = False
        self._on_dropped = on_dropped
        self._tasks = (weakref.ref(task), _creator.get())
        self._timeout: _Timeout | None = None

    def end_after(self, timeout: "_Timeout") -> None:
        """Drop the call unless it has ended by then."""
        self._timeout = timeout
        timeout.start(self)

    def end(self) -> None:
        """Drop the call.

        gRPC runs a handler in a task, created by a second task that waits for the client to disconnect. These
        two tasks hold the only references to the C-core call; once both are gone, it is destroyed, which
        resets its stream.
        """
        self.record.end(errors.SlowConsumerError.status, errors.SlowConsumerError.reason)
        for reference in self._tasks:
            task = reference() if reference else None
            if task is not None:
                task.cancel()
        self._on_dropped()

    def close(self) -> None:
        """Release the memory. The call has completed, or it was cancelled or dropped."""
        self.memory.release()
        if self.counted_in is not None:
            self.counted_in.put_back(self.record.client, 1)
        if self._timeout is not None:
            self._timeout.cancel(self)


class _Timeout:
    """Drops calls that do not end in time. One timer of the event loop serves all of them.

    Attributes:
        seconds: Time of each call.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._ends_at: dict[_Lifetime, float] = {}  # in ascending order, since all calls have the same time
        self._is_scheduled = False

    def start(self, lifetime: _Lifetime) -> None:
        """Drop a call after the timeout, unless `cancel` is called before."""
        self._ends_at[lifetime] = time.monotonic() + self.seconds
        if not self._is_scheduled:
            self._schedule(self.seconds)

    def cancel(self, lifetime: _Lifetime) -> None:
        """Do not drop a call. It may have been dropped."""
        self._ends_at.pop(lifetime, None)

    def _schedule(self, seconds: float) -> None:
        self._is_scheduled = True
        asyncio.get_running_loop().call_later(seconds, self._expire)

    def _expire(self) -> None:
        """Drop the calls whose time is over, and wait for the next one."""
        now = time.monotonic()
        expired = [lifetime for lifetime, ends_at in self._ends_at.items() if ends_at <= now]
        for lifetime in expired:
            del self._ends_at[lifetime]
        self._is_scheduled = False
        if self._ends_at:
            self._schedule(next(iter(self._ends_at.values())) - now)
        for lifetime in expired:
            lifetime.end()


class Call:
    """A running call.

    Attributes:
        request_bytes: Size of the serialized request. 0 until it was received.
        memory: Memory reservation, released when the call ends.
        record: Entry of the request log.
    """

    def __init__(
        self, context: Context, lifetime: _Lifetime, stall_timeout: _Timeout, status_timeout: _Timeout
    ) -> None:
        self.request_bytes = 0
        self.memory = lifetime.memory
        self.record = lifetime.record
        self._context = context
        self._lifetime = lifetime
        self._stall_timeout = stall_timeout
        self._status_timeout = status_timeout
        self._has_sent_headers = False

    def admit(self, client: Client, admission: Admission) -> None:
        """Attribute the call to a client.

        Raises:
            OverloadedError: There are too many calls, or too many of this client.
        """
        self.record.client = self.memory.client = client
        admission.acquire_call(client)
        self._lifetime.counted_in = admission.calls

    def begin(self, request_bytes: int) -> None:
        """Begin the time of the call: its request was received."""
        self.request_bytes = self.record.request_bytes = request_bytes
        self.record.started = time.monotonic()
        if self.record.stages is not None:
            self.record.stages.ended = self.record.started
        self._lifetime.has_request = True

    def budget(self) -> Budget:
        """Return the budget of the call: memory, deadline and metrics."""
        remaining_s = self._context.time_remaining()
        deadline = None if remaining_s is None else time.monotonic() + remaining_s
        self.record.deadline = deadline
        return Budget(self.memory, deadline, self.record.metrics)

    async def write(self, message: bytes) -> None:
        """Send a message of a stream and wait until flow control admits the next one.

        Raises:
            SlowConsumerError: The client does not read.
            CancelledError: The client has disconnected.
        """
        try:
            # `wait_for` would lose a cancellation that arrives as the write completes (Python 3.11).
            async with asyncio.timeout(self._stall_timeout.seconds):
                # Send headers separately: they are not subject to flow control, and gRPC rejects a status
                # while a batch with headers is pending.
                if not self._has_sent_headers:
                    self._has_sent_headers = True
                    await self._context.send_initial_metadata(())
                await self._context.write(message)
        except grpc.aio.InternalError as error:  # the client has disconnected
            raise asyncio.CancelledError from error
        except TimeoutError as error:
            raise errors.SlowConsumerError(
                f"a message was unread for {self._stall_timeout.seconds:g} s: read each one as it arrives"
            ) from error
        self.record.reply_bytes += len(message)

    def replied(self, reply: bytes) -> None:
        """Keep only the memory of the reply, and give the client the stall timeout to read it."""
        self.record.reply_bytes = len(reply)
        self.memory.shrink_to(self.request_bytes + SENDING_COPIES * len(reply))
        self._lifetime.end_after(self._stall_timeout)

    async def abort(self, status: CallStatus, *, client_reads: bool) -> BaseException:
        """End the call with a status, or drop it if the client does not read.

        Returns:
            The exception that ends the handler.
        """
        self.record.end(status.code.name, status.reason)
        self._lifetime.end_after(self._stall_timeout if client_reads else self._status_timeout)
        try:
            await self._context.abort(status.code, status.message, status.trailers)
        except grpc.aio.InternalError:  # the client has disconnected
            self._lifetime.end()
            await asyncio.sleep(0)  # raises CancelledError
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            return error.with_traceback(None)
        raise AssertionError  # both of the above raise


class Calls:
    """Open calls, including those whose reply has not been fully sent.

    Args:
        admission: Memory limit of all calls.
        check_serving: Raises an error while the server does not accept calls.
        workers: Threads that parse large requests.
        stall_timeout_s: Seconds a client may take to read a message.
        observer: Notified of each call.

    Attributes:
        on_dropped: Called after a call was dropped because its client did not read.
        receiver: Receives the requests.
        identify: Returns the sender of a call to a method, or raises an error if it has no access.
    """

    def __init__(
        self,
        admission: Admission,
        check_serving: Callable[[], None],
        workers: Workers,
        *,
        stall_timeout_s: float,
        observer: Observer,
    ) -> None:
        self.on_dropped: Callable[[], None] = lambda: None
        self.identify: Callable[[Context, str], Client] = client_of
        self.receiver = Receiver(MAX_ARRIVING, REQUEST_TIMEOUT_S)
        self._observer = observer
        self._admission = admission
        self._check_serving = check_serving
        self._workers = workers
        self._stall_timeout = _Timeout(stall_timeout_s)
        self._status_timeout = _Timeout(STATUS_GRACE_S)
        self._count = 0
        self._none = asyncio.Event()
        self._none.set()

    def _begin(self, context: Context, method: str) -> Call:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - gRPC runs each handler in its own task
        record = RequestRecord(method, method)
        if self._observer.needs_headers:
            _read_headers(record, context)
        self._observer.begin(record)
        lifetime = _Lifetime(task, Reservation(self._admission), record, self.on_dropped)

        def on_done(_: object) -> None:
            lifetime.close()
            if lifetime.has_request:
                self._count -= 1
                if self._count == 0:
                    self._none.set()
            self._observer.end(record)

        # `context.add_done_callback` would create a reference cycle that keeps dropped calls alive.
        task.add_done_callback(on_done)
        return Call(context, lifetime, self._stall_timeout, self._status_timeout)

    async def _receive(
        self, call: Call, message: object, context: Context, message_class: type[ProtobufMessage]
    ) -> bytes:
        """Return the request, which a call in the same process passes as `message`.

        Only now does the call count for `wait_until_none`: a client may never send the rest of its request.
        """
        if isinstance(message, bytes):
            data = message
        else:
            data = await self.receiver.receive(context, call.record.client, message_class)
            self._check_serving()
        call.begin(len(data))
        self._count += 1
        self._none.clear()
        return data

    def _fail(self, call: Call, failure: errors.RequestError) -> CallStatus:
        """Record the failure of a call and return its status.

        The handler must not keep the failure, whose traceback contains the handler's frame.
        """
        call.record.fail(failure)
        self._admission.count_failure(failure, call.record.client)
        return call_status(failure)

    async def wait_until_none(self) -> None:
        """Wait until no call with a complete request is open."""
        await self._none.wait()

    def handler(
        self,
        parser: "Parser[Message, Parsed]",
        method: Callable[[Parsed, Call], Awaitable[bytes | None]],
        name: str,
    ) -> Callable[[object, Context], Awaitable[bytes | None]]:
        """Return a gRPC handler that receives and parses the request, and calls `method`.

        Its first argument is the request as bytes, or anything else if it is still to be received. Every
        exception becomes a status with details, including panics of the tokenizer's Rust code, which derive
        from BaseException.
        """

        async def handle(message: object, context: Context) -> bytes | None:
            call = self._begin(context, name)
            request: Parsed | None = None
            data = b""
            try:
                self._check_serving()
                call.admit(self.identify(context, name), self._admission)
                data = await self._receive(call, message, context, parser.message_class)
                text_copies = TEXT_COPIES if len(data) > SMALL_BYTES else 0
                call.memory.grow((parser.copies + text_copies) * call.request_bytes)
                request = await self._workers.run_if(len(data) > SMALL_BYTES, parser.parse, data)
                data = message = b""
                call.memory.shrink_to(REQUEST_COPIES * call.request_bytes)
                if isinstance(request, Request):
                    call.record.metrics.num_inputs = len(request.inputs)
                    call.memory.grow(request.memory_bytes)
                reply = await method(request, call)
                if reply is not None:
                    mark("build")
            except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
                call.record.disconnect()
                raise
            except BaseException as error:  # noqa: BLE001 - the outermost frame of a call
                # The traceback of the exception would keep the frames of the call and their data alive.
                status = self._fail(call, _request_error(error, name))
                client_reads = not isinstance(error, errors.SlowConsumerError)
                traceback.clear_frames(error.__traceback__)
            else:
                if reply is not None:
                    call.replied(reply)
                return reply
            end = await call.abort(status, client_reads=client_reads)
            # gRPC's call keeps the exception, whose traceback keeps this frame. If the frame led to the call,
            # both would stay in memory, and count as a stream, until a garbage collection.
            del data, message, request, call, context
            try:
                raise end
            finally:
                del end

        return handle


@dataclass(frozen=True, slots=True)
class Parser(Generic[Message, Parsed]):
    """Parses serialized requests.

    Attributes:
        message_class: Type of the message.
        convert: Converts the message to a typed request.
        inputs_numbers: Numbers of the fields with the texts. Empty if there are none.
        max_texts: Maximum number of texts.
        copies: Memory of a request while it is parsed, as a multiple of its size.
    """

    message_class: type[Message]
    convert: Callable[[Message], Parsed]
    inputs_numbers: frozenset[int]
    max_texts: int
    copies: int = REQUEST_COPIES

    def parse(self, data: bytes) -> Parsed:
        """Parse and convert a request.

        Raises:
            MalformedRequestError: The bytes are not a valid message.
            InvalidFieldsError: There are too many texts or fields.
        """
        try:
            if self.inputs_numbers and len(data) > SMALL_BYTES:
                self._check_counts(data)
            message = self.message_class.FromString(data)
            self._check_lengths(message)
        except (DecodeError, ValueError, IndexError) as error:
            full_name: str = self.message_class.DESCRIPTOR.full_name
            raise errors.MalformedRequestError(len(data), full_name) from error
        return self.convert(message)

    def _check_lengths(self, message: Message) -> None:
        """Check the lengths of long lists, since even a small message can have 32,000 empty entries.

        Raises:
            InvalidFieldsError: There are too many texts or other entries.
        """
        descriptor = cast("Descriptor", self.message_class.DESCRIPTOR)
        for name, is_texts in _lists(descriptor, self.inputs_numbers):
            count = len(getattr(message, name))
            if count <= MAX_OTHER_FIELDS:
                continue
            if not is_texts:
                self._reject(f"has more than {MAX_OTHER_FIELDS} entries", name)
            if count > self.max_texts:
                raise errors.InvalidFieldsError([replace(too_many_inputs(count, self.max_texts), field=name)])

    def _check_counts(self, data: bytes) -> None:
        """Count the fields of a message and stop at the first one over a limit.

        Raises:
            InvalidFieldsError: There are too many texts, other fields or nested fields.
            ValueError, IndexError: The wire format is invalid.
        """
        num_texts = num_others = num_nested = 0
        max_nested = FIELDS_PER_TEXT * self.max_texts + MAX_OTHER_FIELDS
        view = memoryview(data)
        descriptor = cast("Descriptor", self.message_class.DESCRIPTOR)
        for field in read_fields(view, 0, len(data)):
            is_text = field.number in self.inputs_numbers and field.wire_type == LENGTH_DELIMITED
            num_texts, num_others = num_texts + is_text, num_others + (not is_text)
            if num_texts > self.max_texts:
                name = descriptor.fields_by_number[field.number].name if is_text else "inputs"
                self._reject(f"has more than {self.max_texts} texts, the limit of a request", name)
            if num_others > MAX_OTHER_FIELDS:
                self._reject(f"and more than {MAX_OTHER_FIELDS} other fields are set")
            for _ in _nested_fields(view, field, descriptor):
                num_nested += 1
                if num_nested > max_nested:
                    self._reject(f"and the other fields have more than {max_nested} nested fields")

    def _reject(self, reason: str, name: str = "inputs") -> None:
        violation = errors.FieldViolation(name, f"{reason}: send several requests")
        raise errors.InvalidFieldsError([violation])


def _nested_fields(data: memoryview, field: Field, descriptor: Descriptor) -> Iterator[Field]:
    """Yield the nested fields of a field.

    Skips messages of numbers, such as TokenIds, which take little more memory than their bytes.
    """
    known = descriptor.fields_by_number.get(field.number)
    inner = known.message_type if known is not None else None
    if inner is None or field.wire_type != LENGTH_DELIMITED or not _has_elements(inner):
        return
    for each in read_fields(data, field.content, field.end):
        yield each
        yield from _nested_fields(data, each, inner)


@functools.cache
def _lists(descriptor: Descriptor, inputs_numbers: frozenset[int]) -> tuple[tuple[str, bool], ...]:
    """Return the names of the lists of messages and texts, and whether they are the texts of a request."""
    return tuple(
        (field.name, field.number in inputs_numbers)
        for field in descriptor.fields
        if field.is_repeated and (field.message_type or field.cpp_type == field.CPPTYPE_STRING)
    )


@functools.cache
def _has_elements(descriptor: Descriptor) -> bool:
    """Return whether a message has submessages or byte strings, which are separate objects once parsed."""
    return any(field.message_type or field.type == field.TYPE_BYTES for field in descriptor.fields)


def client_of(context: Context, method: str) -> Client:
    """Return the client at the address of a call."""
    del method
    client = client_at(context.peer())
    return replace(client, is_bulk=True) if _header(context, PRIORITY) == BULK else client


def _read_headers(record: RequestRecord, context: Context) -> None:
    record.peer = context.peer()
    for name, value in context.invocation_metadata() or ():
        if isinstance(value, str):
            if name == "traceparent":
                record.traceparent = value
            elif name == "tracestate":
                record.tracestate = value
            elif name == REQUEST_ID:
                record.request_id = value


def _header(context: Context, name: str) -> str | bytes:
    for key, value in context.invocation_metadata() or ():
        if key == name:
            return value
    return ""


def _request_error(error: BaseException, method: str) -> errors.RequestError:
    """Return the error for the client. Unexpected errors are logged, and the client gets only their ID."""
    if isinstance(error, errors.RequestError):
        return error
    internal = errors.InternalError(secrets.token_hex(6))
    logger.error("%s failed, error id %s", method, internal.error_id, exc_info=error)
    return internal
