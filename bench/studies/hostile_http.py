"""Measures the cost of hostile HTTP clients: `python -m bench.studies.hostile_http BUNDLE`.

Each measurement attacks a new server and compares the result with a target. tests/server/http_api covers the
behavior under the same attacks. Requires Linux and an otherwise idle machine.
"""

import argparse
import asyncio
import gzip
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.servers import RunningServer
from bench.studies.hostile import Measured, served

NUM_SLOW, NUM_CALLS, NUM_HEAVY = 1000, 300, 64
EXPECTED = {200, 204, 400, 401, 403, 404, 405, 408, 411, 413, 415, 421, 422, 424, 429, 431, 501, 503, 505}
GOOD = {"input": ["The cat sits.", "A dog runs."], "truncate": True}
# All weights of the longest text, whose response has about 100 MB.
HEAVY = {"inputs": ["word " * 250], "attention": [{}], "truncate": True}
PATHS = (
    "/v1/embeddings",
    "/embed",
    "/embed_all",
    "/tokenize",
    "/v2/embed",
    "/vectors",
    "/api/embed",
    "/page",
    "/v1/attnlens/encode",
    "/v1/attnlens/explain",
    "/v1/attnlens/encode_stream",
    "/v1/models/a",
    "/nowhere",
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1e400,
    2**70,
    "",
    "a",
    "\ud800",
    [],
    [[]],
    {},
    [None],
    ["a", 1],
    "word " * 300,
)


@dataclass(frozen=True)
class Ports:
    """A server with HTTP."""

    server: RunningServer
    http: int
    operations: int


@contextmanager
def running(bundle: Path) -> Iterator[Ports]:
    http, operations = (18_000 + os.getpid() % 5_000 + 5_000 * index for index in range(2))
    with served(bundle, "--http-port", str(http), "--metrics-port", str(operations)) as server:
        yield Ports(server, http, operations)


