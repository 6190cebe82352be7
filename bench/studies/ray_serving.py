"""Compares two Ray Serve replicas with one plain server, on the same cores in one run.

    python -m bench.studies.ray_serving BUNDLE [--clients 64] [--texts 32] [--seconds 20] [--repetitions 5]

The replicas have one thread each, and the server has two. Clients with connections of their own send `Embed`
in a closed loop, over gRPC, to the server and to Serve's proxy. They alternate, and each ratio is one of
neighbors in time. A sample of the responses is compared with the response to the same request alone. The load
generator and the idle processes of the other system use the same cores.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import ray
from ray import serve

from attnlens_ray import GRPC_SERVICE, application
from bench.lines import LineProcess
from bench.servers import attnlens_server
from bench.workloads import Corpus

LOG = Path(".bench/logs")
SERVER, REPLICAS = "attnlens serve", "Ray Serve"
NUM_REPLICAS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare Ray Serve with a plain server.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--texts", type=int, default=32, help="texts per request")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    with ExitStack() as stack:
        server = stack.enter_context(
            attnlens_server(arguments.bundle, "fp32", NUM_REPLICAS, LOG / "ray-plain.log")
        )
        addresses = {SERVER: server.address, REPLICAS: stack.enter_context(serving(arguments.bundle))}
        generator = [sys.executable, "-m", "bench.load.generator"]
        load = stack.enter_context(LineProcess(generator, {}, LOG / "ray-load.log"))
        for workload in ("short", "mixed"):
            texts = getattr(Corpus(arguments.bundle), workload)(2048)
            for name, address in addresses.items():
                prepare(load, name, address, texts, arguments.texts)
            found = measure(load, arguments.clients, arguments.seconds, arguments.repetitions)
            show(workload, found)


@contextmanager
def serving(bundle: Path) -> Iterator[str]:
    """Run the replicas and yield the address of Serve's gRPC proxy."""
    port = 18_000 + os.getpid() % 10_000
    ray.init(
        num_cpus=NUM_REPLICAS, include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False
    )
    serve.start(
        http_options={"host": "127.0.0.1", "port": port + 1},
        grpc_options={"port": port, "grpc_servicer_functions": [GRPC_SERVICE]},
    )
    serve.run(application(bundle, min_replicas=NUM_REPLICAS, max_replicas=NUM_REPLICAS))
    yield f"127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()


def prepare(load: LineProcess, key: str, address: str, texts: Any, texts_per_request: int) -> None:  # noqa: ANN401
    load.request(
        do="prepare",
        key=key,
        texts=texts.texts,
        lengths=texts.lengths,
        num_layers=1,
        texts_per_request=texts_per_request,
        check_every=16,
        protocol="grpc",
        what="embed",
        address=address,
    )


def measure(
    load: LineProcess, clients: int, seconds: float, repetitions: int
) -> dict[str, list[dict[str, Any]]]:
    """Return the metrics of each repetition after a warm-up."""
    results: dict[str, list[dict[str, Any]]] = {SERVER: [], REPLICAS: []}
    for repetition in range(repetitions + 1):
        for key in (SERVER, REPLICAS) if repetition % 2 else (REPLICAS, SERVER):
            found = load.request(do="closed", key=key, clients=clients, seconds=seconds, settle_s=seconds / 4)
            assert not found["errors"], found["errors"]
            if repetition:
                results[key].append(found)
    return results


def show(workload: str, results: dict[str, list[dict[str, Any]]]) -> None:
    rates = {key: [each["texts"] / each["seconds"] for each in found] for key, found in results.items()}
    print(f"| {workload} | texts per second | ratio | p50, ms | p95, ms |\n|---|---|---|---|---|")
    for key, found in results.items():
        ratios = [rate / base for rate, base in zip(rates[key], rates[SERVER], strict=True)]
        p50, p95 = (statistics.median(each["latency_ms"][name] for each in found) for name in ("p50", "p95"))
        print(
            f"| {key} | {statistics.median(rates[key]):.0f} "
            f"| {statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}] "
            f"| {p50:.0f} | {p95:.0f} |"
        )
    worst = max(each["max_abs_difference_from_alone"] for found in results.values() for each in found)
    print(f"Largest difference from the request alone: {worst:g}\n", flush=True)


if __name__ == "__main__":
    main()
