"""Load generator: many clients of a server in one process.

    python -m bench.load.generator

Requests are serialized before the measurement. A sample of the responses is parsed and verified against the
same request sent alone. The generator also reports its own CPU time.
"""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.lines import Response, serve_lines
from bench.load.calls import Call, finished_within, latencies_ms, poisson_arrivals
from bench.load.senders import GrpcSender, HttpSender, RequestError, Sender, make_request, read_reply

DRAIN_S = 30.0  # timeout for outstanding requests at the end of an open loop


@dataclass
class Target:
    """A server and its requests.

    Attributes:
        groups: Text indices of each request.
        expected: Arrays received when a request was sent alone, by request index.
    """

    protocol: str
    address: str
    what: str
    lengths: list[int]
    groups: list[list[int]]
    requests: list[bytes]
    expected: dict[int, npt.NDArray[Any]] = field(default_factory=dict)

    def open_sender(self) -> Sender:
        """Return a client that connects on its first request."""
        if self.protocol.startswith("http"):
            return HttpSender(self.address)
        return GrpcSender(self.address, self.what)


@dataclass
class Tally:
    """Completed calls, errors and verification results."""

    target: Target
    calls: list[Call] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    worst_difference: float = 0.0

    async def call(self, sender: Sender, index: int, due_at: float) -> None:
        """Send request `index` and record the result."""
        try:
            reply = await sender.send(self.target.requests[index])
        except RequestError as error:
            self.errors[str(error)] += 1
            return
        self.calls.append(Call(index, due_at, time.perf_counter()))
        expected = self.target.expected.get(index)
        if expected is not None:
            numbers = read_reply(self.target.protocol, self.target.what, reply)
            self.worst_difference = max(self.worst_difference, float(np.abs(numbers - expected).max()))
            self.compared += 1


class LoadGenerator:
    """Handles requests to generate load."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._targets: dict[str, Target] = {}
        self._runner = runner

    def handle(self, do: str, key: str, **request: Any) -> Response:  # noqa: ANN401 - passed through
        """Prepare a target, or generate load and report the generator's own CPU time."""
        if do == "prepare":
            return self._prepare(key, **request)
        loops: dict[str, Any] = {
            "closed": closed_loop,
            "count": count_loop,
            "open": open_loop,
            "vectors": fetch_vectors,
        }
        started, cpu_started = time.perf_counter(), time.process_time()
        response: Response = self._runner.run(loops[do](self._targets[key], **request))
        response["client_cpu_s"] = time.process_time() - cpu_started
        response["wall_s"] = time.perf_counter() - started
        return response

    def _prepare(
        self,
        key: str,
        *,
        texts: list[str],
        lengths: list[int],
        num_layers: int,
        texts_per_request: int,
        check_every: int,
        protocol: str,
        what: str,
        address: str,
    ) -> Response:
        """Serialize the requests and record the expected result of every `check_every`-th request."""
        order = list(range(len(texts)))
        groups = [order[start : start + texts_per_request] for start in order[::texts_per_request]]
        requests = [
            make_request(protocol, what, [texts[index] for index in group], num_layers) for group in groups
        ]
        target = self._targets[key] = Target(protocol, address, what, lengths, groups, requests)
        self._runner.run(record_expected(target, check_every))
        return {"requests": len(requests)}


async def record_expected(target: Target, check_every: int) -> None:
    sender = target.open_sender()
    for index in range(0, len(target.requests), check_every):
        reply = await sender.send(target.requests[index])
        target.expected[index] = read_reply(target.protocol, target.what, reply)
    await sender.close()


async def closed_loop(target: Target, clients: int, seconds: float, settle_s: float) -> Response:
    """Run closed-loop clients and measure responses after a settling time of `settle_s`."""
    tally, senders = Tally(target), [target.open_sender() for _ in range(clients)]
    order = shuffled(target, clients)
    start = time.perf_counter()
    end = start + settle_s + seconds

    async def client(sender: Sender) -> None:
        while (now := time.perf_counter()) < end:
            await tally.call(sender, next(order), now)

    await asyncio.gather(*(client(sender) for sender in senders))
    await close_all(senders)
    return summary(tally, start + settle_s, end)


async def count_loop(target: Target, clients: int, requests: int) -> Response:
    """Send a fixed number of requests, distributed over the clients."""
    tally, senders = Tally(target), [target.open_sender() for _ in range(clients)]
    chosen = itertools.islice(shuffled(target, clients), requests)
    start = time.perf_counter()

    async def client(sender: Sender) -> None:
        for index in chosen:
            await tally.call(sender, index, time.perf_counter())

    await asyncio.gather(*(client(sender) for sender in senders))
    await close_all(senders)
    return summary(tally, start, time.perf_counter())


async def fetch_vectors(target: Target, clients: int, requests: int) -> Response:
    """Send the first `requests` requests concurrently and return their vectors in text order."""
    senders = [target.open_sender() for _ in range(clients)]
    vectors: dict[int, list[list[float]]] = {}
    pending = iter(range(requests))

    async def client(sender: Sender) -> None:
        for index in pending:
            reply = await sender.send(target.requests[index])
            vectors[index] = read_reply(target.protocol, target.what, reply).tolist()

    await asyncio.gather(*(client(sender) for sender in senders))
    await close_all(senders)
    return {"vectors": [vector for index in sorted(vectors) for vector in vectors[index]]}


async def open_loop(target: Target, clients: int, rate: float, seconds: float, seed: int) -> Response:
    """Send requests at Poisson arrival times, round-robin over `clients` connections."""
    tally, senders = Tally(target), [target.open_sender() for _ in range(clients)]
    order = np.random.default_rng(seed).integers(len(target.requests), size=1 << 16).tolist()
    start, late_s, running = time.perf_counter(), 0.0, []
    for number, arrival in enumerate(poisson_arrivals(rate, seconds, seed)):
        due_at = start + arrival
        if (wait_s := due_at - time.perf_counter()) > 0:
            await asyncio.sleep(wait_s)
        late_s = max(late_s, time.perf_counter() - due_at)
        call = tally.call(senders[number % clients], order[number % len(order)], due_at)
        running.append(asyncio.create_task(call))
    _, unfinished = await asyncio.wait(running, timeout=DRAIN_S)
    for task in unfinished:
        task.cancel()
    await close_all(senders)
    response = summary(tally, start, start + seconds)
    response["latency_ms"] = latencies_ms(tally.calls)  # includes responses after the end of the interval
    return response | {"unanswered": len(unfinished), "sent_late_ms": late_s * 1000, "sent": len(running)}


def shuffled(target: Target, seed: int) -> Iterator[int]:
    """Cycle through the request indices in a shuffled order."""
    return itertools.cycle(np.random.default_rng(seed).permutation(len(target.requests)).tolist())


def summary(tally: Tally, start: float, end: float) -> Response:
    """Return metrics of the calls completed between `start` and `end`."""
    calls, target = finished_within(tally.calls, start, end), tally.target
    texts = Counter(index for call in calls for index in target.groups[call.index])
    return {
        "seconds": end - start,
        "texts": texts.total(),
        "counts_by_length": Counter(target.lengths[index] for index in texts.elements()),
        "latency_ms": latencies_ms(calls),
        "errors": dict(tally.errors),
        "compared": tally.compared,
        "max_abs_difference_from_alone": tally.worst_difference,
    }


async def close_all(senders: list[Sender]) -> None:
    for sender in senders:
        await sender.close()


if __name__ == "__main__":
    with asyncio.Runner() as runner:
        serve_lines(LoadGenerator(runner).handle)
