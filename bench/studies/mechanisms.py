"""Generates the cost table of attention mechanisms in docs/mechanisms.md.

    python -m bench.studies.mechanisms [MECHANISM ...] [--threads 2]

Runs randomly initialized encoders (6 layers, hidden size 384, 12 heads) in ONNX Runtime with one text per
batch, alternating with softmax attention of the same size. Times are medians. Memory is the peak increase
over the memory after loading the graph, measured in a separate process.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from attnlens_export.graph.names import ATTENTIONS_PATH, EMBEDDINGS_PATH
from attnlens_export.graph.trace import embeddings_graph, trace
from attnlens_export.graph.write import write_embedded
from attnlens_model import EncoderConfig, new_encoder

NUM_LAYERS, WIDTH, NUM_HEADS, MAX_TOKENS = 6, 384, 12, 4096
PLAIN = "softmax"
# Configuration overrides and text lengths, by mechanism.
MECHANISMS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    PLAIN: ({}, ()),
    "longformer": ({"kind": "longformer", "window": 64}, (64, 128, 1024, 4096)),
    "big_bird": ({"kind": "big_bird", "block_size": 64, "num_random_blocks": 3}, (128, 704, 1024, 4096)),
    "overlapping": ({"kind": "overlapping", "overlap": 8}, (128, 256, 512)),
    "mixture": ({"kind": "mixture", "shared_heads": 3, "active_heads": 6}, (128, 256, 512)),
    "composed": ({"kind": "composed"}, (128, 256, 512)),
}
GRAPHS = {"embeddings": EMBEDDINGS_PATH, "attention": ATTENTIONS_PATH}
MIN_RUNS, MIN_SECONDS = 3, 1.0


def configuration(attention: dict[str, Any]) -> EncoderConfig:
    """Return the encoder configuration of a row."""
    return EncoderConfig.from_dict(
        {
            "family": "attnlens",
            "hidden_size": WIDTH,
            "num_layers": NUM_LAYERS,
            "embeddings": {"vocab_size": 1000},
            "positions": {"max_position_embeddings": MAX_TOKENS},
            "attention": {"kind": PLAIN, "num_heads": NUM_HEADS, **attention},
            "feed_forward": {"intermediate_size": 4 * WIDTH},
        }
    )


def write_graphs(name: str, directory: Path) -> None:
    """Trace the encoder of a mechanism and write both graphs."""
    config = configuration(MECHANISMS[name][0])
    attentions = trace(new_encoder(config, seed=0), config)
    for graph, traced in (("attention", attentions), ("embeddings", embeddings_graph(attentions))):
        path = directory / f"{name}.{graph}.onnx"
        write_embedded(path, traced.proto, traced.weights)


def open_graph(path: Path, threads: int) -> onnxruntime.InferenceSession:
    """Open a graph with the provider of the server."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def feed(length: int) -> dict[str, np.ndarray]:
    """Return the inputs for one text of `length` tokens."""
    ids = np.random.default_rng(length).integers(0, 1000, (1, length))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}


def run_s(session: onnxruntime.InferenceSession, inputs: dict[str, np.ndarray]) -> float:
    """Return the duration of one run, in seconds."""
    begin = time.perf_counter()
    session.run(None, inputs)
    return time.perf_counter() - begin


def times_s(sessions: dict[str, onnxruntime.InferenceSession], length: int) -> dict[str, float]:
    """Return the median time of each session in alternating runs, in seconds."""
    inputs = feed(length)
    durations: dict[str, list[float]] = {name: [] for name in sessions}
    for session in sessions.values():
        session.run(None, inputs)
    begin = time.perf_counter()
    while len(durations[PLAIN]) < MIN_RUNS or time.perf_counter() - begin < MIN_SECONDS:
        for name, session in sessions.items():
            durations[name].append(run_s(session, inputs))
    return {name: statistics.median(times) for name, times in durations.items()}


def peak_bytes(path: Path, length: int, threads: int) -> int:
    """Return the peak memory increase of one run, measured in a separate process."""
    command = [sys.executable, "-m", "bench.studies.mechanisms", "--peak-of", str(path)]
    command += ["--length", str(length), "--threads", str(threads)]
    response = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(json.loads(response))


def print_peak(path: Path, length: int, threads: int) -> None:
    """Run a graph once in this process and print the peak memory increase in bytes."""
    session = open_graph(path, threads)
    session.run(None, feed(8))
    before = peak_memory_bytes()
    session.run(None, feed(length))
    print(json.dumps(peak_memory_bytes() - before))


def peak_memory_bytes() -> int:
    """Return the peak resident memory of this process."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return 1024 * int(line.split()[1])


def rows(name: str, directory: Path, threads: int) -> Iterator[str]:
    """Yield the table rows of a mechanism."""
    for graph in GRAPHS:
        paths = {kind: directory / f"{kind}.{graph}.onnx" for kind in (PLAIN, name)}
        sessions = {kind: open_graph(path, threads) for kind, path in paths.items()}
        for length in MECHANISMS[name][1]:
            medians = times_s(sessions, length)
            peak = peak_bytes(paths[name], length, threads) / 1e6
            ratio = medians[name] / medians[PLAIN]
            cells = [name, graph, str(length), f"{1000 * medians[name]:.1f}", f"{1000 * medians[PLAIN]:.1f}"]
            yield "| " + " | ".join([*cells, f"{ratio:.2f}", f"{peak:.0f}"]) + " |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mechanisms", nargs="*", help="Mechanisms to run. Defaults to all.")
    parser.add_argument("--threads", type=int, default=2, help="Threads of ONNX Runtime.")
    parser.add_argument("--peak-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--length", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak_of:
        print_peak(arguments.peak_of, arguments.length, arguments.threads)
        return
    print("| mechanism | graph | tokens | ms | plain, ms | ratio | memory, MB |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        names = dict.fromkeys((PLAIN, *(arguments.mechanisms or MECHANISMS)))
        for name in names:
            write_graphs(name, Path(directory))
        for name in names:
            for row in rows(name, Path(directory), arguments.threads):
                print(row, flush=True)


if __name__ == "__main__":
    main()
