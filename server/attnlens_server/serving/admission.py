"""Admission control: requests that exceed a limit are rejected immediately with a retry delay, not queued.

Two resources are limited:

- queue slots, i.e. waiting or running texts, per graph, so that requests for attention do not block
  embeddings;
- memory of calls: requests, intermediate results, and responses that slow clients have not read yet.

Everything here runs on the event loop, so there are no locks.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from attnlens_server.bundle import Kind
from attnlens_server.errors import OverloadedError, RequestTooLargeError
from attnlens_server.serving.results import CallMetrics

MEMORY_RETRY_S = 0.25


class Admission:
    """Counts queue slots and memory in use.

    Attributes:
        num_refused: Number of requests that were refused as overloaded. The protocols count them.
    """

    def __init__(self, max_texts: int, max_bytes: int, retry_after_s: Callable[[Kind], float]) -> None:
        """Start with nothing in use.

        Args:
            max_texts: Maximum number of waiting or running texts per graph.
            max_bytes: Maximum memory of all calls together.
            retry_after_s: Returns the retry delay for a full graph, in seconds.
        """
        self.max_bytes = max_bytes
        self.num_refused = 0
        self._max_texts = max_texts
        self._retry_after_s = retry_after_s
        self._num_texts: Counter[Kind] = Counter()
        self._num_bytes = 0

    @property
    def reserved_bytes(self) -> int:
        """Memory of all calls in bytes."""
        return self._num_bytes

    def num_texts(self, kind: Kind) -> int:
        """Return the number of waiting and running texts of a graph."""
        return self._num_texts[kind]

    @contextmanager
    def slots(self, kind: Kind, count: int) -> Iterator[None]:
        """Hold `count` slots of a graph while the block runs. Raises the same errors as `acquire_slots`."""
        self.acquire_slots(kind, count)
        try:
            yield
        finally:
            self.release_slots(kind, count)

    def acquire_slots(self, kind: Kind, count: int) -> None:
        """Acquire `count` slots of a graph.

        Raises:
            OverloadedError: Not enough slots are free.
            RequestTooLargeError: The queue is shorter than `count`.
        """
        if count > self._max_texts:
            raise RequestTooLargeError(
                f"the request has {count} texts, but the queue holds at most {self._max_texts}: send fewer, "
                "use EncodeStream, or start the server with a larger --max-concurrent-inputs",
                metadata={"num_texts": str(count), "max_concurrent_inputs": str(self._max_texts)},
            )
        if self._num_texts[kind] + count > self._max_texts:
            raise OverloadedError(
                f"{self._num_texts[kind]} of at most {self._max_texts} texts are waiting or running, and the "
                f"request has {count}: try again later",
                retry_after_s=self._retry_after_s(kind),
            )
        self._num_texts[kind] += count

    def acquire_extra_slots(self, kind: Kind, count: int) -> int:
        """Acquire up to `count` more slots for a call that holds one, leaving half of the queue to others.

        Returns:
            The number of acquired slots, possibly 0.
        """
        free = self._max_texts // 2 - self._num_texts[kind]
        acquired = max(0, min(count, free))
        self._num_texts[kind] += acquired
        return acquired

    def release_slots(self, kind: Kind, count: int) -> None:
        """Release acquired slots."""
        self._num_texts[kind] -= count

    def reserve_memory(self, size_bytes: int) -> None:
        """Reserve memory.

        Raises:
            OverloadedError: Other calls hold too much memory.
        """
        if self._num_bytes + size_bytes > self.max_bytes:
            raise OverloadedError(
                f"running calls and unread responses hold {self._num_bytes} of at most {self.max_bytes} "
                f"bytes, and this call needs {size_bytes} more: try again later",
                retry_after_s=MEMORY_RETRY_S,
            )
        self._num_bytes += size_bytes

    def release_memory(self, size_bytes: int) -> None:
        """Release reserved memory."""
        self._num_bytes -= size_bytes


class Slots:
    """Queue slots of one call."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._counts: Counter[Kind] = Counter()

    def acquire(self, counts: Mapping[Kind, int]) -> None:
        """Acquire slots of several graphs.

        If this raises, call `release`, because some slots may have been acquired.

        Raises:
            OverloadedError: Not enough slots are free.
            RequestTooLargeError: The queue is too short.
        """
        for kind, count in counts.items():
            self._admission.acquire_slots(kind, count)
            self._counts[kind] += count

    def shrink_to(self, kind: Kind, count: int) -> None:
        """Release all but `count` slots of a graph."""
        released = max(0, self._counts[kind] - count)
        self._counts[kind] -= released
        self._admission.release_slots(kind, released)

    def release(self) -> None:
        """Release all slots."""
        for kind in tuple(self._counts):
            self.shrink_to(kind, 0)

    @contextmanager
    def portion(self, kind: Kind, count: int) -> Iterator[int]:
        """Hold slots for up to `count` items while the block runs. The call already holds the first one.

        Yields:
            The number of items that may be queued, at least 1.
        """
        extra = self._admission.acquire_extra_slots(kind, count - 1)
        try:
            yield 1 + extra
        finally:
            self._admission.release_slots(kind, extra)


class Reservation:
    """Reserved memory of one call."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._size_bytes = 0

    @property
    def available_bytes(self) -> int:
        """Maximum growth of this reservation if there were no other calls."""
        return self._admission.max_bytes - self._size_bytes

    def grow(self, size_bytes: int) -> None:
        """Reserve more memory.

        Raises:
            OverloadedError: Other calls hold too much memory.
            RequestTooLargeError: The call needs more memory than the limit of all calls together.
        """
        if self._size_bytes + size_bytes > self._admission.max_bytes:
            needed, limit = self._size_bytes + size_bytes, self._admission.max_bytes
            raise RequestTooLargeError(
                f"the call needs {needed} bytes of memory, and the limit for all calls is {limit}: request "
                "fewer texts, layers or heads, or start the server with a larger --max-call-memory-bytes (or "
                "--max-memory-bytes)",
                metadata={"size_bytes": str(needed), "max_call_memory_bytes": str(limit)},
            )
        self._admission.reserve_memory(size_bytes)
        self._size_bytes += size_bytes

    def try_grow(self, size_bytes: int) -> bool:
        """Reserve more memory if possible. Return whether it was."""
        try:
            self.grow(size_bytes)
        except (OverloadedError, RequestTooLargeError):
            return False
        return True

    def shrink(self, size_bytes: int) -> None:
        """Release some of the memory."""
        self._admission.release_memory(size_bytes)
        self._size_bytes -= size_bytes

    def shrink_to(self, size_bytes: int) -> None:
        """Release memory beyond `size_bytes`."""
        self.shrink(max(0, self._size_bytes - size_bytes))

    def release(self) -> None:
        """Release all memory."""
        self.shrink(self._size_bytes)


@dataclass(frozen=True, slots=True)
class Budget:
    """Resources of one call. The protocol creates it, and releases its memory when the response was sent.

    Attributes:
        memory: Reserved memory.
        deadline: Deadline on the monotonic clock, or None.
        metrics: Resource use, updated by the service.
    """

    memory: Reservation
    deadline: float | None = None
    metrics: CallMetrics = field(default_factory=CallMetrics)
