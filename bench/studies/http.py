"""Compares the HTTP routes with gRPC, in one run with one server.

    python -m bench.studies.http BUNDLE [--clients 64] [--seconds 4] [--repetitions 7] [--infinity]

64 clients with persistent connections send one text each, to `Embed` and to `/embeddings` with the formats
`float` and `base64`. They alternate, and each ratio is one of neighbors in time. A sample of the responses is
compared with the response to the same request alone. CPU is that of the server per text. `--infinity` adds
Infinity's `/embeddings` with the weights of MiniLM; its environment is created at the first run.
"""

import argparse
import os
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.lines import LineProcess
from bench.made.bundles import find_checkpoint
from bench.made.environments import ISOLATED, environment_python
from bench.servers import attnlens_server, infinity_server
from bench.workloads import Corpus

PROTOCOLS = ("grpc", "http float", "http base64")
INFINITY = "http"  # its name in the load generator
LABELS = {INFINITY: "Infinity, http float"}
LOG = Path(".bench/logs")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare HTTP with gRPC.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--infinity", action="store_true")
    arguments = parser.parse_args()
    port = 18_000 + os.getpid() % 10_000
    generator = [sys.executable, "-m", "bench.load.generator"]
    with ExitStack() as stack:
        ours = stack.enter_context(
            attnlens_server(arguments.bundle, "fp32", 0, LOG / "http.log", "--http-port", str(port))
        )
        load = stack.enter_context(LineProcess(generator, {}, LOG / "http-load.log"))
        servers = dict.fromkeys(PROTOCOLS, ours)
        if arguments.infinity:
            python = environment_python("infinity")
            servers[INFINITY] = stack.enter_context(
                infinity_server(python, find_checkpoint(), ISOLATED, LOG / "infinity.log")
            )
        texts = Corpus(arguments.bundle).mixed(1024)
        for protocol, server in servers.items():
            address = f"127.0.0.1:{port}" if protocol in PROTOCOLS[1:] else server.address
            prepare(load, protocol, address, texts)
        rates: dict[str, list[float]] = {protocol: [] for protocol in servers}
        cpu_ms: dict[str, list[float]] = {protocol: [] for protocol in servers}
        difference = 0.0
        for repetition in range(arguments.repetitions + 1):  # the first is a warm-up
            for protocol, server in servers.items():
                before = server.cpu_s
                found = closed(load, protocol, arguments.clients, arguments.seconds)
                if repetition:
                    rates[protocol].append(found["texts"] / found["seconds"])
                    cpu_ms[protocol].append(1000 * (server.cpu_s - before) / max(1, found["texts"]))
                if server is ours:
                    difference = max(difference, found["max_abs_difference_from_alone"])
    print("| protocol | texts per second | relative to gRPC | server CPU, ms per text |\n|---|---|---|---|")
    for protocol in servers:
        ratios = [rate / base for rate, base in zip(rates[protocol], rates["grpc"], strict=True)]
        print(
            f"| {LABELS.get(protocol, protocol)} | {statistics.median(rates[protocol]):.0f} "
            f"| {statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}] "
            f"| {statistics.median(cpu_ms[protocol]):.2f} |"
        )
    print(f"Largest difference from the request alone: {difference:g}")


def prepare(load: LineProcess, protocol: str, address: str, texts: Any) -> None:  # noqa: ANN401
    load.request(
        do="prepare",
        key=protocol,
        texts=texts.texts,
        lengths=texts.lengths,
        num_layers=1,
        texts_per_request=1,
        check_every=16,
        protocol=protocol,
        what="embed",
        address=address,
    )


def closed(load: LineProcess, protocol: str, clients: int, seconds: float) -> dict[str, Any]:
    """Run closed-loop clients and return their metrics."""
    found = load.request(do="closed", key=protocol, clients=clients, seconds=seconds, settle_s=0.3)
    assert not found["errors"], found["errors"]
    return found


if __name__ == "__main__":
    main()
