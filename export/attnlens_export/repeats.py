"""Determinism check: repeated runs of a graph with the same number of threads must return the same bits.

ONNX Runtime distributes a node over the threads of a session. If two threads update the same element, results
differ between runs, and a comparison with PyTorch passes or fails by chance. A race is only visible if a node
has enough work to be distributed. Every graph therefore runs on an input that is longer than all windows and
blocks.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attnlens.v1.manifest_pb2 import GateKind
from attnlens_export.contributions.measure import make_feed
from attnlens_export.graph.names import CONTRIBUTIONS_PATH
from attnlens_export.json_files import finite
from attnlens_export.parity.grid import Case, Padding, make_inputs
from attnlens_export.parity.reference import Tensors, max_abs_difference
from attnlens_export.parity.sessions import Feed, Graph
from attnlens_export.progress import StageProgress, report_each
from attnlens_export.published.pooling import read_embedding_size
from attnlens_export.results import CheckResult, Figure
from attnlens_model import EncoderConfig

THREADS = (1, 2, 4)
REPEATS = 4
MIN_TOKENS = 128


@dataclass(frozen=True)
class RepeatedRuns:
    """Runs of one graph on one input.

    Attributes:
        graph: Path of the ONNX file.
        case: Input shape.
        threads: Number of threads of the session.
        repeats: Number of runs.
        max_difference: Maximum difference between the first run and a later one.
        output: Output with the maximum difference. Empty if all runs returned the same bits.
    """

    graph: str
    case: str
    threads: int
    repeats: int
    max_difference: float
    output: str


@dataclass(frozen=True)
class RepeatsResult(CheckResult):
    """Repeated runs of all graphs of a bundle."""

    runs: tuple[RepeatedRuns, ...]

    def figures(self) -> list[Figure]:
        """Return the maximum difference of each graph and number of threads."""
        figures = []
        for run in self.runs:
            failure = (
                f"{run.graph} at {run.case} with {run.threads} threads: {run.output} differs by up to "
                f"{run.max_difference:.2e} between {run.repeats} runs of the same input"
            )
            kind = GateKind.GATE_KIND_MAX_REPEAT_DIFFERENCE
            figures.append(Figure(run.graph, run.max_difference, 0.0, failure, kind))
            if run.output and run.max_difference == 0:  # 0.0 and -0.0 have different bits
                figures.append(Figure(run.graph, 1.0, 0.0, failure))
        return figures

    def describe(self) -> str:
        """Return a one-line summary of the runs."""
        threads = ", ".join(str(count) for count in dict.fromkeys(run.threads for run in self.runs))
        outcome = "equal bits" if self.passed else "DIFFERENT bits"
        return f"each graph {REPEATS} times with {threads} threads, {self.runs[0].case}: {outcome}"

    def to_json(self) -> list[dict[str, Any]]:
        """Return every field as a JSON value. Non-finite numbers become None."""
        return [finite(dataclasses.asdict(run)) for run in self.runs]


def measure_repeats(
    directory: Path, graph_paths: Sequence[str], config: EncoderConfig, progress: StageProgress
) -> RepeatsResult:
    """Run every graph several times with one, two and four threads.

    Args:
        directory: Bundle directory.
        graph_paths: Paths of the ONNX files in the bundle.
        config: Configuration of the encoder.
        progress: Called before each graph.
    """
    case = repeated_case(config)
    inputs = make_inputs(case, config)
    runs = []
    for path in report_each(graph_paths, progress):
        feed: Feed = inputs.feed()
        if path == CONTRIBUTIONS_PATH:
            feed = make_feed(inputs, config, read_embedding_size(directory, config.vector_size))
        for threads in THREADS:
            graph = Graph(directory, path, threads=threads)
            first = graph.run_feed(feed)
            differences = [_difference(first, graph.run_feed(feed)) for _ in range(REPEATS - 1)]
            max_difference, output = max(differences, key=_sort_key)
            runs.append(RepeatedRuns(path, str(case), threads, REPEATS, max_difference, output))
            del graph  # two sessions would hold the weights twice
    progress("", len(graph_paths), len(graph_paths))
    return RepeatsResult(tuple(runs))


def repeated_case(config: EncoderConfig) -> Case:
    """Return the input shape: one text that is longer than every window and block of the encoder."""
    edges = [edge for attention in config.layer_attentions for edge in attention.edges]
    return Case(1, min(max([MIN_TOKENS, *(edge + 1 for edge in edges)]), config.max_tokens), Padding.NONE)


def _sort_key(difference: tuple[float, str]) -> tuple[bool, float]:
    value, output = difference
    return output != "", float(np.nan_to_num(value, nan=np.inf))


def _difference(first: Tensors, second: Tensors) -> tuple[float, str]:
    """Return the maximum difference and the output that has it, or (0, "") if all bits are equal."""
    differences = {
        name: max_abs_difference(tensor, second[name])
        for name, tensor in first.items()
        if tensor.tobytes() != second[name].tobytes()
    }
    if not differences:
        return 0.0, ""
    output = max(differences, key=lambda name: np.nan_to_num(differences[name], nan=np.inf))
    return differences[output], output
