"""Compares sequential batches on all threads with concurrent single-threaded lanes.

    python -m bench.studies.lanes BUNDLE [--graph model.onnx] [--window 64]

Runs passages through ONNX Runtime with several batch size and padding limits. The scheduler packs batches
from a window of queued texts. Rows are medians of interleaved repetitions, relative to the first row.
"""

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers

from attnlens_server.engine.batch import Item, RequestedOutput, pad
from attnlens_server.engine.runtimes.onnx_session import OnnxSession
from attnlens_server.engine.scheduler import BatchLimits, pack
from bench.peers.timing import run_in_threads
from bench.workloads import Corpus

REPETITIONS = 7
HIDDEN = RequestedOutput("last_hidden_state")


class Variant(NamedTuple):
    """Configuration of threads, lanes and batch limits."""

    threads: int
    """Threads per batch."""
    lanes: int
    """Number of concurrent batches."""
    max_tokens: int
    padding: float


def main() -> None:
    arguments = parse_arguments()
    texts = tokenize(arguments.bundle)
    cores = len(os.sched_getaffinity(0))
    variants = [Variant(cores, 1, 512, 0.05), Variant(cores, 1, 256, 0.05)]
    variants += [
        Variant(1, cores, *limits) for limits in itertools.product((128, 256, 512, 1024), (0.02, 0.05, 0.1))
    ]
    graph = arguments.bundle / "onnx" / arguments.graph
    sessions = {threads: OnnxSession(graph, "cpu", threads=threads, device_id=0) for threads in {1, cores}}
    batches = {variant: make_batches(texts, variant, arguments.window) for variant in variants}
    seconds: dict[Variant, list[float]] = {variant: [] for variant in variants}
    for repetition in range(REPETITIONS + 1):  # the first is a warm-up
        for variant in variants:
            elapsed = run(sessions[variant.threads], variant.lanes, batches[variant])
            if repetition:
                seconds[variant].append(elapsed)
    first = statistics.median(seconds[variants[0]])
    num_tokens = sum(item.num_tokens for item in texts)
    print("threads  lanes  max tokens  max padding  padding  tokens/s  relative")
    for variant in variants:
        median = statistics.median(seconds[variant])
        computed = sum(len(batch) * max(item.num_tokens for item in batch) for batch in batches[variant])
        print(
            f"{variant.threads:7}  {variant.lanes:5}  {variant.max_tokens:10}  {variant.padding:11.0%}  "
            f"{1 - num_tokens / computed:7.1%}  {num_tokens / median:8,.0f}  {first / median:8.2f}"
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare batching configurations.")
    parser.add_argument("bundle", type=Path, help="Bundle to measure.")
    parser.add_argument("--graph", default="model.onnx", help="File name of the graph.")
    parser.add_argument("--window", type=int, default=64, help="Number of queued texts. Defaults to 64.")
    return parser.parse_args()


def tokenize(bundle: Path) -> list[Item]:
    """Return the passages as engine items."""
    passages = Corpus(bundle).passages(400).texts
    tokenizer = tokenizers.Tokenizer.from_file(str(bundle / "tokenizer.json"))
    tokenizer.no_padding()
    encodings = tokenizer.encode_batch(passages)
    return [Item(np.asarray(encoding.ids, dtype=np.int64), (HIDDEN,)) for encoding in encodings]


def make_batches(texts: Sequence[Item], variant: Variant, window: int) -> list[list[Item]]:
    """Pack all texts into batches from a window of queued texts."""
    limits = BatchLimits(variant.max_tokens, variant.padding)
    waiting, batches = list(texts), []
    while waiting:
        chosen = set(pack([item.num_tokens for item in waiting[:window]], limits))
        batches.append([item for index, item in enumerate(waiting) if index in chosen])
        waiting = [item for index, item in enumerate(waiting) if index not in chosen]
    return batches


def run(session: OnnxSession, num_lanes: int, batches: Sequence[list[Item]]) -> float:
    """Return the time to run all batches, in seconds."""

    def work(batch: list[Item]) -> None:
        session.run(pad(batch, max(item.num_tokens for item in batch), pad_token_id=0), [HIDDEN.name])

    started = time.perf_counter()
    run_in_threads(work, batches, num_lanes)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
