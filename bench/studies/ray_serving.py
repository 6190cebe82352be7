"""Compares two Ray Serve replicas with one plain server, on the same cores in one run.

    python -m bench.studies.ray_serving BUNDLE [--clients 64] [--texts 32] [--requests 256]

The replicas have one thread each, and the server has two. Clients with connections of their own send `Embed`
over gRPC to the server and to Serve's proxy. These alternate, and each ratio is one of neighbors in time. A
sample of the responses is compared with the response to the same request alone. CPU is that of all processes
of the server, or of Ray: proxy, replicas, controller and daemons. The load generator uses the same cores.
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
from bench.servers import RunningServer, attnlens_server
from bench.workloads import Corpus

LOG = Path(".bench/logs")
SERVER, REPLICAS = "attnlens serve", "Ray Serve"
NUM_REPLICAS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare Ray Serve with a plain server.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--texts", type=int, default=32, help="texts per request")
    parser.add_argument("--requests", type=int, default=256, help="requests per measurement")
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    with ExitStack() as stack:
        server = stack.enter_context(
            attnlens_server(arguments.bundle, "fp32", NUM_REPLICAS, LOG / "ray-plain.log")
        )
        addresses = {SERVER: server.address, REPLICAS: stack.enter_context(serving(arguments.bundle))}
        pids = {SERVER: {server.pid}, REPLICAS: descendants(os.getpid()) - {server.pid}}
        generator = [sys.executable, "-m", "bench.load.generator"]
        load = stack.enter_context(LineProcess(generator, {}, LOG / "ray-load.log"))
        for workload in ("short", "mixed"):
            texts = getattr(Corpus(arguments.bundle), workload)(2048)
            for name, address in addresses.items():
                prepare(load, name, address, texts, arguments.texts)
            found = measure(load, pids, arguments.clients, arguments.requests, arguments.repetitions)
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
    load: LineProcess, pids: dict[str, set[int]], clients: int, requests: int, repetitions: int
) -> dict[str, list[dict[str, Any]]]:
    """Return the metrics of each repetition after a warm-up."""
    results: dict[str, list[dict[str, Any]]] = {SERVER: [], REPLICAS: []}
    for repetition in range(repetitions + 1):
        for key in (SERVER, REPLICAS) if repetition % 2 else (REPLICAS, SERVER):
            before = cpu_s(pids[key])
            found = load.request(do="count", key=key, clients=clients, requests=requests)
            assert not found["errors"], found["errors"]
            if repetition:
                results[key].append(found | {"cpu_ms": 1000 * (cpu_s(pids[key]) - before) / found["texts"]})
    return results


def descendants(pid: int) -> set[int]:
    """Return the processes below a process."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    children = {int(child) for task in tasks for child in task.read_text().split()}
    return children.union(*map(descendants, children))


def cpu_s(pids: set[int]) -> float:
    """Return the CPU time of running processes, in seconds."""
    return sum(RunningServer("", pid).cpu_s for pid in pids if Path(f"/proc/{pid}").exists())


def show(workload: str, results: dict[str, list[dict[str, Any]]]) -> None:
    rates = {key: [each["texts"] / each["seconds"] for each in found] for key, found in results.items()}
    print(f"| {workload} | texts per second | ratio | CPU, ms per text | p50, ms | p95, ms |")
    print("|---|---|---|---|---|---|")
    for key, found in results.items():
        ratios = [rate / base for rate, base in zip(rates[key], rates[SERVER], strict=True)]
        p50, p95 = (statistics.median(each["latency_ms"][name] for each in found) for name in ("p50", "p95"))
        print(
            f"| {key} | {statistics.median(rates[key]):.0f} "
            f"| {statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}] "
            f"| {statistics.median(each['cpu_ms'] for each in found):.2f} | {p50:.0f} | {p95:.0f} |"
        )
    worst = max(each["max_abs_difference_from_alone"] for found in results.values() for each in found)
    print(f"Largest difference from the request alone: {worst:g}\n", flush=True)


if __name__ == "__main__":
    main()
