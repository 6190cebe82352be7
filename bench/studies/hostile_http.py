"""Measures the cost of hostile HTTP clients: `python -m bench.studies.hostile_http BUNDLE`.

Each measurement attacks a new server and compares the result with a target. tests/server/http_api covers the
behavior under the same attacks. Requires Linux and an otherwise idle machine.
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bench.servers import RunningServer
from bench.studies.hostile import Measured, p99, served

NUM_SLOW, NUM_CALLS, NUM_HEAVY = 1000, 300, 64
GOOD = {"input": ["The cat sits.", "A dog runs."], "truncate": True}
# All weights of the longest text, whose response has about 100 MB.
HEAVY = {"inputs": ["word " * 250], "attention": [{}], "truncate": True}


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
    parser.add_argument("--rows", default="", help="Only measurements whose name contains this text.")
    arguments = parser.parse_args()
    print("| what | value | target | met |\n|---|---|---|---|")
    for name, measure in {"slow": measure_slow, "health": measure_health}.items():
        if arguments.rows in name:
            for row in measure(arguments.bundle):
                print(row, flush=True)


if __name__ == "__main__":
    main()
