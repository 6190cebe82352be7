"""Compares the HTTP routes with gRPC, in one run with one server.

    python -m bench.studies.http BUNDLE [--clients 64] [--seconds 4] [--repetitions 7]

64 clients with persistent connections send one text each, to `Embed` and to `/embeddings` with the formats
`float` and `base64`. The three alternate, and each ratio is one of neighbors in time. A sample of the
responses is compared with the response to the same request alone. CPU is that of the server per text.
"""

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from bench.lines import LineProcess
from bench.servers import attnlens_server
from bench.workloads import Corpus

PROTOCOLS = ("grpc", "http float", "http base64")
LOG = Path(".bench/logs")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare HTTP with gRPC.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--repetitions", type=int, default=7)
    arguments = parser.parse_args()
    port = 18_000 + os.getpid() % 10_000
    generator = [sys.executable, "-m", "bench.load.generator"]
    with (
        attnlens_server(arguments.bundle, "fp32", 0, LOG / "http.log", "--http-port", str(port)) as server,
        LineProcess(generator, {}, LOG / "http-load.log") as load,
    ):
        texts = Corpus(arguments.bundle).mixed(1024)
        for protocol in PROTOCOLS:
            prepare(load, protocol, server.address if protocol == "grpc" else f"127.0.0.1:{port}", texts)
        rates: dict[str, list[float]] = {protocol: [] for protocol in PROTOCOLS}
        cpu_ms: dict[str, list[float]] = {protocol: [] for protocol in PROTOCOLS}
        difference = 0.0
        for repetition in range(arguments.repetitions + 1):  # the first is a warm-up
            for protocol in PROTOCOLS:
                before = server.cpu_s
                found = closed(load, protocol, arguments.clients, arguments.seconds)
                if repetition:
                    rates[protocol].append(found["texts"] / found["seconds"])
                    cpu_ms[protocol].append(1000 * (server.cpu_s - before) / max(1, found["texts"]))
                difference = max(difference, found["max_abs_difference_from_alone"])
    print("| protocol | texts per second | relative to gRPC | server CPU, ms per text |\n|---|---|---|---|")
    for protocol in PROTOCOLS:
        ratios = [rate / base for rate, base in zip(rates[protocol], rates["grpc"], strict=True)]
        print(
            f"| {protocol} | {statistics.median(rates[protocol]):.0f} | {statistics.median(ratios):.2f} "
            f"[{min(ratios):.2f}, {max(ratios):.2f}] | {statistics.median(cpu_ms[protocol]):.2f} |"
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