def request(method: str, path: str, body: bytes = b"", *headers: str) -> bytes:
    """Return a serialized request."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def answer(reader: asyncio.StreamReader) -> int:
    """Read a response and return its status. 0: the connection was closed."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        if size := re.search(r"\r\ncontent-length: (\d+)", head):
            await reader.readexactly(int(size[1]))
        elif "chunked" in head:
            while await reader.readuntil(b"\r\n") != b"0\r\n":
                pass
            await reader.readuntil(b"\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return 0
    return int(head.split(" ")[1])


# --- random requests ------------------------------------------------------------------------------


def random_request(chance: random.Random) -> bytes:
    """Return a request that is valid, slightly wrong, or wrong in its framing."""
    path = chance.choice(PATHS)
    body = dict(GOOD if chance.random() < 0.5 else {"inputs": "a", "texts": ["b"], "text": "c"})
    for _ in range(chance.randrange(3)):
        key = chance.choice(
            ["input", "inputs", "model", "dimensions", "attention", "truncate", "to", "text", "x"]
        )
        body[key] = chance.choice(VALUES)
    content = json.dumps(body).encode()
    kind = chance.randrange(8)
    if kind == 0:
        content = content[: chance.randrange(len(content))] + chance.randbytes(chance.randrange(20))
    if kind == 1:
        packed = gzip.compress(content)
        return request(
            "POST", path, packed[: len(packed) - chance.choice((0, 0, 1, 9))], "Content-Encoding: gzip"
        )
    if kind == 2:
        size = chance.choice((b"%x" % len(content), b"zz", b"-1", b"%x;a=b" % len(content), b"ffffffffffff"))
        head = request("POST", path).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
        return head + size + b"\r\n" + content + b"\r\n0\r\n\r\n"
    if kind == 3:
        return request(chance.choice(["GET", "HEAD", "DELETE", "OPTIONS", "PATCH", "BREW"]), path, content)
    if kind == 4:
        headers = [f"X-{index}: {'y' * chance.randrange(2000)}" for index in range(chance.randrange(80))]
        return request("POST", path, content, *headers)
    if kind == 5:
        raw = bytearray(request("POST", path, content))
        for _ in range(chance.randrange(1, 6)):
            raw[chance.randrange(len(raw))] = chance.randrange(256)
        return bytes(raw)
    return request("POST", path, content)


async def fuzz(port: int, count: int, seed: int) -> Counter[int]:
    """Send random requests over connections that are kept as long as the server keeps them."""
    chance, statuses = random.Random(seed), Counter[int]()
    connection = None
    for _ in range(count):
        if connection is None:
            connection = await asyncio.open_connection("127.0.0.1", port, limit=64 << 20)
        reader, writer = connection
        status = 0
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(1.0):  # requests with wrong framing wait for more data
                writer.write(random_request(chance))
                status = await answer(reader)
        statuses[status] += 1
        if status in (0, 400, 408, 431, 505) or chance.random() < 0.05:
            writer.transport.abort()
            connection = None
    return statuses


def measure_fuzz(bundle: Path, count: int) -> list[Measured]:
    """Send random requests from 16 clients."""
    with running(bundle) as ports:

        async def all_clients(number: int) -> Counter[int]:
            found = await asyncio.gather(*(fuzz(ports.http, number // 16, seed) for seed in range(16)))
            return sum(found, Counter())

        asyncio.run(all_clients(max(count // 10, min(count, 2000))))  # fills caches and pools
        before = ports.server.rss_mib
        statuses = asyncio.run(all_clients(count))
        good = asyncio.run(good_latencies(ports.http, 3))
        grown = ports.server.rss_mib - before
    print("Statuses:", dict(sorted(statuses.items())))
    unexpected = sum(number for status, number in statuses.items() if status not in EXPECTED | {0})
    return [
        Measured(f"{count:,} random requests, unexpected statuses", unexpected, 0, ""),
        Measured("RSS growth after them", grown, 20, "MiB"),
        Measured("valid requests answered after them", len(good), 3, "", lower_is_better=False),
    ]


# --- slow clients ---------------------------------------------------------------------------------


async def good_latencies(port: int, count: int) -> list[float]:
    """Return the latencies of embedding requests, one after another, in seconds."""
    message = request("POST", "/v1/embeddings", json.dumps(GOOD).encode())
    found: list[float] = []
    connection = await asyncio.open_connection("127.0.0.1", port, limit=64 << 20)
    while len(found) < count:
        started = time.perf_counter()
        connection[1].write(message)
        if await answer(connection[0]) == 200:
            found.append(time.perf_counter() - started)
        else:  # closed to make room: connect again, which counts
            connection = await asyncio.open_connection("127.0.0.1", port, limit=64 << 20)
    connection[1].close()
    return found


async def drip(port: int) -> None:
    """Send the head of a request byte by byte, and again after the server has closed the connection."""
    while True:
        with suppress(ConnectionError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nX: ")
            while not writer.transport.is_closing():
                writer.write(b"y")
                await asyncio.sleep(0.5)
        await asyncio.sleep(0.5)


async def drip_all(port: int) -> None:
    await asyncio.gather(*(drip(port) for _ in range(NUM_SLOW)))


def measure_slow(bundle: Path) -> list[Measured]:
    """Compare a good client's latency with and without 1,000 slow connections of another process."""
    with running(bundle) as ports:
        asyncio.run(good_latencies(ports.http, NUM_CALLS))
        alone = p99(asyncio.run(good_latencies(ports.http, NUM_CALLS)))
        code = (
            f"import asyncio, bench.studies.hostile_http as study; asyncio.run(study.drip_all({ports.http}))"
        )
        with subprocess.Popen([sys.executable, "-c", code]) as slow:
            time.sleep(5)
            beside = p99(asyncio.run(good_latencies(ports.http, NUM_CALLS)))
            slow.kill()
    return [Measured(f"{NUM_SLOW:,} slow connections, p99 / p99 alone", beside / alone, 5, "")]


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[-1]


# --- health checks --------------------------------------------------------------------------------


async def heavy(port: int) -> None:
    """Request large responses again and again."""
    message = request("POST", "/v1/attnlens/encode", json.dumps(HEAVY).encode(), "Connection: close")
    while True:
        with suppress(ConnectionError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(message)
            while await reader.read(1 << 20):
                pass
            writer.close()
        await asyncio.sleep(0.05)


async def heavy_all(port: int) -> None:
    await asyncio.gather(*(heavy(port) for _ in range(NUM_HEAVY)))


async def probe(port: int, path: str = "/healthz") -> tuple[float, bytes]:
    """Return the latency of a GET request in seconds, and the response."""
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request("GET", path, b"", "Connection: close"))
    content = await reader.read()
    writer.close()
    assert b" 200 " in content[:20]
    return time.perf_counter() - started, content


def measure_health(bundle: Path) -> list[Measured]:
    """Probe `/healthz` on both ports while 64 clients of another process request attention as JSON."""

    async def probes(ports: Ports) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {"metrics port": [], "HTTP port": []}
        for _ in range(200):
            for name, port in (("metrics port", ports.operations), ("HTTP port", ports.http)):
                found[name].append((await probe(port))[0])
            await asyncio.sleep(0.02)
        return found

    with running(bundle) as ports:
        code = (
            f"import asyncio, bench.studies.hostile_http as study; asyncio.run(study.heavy_all({ports.http}))"
        )
        with subprocess.Popen([sys.executable, "-c", code]) as clients:
            time.sleep(5)
            found = asyncio.run(probes(ports))
            clients.kill()
        metrics = asyncio.run(probe(ports.operations, "/metrics"))[1].decode()
    served = re.search(r'requests_total{method="POST /v1/attnlens/encode",status="200"} (\S+)', metrics)
    assert served is not None
    rows = [Measured("large responses in the meantime", float(served[1]), 10, "", lower_is_better=False)]
    targets = {"metrics port": 50.0, "HTTP port": 1000.0}
    return rows + [
        Measured(f"/healthz beside {NUM_HEAVY} clients, {name}, p99", 1000 * p99(values), targets[name], "ms")
        for name, values in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the cost of hostile HTTP clients.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--rows", default="", help="Only measurements whose name contains this text.")
    arguments = parser.parse_args()
    print("| what | value | target | met |\n|---|---|---|---|")
    for name, measure in {"slow": measure_slow, "health": measure_health}.items():
        if arguments.rows in name:
            for row in measure(arguments.bundle):
                print(row, flush=True)
    if arguments.rows in "fuzz":
        for row in measure_fuzz(arguments.bundle, arguments.requests):
            print(row, flush=True)


if __name__ == "__main__":
    main()
