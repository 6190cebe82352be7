"""Determinism gate: repeated runs of a graph with the same number of threads must return the same bits.

ONNX Runtime distributes a node over the threads of a session. If a kernel lets two threads update one
element, results differ between runs, and a comparison with PyTorch passes or fails by chance. Races need
enough work to be split up, so every graph runs at the model's own width, on an input longer than every window
and block.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from attnlens.v1.manifest_pb2 import Gate, GateKind
from attnlens_export.contributions.measure import make_feed
from attnlens_export.graph.names import CONTRIBUTIONS_PATH, graph_id
from attnlens_export.json_files import finite
from attnlens_export.parity.compare import max_abs_difference
from attnlens_export.parity.grid import Case, Padding, make_inputs
from attnlens_export.parity.measure import Graph
from attnlens_export.parity.reference import Tensors
from attnlens_export.parity.result import max_or_nan
from attnlens_export.progress import StageProgress
from attnlens_export.published.pooling import read_embedding_size
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
        max_difference: Largest difference between the first run and another one.
        output: Output with the largest difference. Empty if all runs returned the same bits.
    """

    graph: str
    case: str
    threads: int
    repeats: int
    max_difference: float
    output: str


@dataclass(frozen=True)
class RepeatsResult:
    """Repeated runs of every graph of a bundle."""

    runs: tuple[RepeatedRuns, ...]

    @property
    def passed(self) -> bool:
        """Whether every run returned the bits of the first run with the same number of threads."""
        return not self.failures()

    def failures(self) -> list[str]:
        """Return a line for each graph and number of threads whose runs differ."""
        return [
            f"{run.graph} at {run.case} with {run.threads} threads: {run.output} differs by up to "
            f"{run.max_difference:.2e} between {run.repeats} runs of the same input"
            for run in self.runs
            if run.output
        ]

    def gates(self) -> list[Gate]:
        """Return one gate per graph."""
        paths = dict.fromkeys(run.graph for run in self.runs)
        return [
            Gate(
                graph=graph_id(path),
                kind=GateKind.GATE_KIND_MAX_REPEAT_DIFFERENCE,
                limit=0,
                value=max_or_nan(run.max_difference for run in self.runs if run.graph == path),
            )
            for path in paths
        ]

    def describe(self) -> str:
        """Return one line on what was run."""
        threads = ", ".join(str(count) for count in dict.fromkeys(run.threads for run in self.runs))
        outcome = "equal bits" if self.passed else "DIFFERENT bits"
        return f"each graph {REPEATS} times with {threads} threads, {self.runs[0].case}: {outcome}"

    def as_json(self) -> list[dict[str, Any]]:
        """Return every field as a JSON value, non-finite numbers as None."""
        return [finite(dataclasses.asdict(run)) for run in self.runs]


def measure_repeats(
    directory: Path, graph_paths: Sequence[str], config: EncoderConfig, progress: StageProgress
) -> RepeatsResult:
    """Run every graph several times with one, two and four threads.

    Args:
        directory: Bundle directory.
        graph_paths: ONNX files, relative to `directory`.
        config: Configuration of the encoder.
        progress: Called before each graph.
    """
    case = repeated_case(config)
    inputs = make_inputs(case, config)
    runs = []
    for index, path in enumerate(graph_paths):
        progress(path, index, len(graph_paths))
        feed: Mapping[str, npt.NDArray[np.generic]] = inputs.feed()
        if path == CONTRIBUTIONS_PATH:
            feed = make_feed(inputs, config, read_embedding_size(directory, config.vector_size))
        for threads in THREADS:
            graph = Graph(directory, path, threads=threads)
            first = graph.run_feed(feed)
            differences = [_difference(first, graph.run_feed(feed)) for _ in range(REPEATS - 1)]
            worst, output = max(differences, key=_badness)
            runs.append(RepeatedRuns(path, str(case), threads, REPEATS, worst, output))
            del graph  # two sessions would hold the weights twice
    progress("", len(graph_paths), len(graph_paths))
    return RepeatsResult(tuple(runs))


def repeated_case(config: EncoderConfig) -> Case:
    """Return the input shape: one text, longer than every window and block of the encoder's attention."""
    edges = [edge for attention in config.layer_attentions for edge in attention.edges]
    return Case(1, min(max([MIN_TOKENS, *(edge + 1 for edge in edges)]), config.max_tokens), Padding.NONE)


def _badness(found: tuple[float, str]) -> tuple[bool, float]:
    difference, output = found
    return output != "", float(np.nan_to_num(difference, nan=np.inf))


def _difference(first: Tensors, second: Tensors) -> tuple[float, str]:
    """Return the largest difference and its output; (0, "") if all bits are equal."""
    found = {
        name: max_abs_difference(tensor, second[name])
        for name, tensor in first.items()
        if tensor.tobytes() != second[name].tobytes()
    }
    if not found:
        return 0.0, ""
    output = max(found, key=lambda name: np.nan_to_num(found[name], nan=np.inf))
    return found[output], output
