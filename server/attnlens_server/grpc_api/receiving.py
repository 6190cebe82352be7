"""Receives request messages of gRPC calls.

gRPC buffers a message until it is complete, so only some may arrive at the same time. Calls are registered as
streams of requests: their handlers start before the message arrives, check the identity of the sender, and
then read the message here. Until then, gRPC accepts at most 64 KB of a call.
"""

import asyncio
from collections import deque
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from attnlens_server.clients import Client
from attnlens_server.core.admission import RETRY_S, SMALL_CALLS, Pool
from attnlens_server.errors import DeadlineError, MalformedRequestError, OverloadedError

AnyMessage = TypeVar("AnyMessage", bound=Message)
Context = grpc.aio.ServicerContext[Any, Any]

MAX_BRIEF, MAX_BRIEF_WAITING = 4, 32
"""Maximum number of messages of a `BriefReceiver` that arrive at the same time, and of calls that wait."""
BRIEF_TIMEOUT_S, BRIEF_GRACE_S = 5.0, 0.05


class Receiver:
    """Receives one message of each call. Further calls wait until a message of another call has arrived.

    Args:
        capacity: Maximum number of messages that arrive at the same time. Clients share it, see `Pool`.
        timeout_s: Maximum time in seconds to receive a message.

    Attributes:
        pool: Counts the arriving messages.
    """

    def __init__(self, capacity: int, timeout_s: float) -> None:
        self.pool = Pool(capacity, SMALL_CALLS)
        self._timeout_s = timeout_s
        self._waiting: dict[Client, deque[asyncio.Future[None]]] = {}

    async def receive(self, context: Context, client: Client, message_class: type[Message]) -> bytes:
        """Return the message of a call.

        Raises:
            DeadlineError: It was not received in time.
            MalformedRequestError: The client sent none.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                while not self._has_room(client):
                    await self._wait(client)
                self.pool.take(client, 1)
                try:
                    message = await context.read()
                finally:
                    self.pool.put_back(client, 1)
                    self._wake()
        except TimeoutError:
            raise DeadlineError(
                f"the request was not received within {self._timeout_s:g} s: send it faster, or in several "
                "requests"
            ) from None
        return _checked(message, message_class)

    def _has_room(self, client: Client) -> bool:
        return self.pool.available_to(client, has_other_calls=self.pool.held_by(client) > 0) > 0

    async def _wait(self, client: Client) -> None:
        """Wait until a message of another call has arrived and this client may receive one."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._wake()  # the turn of another call
            raise

    def _wake(self) -> None:
        """Wake the first call of the client that has waited longest among those that may receive one."""
        for client in list(self._waiting):
            if not self._has_room(client):
                continue
            futures = self._waiting.pop(client)
            while futures:
                future = futures.popleft()
                if not future.done():
                    if futures:
                        self._waiting[client] = futures  # behind the other clients
                    future.set_result(None)
                    return


class BriefReceiver:
    """Receives messages of a few bytes, such as those of health checks, whose senders need no identity.

    A message arrives with its call, unless its sender stalls. If too many calls wait for theirs, the oldest
    are dropped, so that new ones are answered.
    """

    def __init__(self) -> None:
        self._arriving: dict[asyncio.Timeout, float] = {}  # start of each, the oldest first
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def receive(self, context: Context, message_class: type[Message]) -> bytes:
        """Return the message of a call.

        Raises:
            DeadlineError: It was not received in time.
            MalformedRequestError: The client sent none.
            OverloadedError: Too many later calls wait.
        """
        try:
            async with asyncio.timeout(BRIEF_TIMEOUT_S) as timeout:
                while len(self._arriving) >= MAX_BRIEF:
                    await self._wait()
                self._arriving[timeout] = asyncio.get_running_loop().time()
                try:
                    if self._waiting:
                        self._end_oldest()
                    message = await context.read()
                finally:
                    del self._arriving[timeout]
                    self._wake()
        except TimeoutError:
            raise DeadlineError("the request was not received with its call: send it faster") from None
        return _checked(message, message_class)

    async def _wait(self) -> None:
        """Wait until another message has arrived or was dropped."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        if len(self._waiting) > MAX_BRIEF_WAITING:
            error = OverloadedError(
                f"{MAX_BRIEF_WAITING} calls wait for their messages: send each message with its call",
                metadata={"resource": "calls"},
                retry_after_s=RETRY_S,
            )
            oldest = self._waiting.popleft()
            if not oldest.done():
                oldest.set_exception(error)
        self._end_oldest()
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._wake()
            raise

    def _end_oldest(self) -> None:
        """Drop the oldest message unless it arrives within `BRIEF_GRACE_S` of its start."""
        for timeout, start in self._arriving.items():
            if not timeout.expired():
                timeout.reschedule(start + BRIEF_GRACE_S)
                return

    def _wake(self) -> None:
        """Wake the newest call that waits."""
        while self._waiting:
            future = self._waiting.pop()
            if not future.done():
                future.set_result(None)
                return


def _checked(message: object, message_class: type[Message]) -> bytes:
    if not isinstance(message, bytes):  # EOF
        raise MalformedRequestError(0, message_class.DESCRIPTOR.full_name)
    return message
