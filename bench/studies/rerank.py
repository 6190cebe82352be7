"""Compares reranking with sentence-transformers and fastembed, in one run with the same threads.

    python -m bench.studies.rerank BUNDLE CHECKPOINT [--int8 BUNDLE] [--documents 100] [--repetitions 7]

All programs rerank the same documents of up to 256 tokens, one call after another, and take turns. Each peer
uses its fastest batch size. The bundle is in this process, without gRPC. Logits are compared with those of
PyTorch. The environments of the peers are created at the first run.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

import attnlens_server
from attnlens_server.config import EngineName, Precision
from bench.lines import LineProcess, ProcessError
from bench.made.environments import ISOLATED, environment_python
from bench.workloads import Corpus

LOG = Path(".bench/logs")
MAX_TOKENS = 512
DOCUMENT_TOKENS = 256
BATCH_SIZES = (8, 32)
PEERS = ("torch", "onnx", "f32", "bf16", "fastembed")
ENVIRONMENTS = {"onnx": "onnx", "fastembed": "onnx", "f32": "openvino", "bf16": "openvino"}
NAMES = {
    "torch": "sentence-transformers, PyTorch fp32",
    "onnx": "sentence-transformers, ONNX Runtime fp32",
    "f32": "sentence-transformers, OpenVINO fp32",
    "bf16": "sentence-transformers, OpenVINO bf16",
    "fastembed": "fastembed, fp32",
}
Rerank = Callable[[], tuple[float, list[float]]]
"""Returns seconds and logits."""


class Contestant:
    """A program and its measurements."""

    def __init__(self, name: str, run: Rerank) -> None:
        self.name, self.run = name, run
        self.seconds: list[float] = []
        self.logits: list[float] = []

    def measure(self) -> None:
        """Rerank all documents once."""
        seconds, self.logits = self.run()
        self.seconds.append(seconds)


def documents_of(bundle: Path, count: int) -> tuple[str, list[str]]:
    """Return a query and documents of nearly `DOCUMENT_TOKENS` tokens."""
    corpus = Corpus(bundle)
    [query] = corpus.sentences(1).texts
    texts = corpus.long(count).texts
    return query, [corpus.cut(text, DOCUMENT_TOKENS) for text in texts]


def ours(
    stack: ExitStack,
    bundle: Path,
    engine: EngineName,
    precision: Precision,
    threads: int,
    query: str,
    documents: list[str],
) -> Contestant:
    """Open a bundle in this process."""
    model = stack.enter_context(
        attnlens_server.local(
            bundle, engine=engine, precision=precision, threads=threads, max_tokens=MAX_TOKENS
        )
    )

    def run() -> tuple[float, list[float]]:
        started = time.perf_counter()
        scores = model.score(query, documents)
        return time.perf_counter() - started, [float(logit) for logit in scores.logits]

    return Contestant(f"attnlens, {engine} {precision}", run)


def peer(
    stack: ExitStack,
    backend: str,
    bundle: Path,
    checkpoint: Path,
    threads: int,
    query: str,
    documents: list[str],
) -> Contestant:
    """Start a peer and choose its batch size."""
    python = environment_python(ENVIRONMENTS[backend]) if backend in ENVIRONMENTS else sys.executable
    directory = bundle if backend in ("onnx", "fastembed") else checkpoint
    command = [python, "-m", "bench.peers.with_cross_encoder", directory, backend, threads, MAX_TOKENS]
    process = stack.enter_context(
        LineProcess(command, ISOLATED if backend in ENVIRONMENTS else {}, LOG / f"rerank-{backend}.log")
    )

    def run_with(size: int) -> tuple[float, list[float]]:
        reply = process.request(query=query, documents=documents, batch_size=size)
        return reply["seconds"], reply["logits"]

    run_with(BATCH_SIZES[-1])  # warm-up
    size = min(BATCH_SIZES, key=lambda each: run_with(each)[0])
    return Contestant(f"{NAMES[backend]} (batches of {size})", lambda: run_with(size))


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare reranking with other programs.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--int8", type=Path, help="Bundle with an int8 graph.")
    parser.add_argument("--documents", type=int, default=100)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    arguments = parser.parse_args()
    query, documents = documents_of(arguments.bundle, arguments.documents)
    with ExitStack() as stack:
        contestants = []
        tiers: list[tuple[Path | None, EngineName, Precision]] = [
            (arguments.bundle, "onnxruntime", "fp32"),
            (arguments.bundle, "openvino", "fp32"),
            (arguments.bundle, "openvino", "bf16"),
            (arguments.int8, "onnxruntime", "int8"),
            (arguments.int8, "openvino", "int8"),
        ]
        for bundle, engine, precision in tiers:
            if bundle is None:
                continue
            try:
                contestants.append(
                    ours(stack, bundle, engine, precision, arguments.threads, query, documents)
                )
            except Exception as error:  # noqa: BLE001 - the bundle was not measured in this engine
                print(f"attnlens, {engine} {precision}: {error}", file=sys.stderr)
        for backend in arguments.peers:
            try:
                contestants.append(
                    peer(
                        stack,
                        backend,
                        arguments.bundle,
                        arguments.checkpoint,
                        arguments.threads,
                        query,
                        documents,
                    )
                )
            except ProcessError as error:
                print(f"{NAMES[backend]}: {error}", file=sys.stderr)
        for contestant in contestants:
            contestant.run()  # warm-up
        for _ in range(arguments.repetitions):
            for contestant in contestants:
                contestant.measure()
    report(contestants, len(documents))


def report(contestants: list[Contestant], num_documents: int) -> None:
    """Print a table, relative to the first contestant."""
    first = contestants[0]
    reference = next((each for each in contestants if "PyTorch" in each.name), first)
    print(f"| program | documents per second | relative to {first.name} | logit error | same order |")
    print("|---|---|---|---|---|")
    for each in contestants:
        ratios = [ours / own for ours, own in zip(first.seconds, each.seconds, strict=True)]
        error = float(np.abs(np.subtract(each.logits, reference.logits)).max())
        is_same = np.array_equal(np.argsort(each.logits), np.argsort(reference.logits))
        print(
            f"| {each.name} | {num_documents / statistics.median(each.seconds):.1f} "
            f"| {statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}] "
            f"| {error:.1e} | {'yes' if is_same else 'no'} |"
        )


if __name__ == "__main__":
    main()
