"""Measures the wait of a light client while others are heavy: `python -m bench.studies.fairness BUNDLE`.

The light client embeds one sentence at a time. Eight heavy clients, each with its own key and several calls
at a time, embed passages (half of them in bulk), and request attention and explanations. Both run in
separate processes. Prints the times of the light client alone and with the heavy clients, the rejected
requests, the time from their arrival to their rejection, and the times of health checks over gRPC.
"""

import argparse
import json
import multiprocessing
import os
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens_server.access.keys import new_key
from bench.servers import attnlens_server
from bench.studies.hostile import p99

NUM_HEAVY, CALLS_OF_HEAVY = 8, 4
OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
PAUSE_S = 0.02  # of the light client
TEXT = "the cat sat on a mat while two old men talked about music and weather in town"
LIGHT = pb.EmbedRequest(inputs=[pb.Input(text="A man is playing a guitar on the stage.")])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=500, help="requests of the light client per round")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        keys = Path(directory) / "keys"
        secrets = write_keys(keys)
        log = Path(directory) / "server.log"
        arguments = ["--api-keys", str(keys), "--access-log", "errors"]
        with attnlens_server(options.bundle, "fp32", 0, log, *arguments) as server:
            ratios = [measure(server.address, secrets, options.requests) for _ in range(options.rounds)]
        rejections = times_of_rejections(log)
    print(
        f"p99 with the heavy clients / alone, median of {len(ratios)} rounds: {statistics.median(ratios):.2f}"
    )
    print(f"{len(rejections)} logged rejections, from arrival to status: {summary(rejections)}")


def times_of_rejections(log: Path) -> list[float]:
    """Return the times in milliseconds from the access log, which omits repeated lines."""
    entries = [json.loads(line) for line in log.read_text("utf-8").splitlines() if line.startswith("{")]
    return [entry["total_ms"] for entry in entries if entry.get("status") == "RESOURCE_EXHAUSTED"]


def write_keys(path: Path) -> list[str]:
    """Write a key file. Return the keys: the light client's first, then one per heavy client."""
    made = [new_key(name) for name in ("light", *(f"heavy-{number}" for number in range(NUM_HEAVY)))]
    path.write_text("".join(f"{line}\n" for _, line in made))
    return [key for key, _ in made]


def measure(address: str, keys: list[str], num_requests: int) -> float:
    """Print the times of a round, and return the ratio of the 99th percentiles."""
    alone = light(address, keys[0], num_requests)
    with heavy(address, keys[1:]) as counts:
        time.sleep(3)
        beside = light(address, keys[0], num_requests)
    print(
        f"alone {summary(alone.embed_ms)}; beside {summary(beside.embed_ms)}; health checks "
        f"{summary(alone.health_ms)}; beside {summary(beside.health_ms)}; rejected: light "
        f"{beside.num_rejected}, heavy {json.dumps(counts)}",
        flush=True,
    )
    return p99(beside.embed_ms) / p99(alone.embed_ms)


class Light(NamedTuple):
    """Measurements of a light client.

    Attributes:
        embed_ms: Times of its requests.
        health_ms: Times of health checks in between.
        num_rejected: Number of rejected requests.
    """

    embed_ms: list[float]
    health_ms: list[float]
    num_rejected: int


def light(address: str, key: str, num_requests: int) -> Light:
    """Send requests of one sentence, one after the other."""
    embed_ms, health_ms, num_rejected = [], [], 0
    with grpc.insecure_channel(address) as channel:
        stub, health = EncoderServiceStub(channel), HealthStub(channel)
        stub.Embed(LIGHT, metadata=metadata(key))
        for _ in range(num_requests):
            started = time.perf_counter()
            try:
                stub.Embed(LIGHT, metadata=metadata(key))
                embed_ms.append(1000 * (time.perf_counter() - started))
            except grpc.RpcError:
                num_rejected += 1
            started = time.perf_counter()
            health.Check(HealthCheckRequest(), metadata=metadata(key))
            health_ms.append(1000 * (time.perf_counter() - started))
            time.sleep(PAUSE_S)
    return Light(embed_ms, health_ms, num_rejected)


@contextmanager
def heavy(address: str, keys: list[str]) -> Iterator[dict[str, int]]:
    """Run the heavy clients for the duration of the block. Yields the counts of their statuses at the end."""
    context = multiprocessing.get_context("spawn")
    stop, results, counts = context.Event(), context.Queue(), dict[str, int]()
    process = context.Process(target=run_heavy, args=(address, keys, stop, results))
    process.start()
    yield counts
    stop.set()
    counts |= results.get(timeout=120)
    process.join()


def run_heavy(address: str, keys: list[str], stop: Any, results: Any) -> None:  # noqa: ANN401 - of the context
    """Send requests until `stop` is set. Leaves most CPU time to the server, as on a machine of its own."""
    os.nice(10)
    counts: Counter[str] = Counter()
    threads = [
        threading.Thread(target=send, args=(address, key, number % 4, stop, counts))
        for number, key in enumerate(keys)
        for _ in range(CALLS_OF_HEAVY)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put(dict(counts))


def send(address: str, key: str, kind: int, stop: Any, counts: Counter[str]) -> None:  # noqa: ANN401
    """Send requests of one kind, one after the other."""
    with grpc.insecure_channel(address, OPTIONS) as channel:
        stub = EncoderServiceStub(channel)
        while not stop.is_set():
            try:
                match kind:
                    case 0 | 1:
                        request = pb.EmbedRequest(inputs=passages(64, 120))
                        stub.Embed(request, metadata=metadata(key, is_bulk=kind == 1), timeout=60)
                    case 2:
                        query = pb.AttentionQuery()
                        stub.Encode(
                            pb.EncodeRequest(inputs=passages(8, 60), attention=[query]),
                            metadata=metadata(key),
                            timeout=60,
                        )
                    case _:
                        stub.Explain(
                            pb.ExplainRequest(inputs=passages(4, 60)), metadata=metadata(key), timeout=60
                        )
                counts["OK"] += 1
            except grpc.RpcError as error:
                counts[error.code().name if isinstance(error, grpc.Call) else "?"] += 1
                stop.wait(0.05)


def passages(count: int, max_words: int) -> list[pb.Input]:
    """Return random texts."""
    lengths = [random.randint(5, max_words) for _ in range(count)]
    return [pb.Input(text=" ".join(random.choices(TEXT.split(), k=length))) for length in lengths]


def metadata(key: str, *, is_bulk: bool = False) -> tuple[tuple[str, str | bytes], ...]:
    """Return the metadata of a call."""
    priority = (("attnlens-priority", "bulk"),) if is_bulk else ()
    return (("authorization", f"Bearer {key}"), *priority)


def summary(times: list[float]) -> str:
    """Return median and 99th percentile."""
    return f"{statistics.median(times):.1f} / {p99(times):.1f} ms" if len(times) > 1 else "none"


if __name__ == "__main__":
    main()
