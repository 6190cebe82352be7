"""Who may come in. What is full refuses at once and says when to come back; nothing waits in front of it.

Two things are counted. Texts that wait or run, for each graph by itself, so that a crowd asking for
attention does not shut out embeddings. And the memory of calls: what they brought, what is being made for
them, and replies that their clients have not read yet, which is where the memory goes when they read slowly.

Everything here runs on the event loop, so there are no locks.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from attnlens_server.bundle import Kind
from attnlens_server.errors import OverloadedError, RequestTooLargeError
from attnlens_server.serving.spent import Spent

MEMORY_RETRY_S = 0.25


class Admission:
    """Counts what is inside."""

    def __init__(self, max_texts: int, max_bytes: int, retry_after_s: Callable[[Kind], float]) -> None:
        """Count from nothing.

        Args:
            max_texts: texts that may wait or run, for each graph by itself.
            max_bytes: memory that all calls together may take.
            retry_after_s: when those should come back who find no place at a graph.
        """
        self.max_bytes = max_bytes
        self._max_texts = max_texts
        self._retry_after_s = retry_after_s
        self._num_texts: Counter[Kind] = Counter()
        self._num_bytes = 0

    @contextmanager
    def texts(self, kind: Kind, count: int) -> Iterator[None]:
        """Hold `count` places at a graph while the block runs. Raises as `take_texts`."""
        self.take_texts(kind, count)
        try:
            yield
        finally:
            self.give_back_texts(kind, count)

    def take_texts(self, kind: Kind, count: int) -> None:
        """Take `count` places at a graph.

        Raises:
            OverloadedError: there are not as many now.
            RequestTooLargeError: there never will be.
        """
        if count > self._max_texts:
            raise RequestTooLargeError(
                f"the request has {count} texts, at most {self._max_texts} may wait or run: send fewer, use "
                "EncodeStream, or start the server with a larger --max-concurrent-inputs",
                metadata={"num_texts": str(count), "max_concurrent_inputs": str(self._max_texts)},
            )
        if self._num_texts[kind] + count > self._max_texts:
            raise OverloadedError(
                f"{self._num_texts[kind]} texts wait or run, at most {self._max_texts} may, and the "
                f"request has {count}: try again later",
                retry_after_s=self._retry_after_s(kind),
            )
        self._num_texts[kind] += count

    def take_extra(self, kind: Kind, count: int) -> int:
        """Take up to `count` more slots for a call that holds one. Half of the queue stays free for others.

        Returns:
            The number of slots taken, perhaps 0.
        """
        free = self._max_texts // 2 - self._num_texts[kind]
        taken = max(0, min(count, free))
        self._num_texts[kind] += taken
        return taken

    def give_back_texts(self, kind: Kind, count: int) -> None:
        """Give back what was taken."""
        self._num_texts[kind] -= count

    def take_memory(self, size_bytes: int) -> None:
        """Take some of the memory of calls.

        Raises:
            OverloadedError: other calls have it.
        """
        if self._num_bytes + size_bytes > self.max_bytes:
            raise OverloadedError(
                f"running calls and unread replies take {self._num_bytes} bytes, at most {self.max_bytes} "
                f"may be taken, and this call needs {size_bytes} more: try again later",
                retry_after_s=MEMORY_RETRY_S,
            )
        self._num_bytes += size_bytes

    def give_back_memory(self, size_bytes: int) -> None:
        """Give back what `take_memory` took."""
        self._num_bytes -= size_bytes


class Slots:
    """The queue slots that one call holds."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._counts: Counter[Kind] = Counter()

    def acquire(self, counts: Mapping[Kind, int]) -> None:
        """Acquire slots for several graphs.

        Raises:
            OverloadedError: Other calls hold them. Release those that were acquired.
            RequestTooLargeError: The queue is too short, likewise.
        """
        for kind, count in counts.items():
            self._admission.take_texts(kind, count)
            self._counts[kind] += count

    def shrink_to(self, kind: Kind, count: int) -> None:
        """Release the slots for a graph beyond `count`."""
        released = max(0, self._counts[kind] - count)
        self._counts[kind] -= released
        self._admission.give_back_texts(kind, released)

    def release(self) -> None:
        """Release all slots."""
        for kind in tuple(self._counts):
            self.shrink_to(kind, 0)

    @contextmanager
    def portion(self, kind: Kind, count: int) -> Iterator[int]:
        """Hold slots for up to `count` items while the block runs. The call holds the first one already.

        Yields:
            The number of items that may be queued, at least 1.
        """
        extra = self._admission.take_extra(kind, count - 1)
        try:
            yield 1 + extra
        finally:
            self._admission.give_back_texts(kind, extra)


class Reservation:
    """The memory that one call has reserved."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._size_bytes = 0

    @property
    def room_bytes(self) -> int:
        """How much this reservation could grow if there were no other calls."""
        return self._admission.max_bytes - self._size_bytes

    def grow(self, size_bytes: int) -> None:
        """Reserve more.

        Raises:
            OverloadedError: other calls have it.
            RequestTooLargeError: there will never be as much.
        """
        if self._size_bytes + size_bytes > self._admission.max_bytes:
            needed, limit = self._size_bytes + size_bytes, self._admission.max_bytes
            raise RequestTooLargeError(
                f"the call needs {needed} bytes of memory, all calls together may take {limit}: ask for "
                "fewer texts, layers or heads, or start the server with a larger --max-memory-bytes",
                metadata={"size_bytes": str(needed), "max_memory_bytes": str(limit)},
            )
        self._admission.take_memory(size_bytes)
        self._size_bytes += size_bytes

    def try_grow(self, size_bytes: int) -> bool:
        """Reserve more if there is as much now."""
        try:
            self.grow(size_bytes)
        except (OverloadedError, RequestTooLargeError):
            return False
        return True

    def shrink(self, size_bytes: int) -> None:
        """Give back some."""
        self._admission.give_back_memory(size_bytes)
        self._size_bytes -= size_bytes

    def shrink_to(self, size_bytes: int) -> None:
        """Give back what is beyond a size."""
        self.shrink(max(0, self._size_bytes - size_bytes))

    def release(self) -> None:
        """Give back all."""
        self.shrink(self._size_bytes)


@dataclass(frozen=True, slots=True)
class Budget:
    """What a call may take. Whoever makes one releases its memory when the reply is sent.

    Attributes:
        memory: what the call has reserved.
        deadline: when it must be over, on the clock of `time.monotonic`; None: never.
        spent: what it has used; whoever carries out its jobs adds to it.
    """

    memory: Reservation
    deadline: float | None = None
    spent: Spent = field(default_factory=Spent)
