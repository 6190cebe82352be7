"""Determinism check: repeated runs of a graph with the same number of threads must return the same bits.

ONNX Runtime distributes a node over the threads of a session. If two threads update the same element, results
differ between runs, and a comparison with PyTorch passes or fails by chance. A race is only visible with
several threads, and if a node has enough work to be distributed. Every graph therefore runs on an input that
is longer than all windows and blocks.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from attnlens.v1.manifest_pb2 import GateKind
from attnlens_export.contributions.measure import make_feed
from attnlens_export.graph.names import CONTRIBUTIONS_PATH
from attnlens_export.parity.grid import Case, Padding, make_inputs
from attnlens_export.parity.reference import Tensors, max_abs_difference
from attnlens_export.parity.sessions import Feed, Graph
from attnlens_export.progress import StageProgress, report_each
from attnlens_export.published.pooling import read_embedding_size
from attnlens_export.results import Comparison, Result
from attnlens_model import EncoderConfig

THREADS = (2, 4)
REPEATS = 4
MIN_TOKENS = 128


def measure_repeats(
    directory: Path, graph_paths: Sequence[str], config: EncoderConfig, progress: StageProgress
) -> Result:
    """Run every graph several times with two and four threads.

    Args:
        directory: Bundle directory.
        graph_paths: Paths of the ONNX files in the bundle.
        config: Configuration of the encoder.
        progress: Called before each graph.
    """
    case = repeated_case(config)
    inputs = make_inputs(case, config)
    comparisons: list[Comparison] = []
    for path in report_each(graph_paths, progress):
        feed: Feed = inputs.feed()
        if path == CONTRIBUTIONS_PATH:
            feed = make_feed(inputs, config, read_embedding_size(directory, config.vector_size))
        for threads in THREADS:
            graph = Graph(directory, path, threads=threads)
            first = graph.run_feed(feed)
            differences = [_difference(first, graph.run_feed(feed)) for _ in range(REPEATS - 1)]
            worst = max(differences, key=_sort_key)
            comparisons.append(_compare(path, f"{case}, {threads} threads", *worst))
            del graph  # two sessions would hold the weights twice
    progress("", len(graph_paths), len(graph_paths))
    threads_used = ", ".join(map(str, THREADS))
    return Result(
        title="Repeated runs",
        reference="the first run with the same number of threads",
        inputs=f"{case}, {REPEATS} runs of each graph with {threads_used} threads",
        comparisons=tuple(comparisons),
    )


def _compare(graph: str, inputs: str, difference: float, output: str) -> Comparison:
    if output and difference == 0:  # 0.0 and -0.0 have different bits
        difference = math.ulp(0.0)
    return Comparison(graph, inputs, difference, 0.0, GateKind.GATE_KIND_MAX_REPEAT_DIFFERENCE, worst=output)


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
