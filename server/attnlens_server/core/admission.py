"""Admission control: requests that exceed a limit are rejected immediately with a retry delay, not queued.

Three resources are limited:

- queue slots, i.e. waiting or running texts, per graph, so that requests for attention do not block
  embeddings;
- memory of calls: requests, intermediate results, and responses that slow clients have not read yet;
- open calls.

Clients share each of them, see `Pool`. Everything here runs on the event loop, so there are no locks.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import get_args

from attnlens_server.bundle import Kind
from attnlens_server.clients import ANONYMOUS, Client
from attnlens_server.core.usage import CallMetrics
from attnlens_server.errors import OverloadedError, RequestError, RequestTooLargeError

RETRY_S = 0.25  # for memory and calls
FREE_FACTOR = 2.0
SMALL_TEXTS, SMALL_BYTES, SMALL_CALLS = 8, 1 << 20, 4
"""A client that holds no more than this may use the reserve."""
RESERVED_SHARE = 16


class Pool:
    """A limited resource that clients share.

    While a client has other calls, it may hold at most `FREE_FACTOR` times its share times as much as is
    free. If n equal clients take as much as they can, each holds 2 / (2 n + 1), and the rest is free for
    others: the dynamic thresholds of Choudhury and Hahne (1998). A reserve beyond the capacity is for clients
    that hold little.

    Attributes:
        capacity: Amount without the reserve.
        used: Amount in use.
    """

    def __init__(self, capacity: int, small: int) -> None:
        """Start with nothing in use. `small` is the limit up to which a client may use the reserve."""
        self.used = 0
        self._most_small = small
        self.resize(capacity)
        self._held: dict[str, int] = defaultdict(int)

    def resize(self, capacity: int) -> None:
        """Set the capacity."""
        self.capacity = capacity
        self._reserve = capacity // RESERVED_SHARE
        self._small = min(self._most_small, self._reserve)

    @property
    def limit(self) -> int:
        """Capacity and reserve."""
        return self.capacity + self._reserve

    @property
    def num_clients(self) -> int:
        """Number of clients that hold something."""
        return len(self._held)

    def held_by(self, client: Client) -> int:
        """Return how much a client holds."""
        return self._held.get(client.name, 0)

    def available_to(self, client: Client, *, has_other_calls: bool = True) -> int:
        """Return how much more a client may take."""
        held = self._held.get(client.name, 0)
        free = self.capacity - self.used
        reserved = min(free + self._reserve, self._small - held)
        if has_other_calls:
            factor = FREE_FACTOR * client.share
            free = math.ceil((free + held) * factor / (1 + factor)) - held
        return max(0, free, reserved)

    def take(self, client: Client, amount: int) -> None:
        """Take an amount without checking the limits."""
        self.used += amount
        if amount:
            self._held[client.name] += amount

    def put_back(self, client: Client, amount: int) -> None:
        """Return an amount."""
        self.used -= amount
        self._held[client.name] -= amount
        if not self._held[client.name]:
            del self._held[client.name]


class Admission:
    """Counts queue slots, memory and calls in use.

    Args:
        max_texts: Maximum number of waiting or running texts per graph.
        max_bytes: Maximum memory of all calls together.
        retry_after_s: Returns the retry delay for a full graph, in seconds.
        max_calls: Maximum number of open calls.

    Attributes:
        memory: Memory of all calls in bytes.
        calls: Open calls.
        num_refused: Number of requests that were rejected as overloaded, from clients without other calls.
    """

    def __init__(
        self,
        max_texts: int,
        max_bytes: int,
        retry_after_s: Callable[[Kind], float],
        max_calls: int = 4096,
    ) -> None:
        self.memory = Pool(max_bytes, SMALL_BYTES)
        self.calls = Pool(max_calls, SMALL_CALLS)
        self.num_refused = 0
        self._max_texts = max_texts
        self._retry_after_s = retry_after_s
        # Created here, because the thread that serves the metrics reads them, too.
        self._texts: dict[Kind, Pool] = {kind: Pool(max_texts, SMALL_TEXTS) for kind in get_args(Kind)}

    def texts(self, kind: Kind) -> Pool:
        """Return the slots of a graph."""
        return self._texts[kind]

    def num_texts(self, kind: Kind) -> int:
        """Return the number of waiting and running texts of a graph."""
        return self.texts(kind).used

    @contextmanager
    def slots(self, kind: Kind, count: int, client: Client = ANONYMOUS) -> Iterator[None]:
        """Hold `count` slots of a graph while the block runs. Raises the same errors as `acquire_slots`."""
        self.acquire_slots(kind, count, client)
        try:
            yield
        finally:
            self.texts(kind).put_back(client, count)

    def acquire_slots(self, kind: Kind, count: int, client: Client, own: int = 0) -> None:
        """Acquire `count` slots of a graph for a call that already holds `own`.

        Raises:
            OverloadedError: Not enough slots are free, or the client holds its share of them.
            RequestTooLargeError: The queue is shorter than `count`.
        """
        pool = self.texts(kind)
        if count > self._max_texts:
            raise RequestTooLargeError(
                f"the request has {count} texts, but the queue holds at most {self._max_texts}: send fewer, "
                "use EncodeStream, or start the server with a larger --max-concurrent-inputs",
                metadata={"num_texts": str(count), "max_concurrent_inputs": str(self._max_texts)},
            )
        held = pool.held_by(client)
        if count > pool.available_to(client, has_other_calls=held > own):
            raise OverloadedError(
                f"{pool.used} of at most {self._max_texts} texts are waiting or running, {held} of them from "
                f"this client, and the request has {count}: try again later",
                metadata={"resource": "texts"},
                retry_after_s=self._retry_after_s(kind),
            )
        pool.take(client, count)

    def acquire_extra_slots(self, kind: Kind, count: int, client: Client) -> int:
        """Acquire up to `count` more slots for a call that holds one, leaving half of the queue to others.

        Returns:
            The number of acquired slots, possibly 0.
        """
        pool = self.texts(kind)
        free = min(self._max_texts // 2 - pool.used, pool.available_to(client))
        acquired = max(0, min(count, free))
        if acquired:
            pool.take(client, acquired)
        return acquired

    def release_slots(self, kind: Kind, count: int, client: Client) -> None:
        """Release acquired slots."""
        if count:
            self.texts(kind).put_back(client, count)

    def has_single_call_under_load(self, client: Client) -> bool:
        """Return whether a client has a single call while other clients have calls."""
        return self.calls.used > 1 == self.calls.held_by(client)

    def count_failure(self, error: RequestError, client: Client) -> None:
        """Update `num_refused` after a request has failed.

        Clients with other calls are not counted: they may have reached their share while others are served.
        """
        if isinstance(error, OverloadedError) and self.calls.held_by(client) <= 1:
            self.num_refused += 1

    def acquire_call(self, client: Client) -> None:
        """Count a call, until `calls.put_back`.

        Raises:
            OverloadedError: There are too many calls, or too many of this client.
        """
        calls = self.calls
        held = calls.held_by(client)
        if not calls.available_to(client, has_other_calls=held > 0):
            raise OverloadedError(
                f"{calls.used} of at most {calls.capacity} calls are open, {held} of them from this client: "
                "try again later",
                metadata={"resource": "calls"},
                retry_after_s=RETRY_S,
            )
        calls.take(client, 1)


class Slots:
    """Queue slots of one call.

    Attributes:
        client: Sender of the call.
    """

    def __init__(self, admission: Admission, client: Client = ANONYMOUS) -> None:
        self.client = client
        self._admission = admission
        self._counts: dict[Kind, int] = defaultdict(int)

    def acquire(self, counts: Mapping[Kind, int]) -> None:
        """Acquire slots of several graphs.

        If this raises, call `release`, because some slots may have been acquired.

        Raises:
            OverloadedError: Not enough slots are free.
            RequestTooLargeError: The queue is too short.
        """
        for kind, count in counts.items():
            self._admission.acquire_slots(kind, count, self.client, self._counts[kind])
            self._counts[kind] += count

    def shrink_to(self, kind: Kind, count: int) -> None:
        """Release all but `count` slots of a graph."""
        released = max(0, self._counts[kind] - count)
        self._counts[kind] -= released
        self._admission.release_slots(kind, released, self.client)

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
        extra = self._admission.acquire_extra_slots(kind, count - 1, self.client)
        try:
            yield 1 + extra
        finally:
            self._admission.release_slots(kind, extra, self.client)


class Reservation:
    """Reserved memory of one call.

    Attributes:
        client: Sender of the call.
    """

    def __init__(self, admission: Admission, client: Client = ANONYMOUS) -> None:
        self.client = client
        self._pool = admission.memory
        self._size_bytes = 0

    @property
    def available_bytes(self) -> int:
        """Maximum growth of this reservation if there were no other calls."""
        return self._pool.capacity - self._size_bytes

    def grow(self, size_bytes: int) -> None:
        """Reserve more memory.

        Raises:
            OverloadedError: Other calls hold too much memory.
            RequestTooLargeError: The call needs more memory than the limit of all calls together.
        """
        pool, client = self._pool, self.client
        if size_bytes > pool.capacity - self._size_bytes:
            needed = self._size_bytes + size_bytes
            raise RequestTooLargeError(
                f"the call needs {needed} bytes of memory, and the limit for all calls is {pool.capacity}: "
                "request fewer texts, layers or heads, or start the server with a larger "
                "--max-call-memory-bytes (or --max-memory-bytes)",
                metadata={"size_bytes": str(needed), "max_call_memory_bytes": str(pool.capacity)},
            )
        held = pool.held_by(client)
        if size_bytes > pool.available_to(client, has_other_calls=held > self._size_bytes):
            raise OverloadedError(
                f"running calls and unread responses hold {pool.used} of at most {pool.capacity} bytes, "
                f"{held} of them for this client, and this call needs {size_bytes} more: try again later",
                metadata={"resource": "memory"},
                retry_after_s=RETRY_S,
            )
        pool.take(client, size_bytes)
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
        if size_bytes:
            self._pool.put_back(self.client, size_bytes)
            self._size_bytes -= size_bytes

    def shrink_to(self, size_bytes: int) -> None:
        """Release memory beyond `size_bytes`."""
        self.shrink(max(0, self._size_bytes - size_bytes))

    def release(self) -> None:
        """Release all memory."""
        self.shrink(self._size_bytes)


@dataclass(frozen=True, slots=True)
class Conversion:
    """Memory that a protocol needs to convert a reply from the messages of gRPC, such as to JSON.

    Attributes:
        growth: Bytes for each byte of the message.
        token_bytes: Bytes for each token in it.
        text_bytes: Bytes for each text in it.
    """

    growth: int = 0
    token_bytes: int = 0
    text_bytes: int = 0

    def memory_bytes(self, message_bytes: int, num_tokens: int, num_texts: int) -> int:
        """Return the memory for a message with tokens and texts."""
        return self.growth * message_bytes + self.token_bytes * num_tokens + self.text_bytes * num_texts


NO_CONVERSION = Conversion()


@dataclass(frozen=True, slots=True)
class Budget:
    """Resources of one call. The protocol creates it, and releases its memory when the response was sent.

    Attributes:
        memory: Reserved memory.
        deadline: Deadline on the monotonic clock, or None.
        metrics: Resource use, updated by the service.
        conversion: Memory to convert the reply, which the service reserves before the computation.
    """

    memory: Reservation
    deadline: float | None = None
    metrics: CallMetrics = field(default_factory=CallMetrics)
    conversion: Conversion = NO_CONVERSION

    @property
    def client(self) -> Client:
        """Sender of the call."""
        return self.memory.client

    def charge_texts(self, count: int) -> None:
        """Charge the texts of the call to its client. If it runs several graphs, they are charged once.

        Raises:
            RateLimitedError: The client has sent too many texts or tokens before.
        """
        rates, further = self.memory.client.rates, count - self.metrics.num_charged
        if rates is not None and further > 0:
            rates.take_texts(further)
            self.metrics.num_charged = count

    def charge_tokens(self, count: int) -> None:
        """Charge computed tokens to the client of the call, whose later calls wait if they are too many."""
        rates = self.memory.client.rates
        if rates is not None:
            rates.take_tokens(count)
            self.metrics.num_charged_tokens += count

    def count_tokens(self, count: int) -> None:
        """Count and charge tokens of the texts."""
        self.metrics.num_tokens += count
        self.charge_tokens(count)
