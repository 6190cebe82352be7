"""Compares the engine, from text to vector, with its graph alone.

    python -m bench.studies.engine_share BUNDLE --engine openvino --precision bf16

Embeds passages and sentences in-process, and records the padded batches. The graph alone then runs the same
batches in as many threads as there are lanes, without tokenization, batching, pooling or normalization.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnlens_server.config import ServerConfig
from attnlens_server.engine.runtimes.runtime import Session
from bench.ours import InProcess
from bench.peers.timing import run_in_threads
from bench.workloads import CUT_TOKENS, Corpus

ROUNDS = 7
Run = tuple[Any, ...]  # arguments of `Session.run`


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the engine with its graph alone.")
    parser.add_argument("bundle", type=Path, help="Bundle to measure.")
    parser.add_argument("--engine", choices=("onnxruntime", "openvino"), default="onnxruntime")
    parser.add_argument("--precision", choices=("fp32", "bf16", "int8"), default="fp32")
    parser.add_argument("--threads", type=int, default=2, help="Threads and lanes. Defaults to 2.")
    arguments = parser.parse_args()
    config = ServerConfig(
        bundle=arguments.bundle,
        provider="cpu",
        engine=arguments.engine,
        precision=arguments.precision,
        threads=arguments.threads,
        max_tokens=CUT_TOKENS,
    )
    corpus, engine = Corpus(arguments.bundle), InProcess(config)
    print("| texts | engine, tokens/s | graph alone | engine / graph | padding |\n|---|---|---|---|---|")
    for workload in (corpus.passages(800), corpus.sentences(2500)):
        batches = record(engine, workload.texts)
        session = engine.lanes.sessions.get(has_whole_machine=False)
        seconds: list[float] = []
        alone: list[float] = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            engine.run(workload.texts, "embed", 0)
            seconds.append(time.perf_counter() - started)
            alone.append(replay(session, batches, arguments.threads))
        ratio = statistics.median(graph / whole for graph, whole in zip(alone, seconds, strict=True))
        num_computed = sum(inputs.input_ids.size for inputs, *_ in batches)
        rates = [workload.num_tokens / statistics.median(times) for times in (seconds, alone)]
        print(
            f"| {workload.name} | {rates[0]:,.0f} | {rates[1]:,.0f} | {ratio:.2f} | "
            f"{1 - workload.num_tokens / num_computed:.0%} |",
            flush=True,
        )


def record(engine: InProcess, texts: list[str]) -> list[Run]:
    """Embed texts, and return the arguments of each run of the graph."""
    engine.run(texts, "embed", 0)  # opens both sessions
    runs: list[Run] = []
    session = engine.lanes.sessions.get(has_whole_machine=False)
    run = session.run

    def recorded(*arguments: Any) -> Any:  # noqa: ANN401 - those of `run`
        runs.append(arguments[:2])  # without the cancellation
        return run(*arguments)

    vars(session)["run"] = recorded
    try:
        engine.run(texts, "embed", 0)
    finally:
        del vars(session)["run"]
    return runs


def replay(session: Session, runs: Sequence[Run], num_threads: int) -> float:
    """Return the time in seconds that the graph takes for the runs in several threads."""
    started = time.perf_counter()
    run_in_threads(lambda arguments: session.run(*arguments), runs, num_threads)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
