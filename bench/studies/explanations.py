"""Cost of explanations: the contributions graph relative to embeddings, and Explain relative to Embed.

    python -m bench.studies.explanations BUNDLE

Graphs are timed alternately in one process, on one thread, with one text. The server uses all cores; 64
clients send STS-B sentences, one per request, and alternate between Embed and Explain with the default
target. The shortest time of a graph and the best turn of a method are reported.
"""

import argparse
import asyncio
import csv
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnxruntime

from attnlens.bundle import read_manifest
from attnlens.v1.manifest_pb2 import Graph
from attnlens_client import AsyncClient
from bench.workloads import DATA

LENGTHS = (16, 32, 64, 128, 256, 512)
NUM_CLIENTS = 64
TURNS = 4
TURN_S = 6.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the cost of explanations.")
    parser.add_argument("bundle", type=Path, help="MiniLM bundle.")
    bundle = parser.parse_args().bundle
    print("| tokens | embeddings, ms | contributions, ms | ratio |\n|---|---|---|---|")
    for length in LENGTHS:
        plain, explained = graph_times(bundle, length)
        ratio = explained / plain
        print(f"| {length} | {1e3 * plain:.2f} | {1e3 * explained:.2f} | {ratio:.2f} |", flush=True)
    with served(bundle) as address:
        rates = asyncio.run(measure_rates(address))
    for turn, (embed, explain) in enumerate(rates):
        print(f"turn {turn}: Embed {embed:.0f}, Explain {explain:.0f} texts/s, {explain / embed:.2f}")
    embed, explain = (max(rate[index] for rate in rates) for index in (0, 1))
    print(f"{NUM_CLIENTS} clients: Explain / Embed = {explain / embed:.2f}")


def graph_times(bundle: Path, length: int) -> tuple[float, float]:
    """Return the shortest time of the embeddings and contributions graphs for one text, in seconds."""
    manifest = read_manifest(bundle)
    graphs = {graph.id: graph for graph in manifest.graphs}
    runs = [_runner(bundle, graphs[name], length) for name in ("embeddings", "contributions")]
    times: list[list[float]] = [[], []]
    for _ in range(max(8, 2000 // length)):
        for run, durations in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            durations.append(time.perf_counter() - start)
    return min(times[0]), min(times[1])


def _runner(bundle: Path, graph: Graph, length: int) -> Callable[[], object]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        bundle / graph.path,
        options,
        providers=["CPUExecutionProvider"],
        disabled_optimizers=["SkipLayerNormFusion"],
    )
    ids = np.random.default_rng(0).integers(1000, 20_000, (1, length))
    values = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "token_type_ids": np.zeros_like(ids),
        "pooling_weights": np.full((1, length), 1 / length, dtype=np.float32),
        "takes_maximum": np.zeros(1, dtype=np.float32),
        "towards_itself": np.ones(1, dtype=np.float32),
    }
    for value in graph.inputs:
        if value.name in ("direction", "head_gates"):
            shape = (1, *(int(axis) for axis in value.axes[1:]))
            values[value.name] = np.full(shape, value.name == "head_gates", dtype=np.float32)
            if value.name == "direction":
                values["num_dimensions"] = np.array([shape[1]])
    feed = {value.name: values[value.name] for value in graph.inputs}
    return lambda: session.run(None, feed)


@contextmanager
def served(bundle: Path) -> Iterator[str]:
    """Serve a bundle with default options and yield the address."""
    command = [sys.executable, "-m", "attnlens_cli.main", "serve", str(bundle), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if match := re.search(r"127\.0\.0\.1:\d+", line):
                    yield match.group()
                    break
        finally:
            process.terminate()


async def measure_rates(address: str) -> list[tuple[float, float]]:
    """Return the texts per second of Embed and Explain in each turn."""
    with (DATA / "stsb-en-dev.csv").open(encoding="utf-8", newline="") as file:
        texts = [row[0] for row in csv.reader(file)]
    async with AsyncClient(address) as client:
        await client.explain([texts[0]])

        async def embed(text: str) -> object:
            return await client.embed([text])

        async def explain(text: str) -> object:
            return await client.explain([text])

        return [(await _rate(embed, texts), await _rate(explain, texts)) for _ in range(TURNS)]


async def _rate(call: Callable[[str], Awaitable[object]], texts: list[str]) -> float:
    end, count = time.perf_counter() + TURN_S, 0

    async def send(index: int) -> None:
        nonlocal count
        while time.perf_counter() < end:
            await call(texts[index % len(texts)])
            index += NUM_CLIENTS
            count += 1

    start = time.perf_counter()
    await asyncio.gather(*(send(index) for index in range(NUM_CLIENTS)))
    return count / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
