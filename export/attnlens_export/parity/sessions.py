"""Open graphs: in ONNX Runtime, or in the process of another runtime. Latency measurements.

Shapes: B texts in a batch, T tokens.
"""

import ctypes
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime

from attnlens_export.graph.names import (
    ATTENTIONS_PATH,
    BATCH_AXIS,
    CONTRIBUTIONS_PATH,
    DIRECTION,
    HIDDEN_OUTPUT,
    LENGTH_AXIS,
    LOGITS_OUTPUT,
    contribution_outputs,
    layer_outputs,
    output_axes,
)
from attnlens_export.graph.read import has_linked_weights, locate_weights, read_structure
from attnlens_export.parity.grid import Inputs
from attnlens_model import EncoderConfig
from attnlens_runtimes import GraphProcess, RuntimeFailureError

MAX_TIMING_ROUNDS = 5
MAX_ROUND_DIFFERENCE = 0.15

Feed = Mapping[str, npt.NDArray[np.generic]]
"""Graph inputs by name."""

Tensors = dict[str, npt.NDArray[np.floating]]
"""Graph outputs by name."""


def open_session(
    graph: Path | bytes,
    *,
    threads: int = 0,
    use_arena: bool = True,
    optimized_path: Path | None = None,
    weights_directory: Path | None = None,
    disabled_optimizers: Sequence[str] = ("SkipLayerNormFusion",),
) -> onnxruntime.InferenceSession:
    """Open a graph with the options that attnlens-server uses on a CPU with VNNI.

    On a CPU without VNNI, the server adds an option that makes ONNX Runtime choose slower instructions.

    Args:
        graph: Path of the ONNX file, or a serialized model.
        threads: Number of threads of a run. 0 means one per core. Measure latency with 1: the server runs
            several batches at the same time.
        use_arena: Whether to keep memory between runs. The arena retains the memory of the largest input,
            rounded up to a power of two.
        optimized_path: File to write the graph to after ONNX Runtime has optimized it.
        weights_directory: Directory of the external weights of a serialized model.
        disabled_optimizers: By default a fusion that is slower and less exact than the nodes that it replaces
            (onnxruntime issue 17689).
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # Between two runs, spinning threads would take the cores from PyTorch.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.enable_cpu_mem_arena = use_arena
    options.log_severity_level = 3  # errors are raised as exceptions
    if optimized_path is not None:
        options.optimized_model_filepath = str(optimized_path)
    if weights_directory is not None:
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(weights_directory)
        )
    return onnxruntime.InferenceSession(
        graph,
        sess_options=options,
        providers=["CPUExecutionProvider"],
        disabled_optimizers=[*disabled_optimizers],
    )


def trim_memory() -> None:
    """Return freed memory to the system: that of a session is in pieces, which the allocator would keep."""
    if hasattr(ctypes.pythonapi, "malloc_trim"):  # glibc
        ctypes.pythonapi.malloc_trim(0)


class RunnableGraph(Protocol):
    """An open graph."""

    @property
    def path(self) -> str:
        """Path of the ONNX file in the bundle."""

    def run(self, inputs: Inputs) -> Tensors:
        """Return all outputs by name."""


class Graph:
    """A graph in ONNX Runtime.

    Args:
        directory: Bundle directory.
        path: Path of the ONNX file in the bundle.
        threads: Number of threads of a run. 0 means one per core.
        model: Graph to run in place of the file, whose weights it refers to. Changed by `locate_weights`.
    """

    def __init__(
        self, directory: Path, path: str, *, threads: int = 0, model: onnx.ModelProto | None = None
    ) -> None:
        self.path = path
        source: Path | bytes = directory / path
        weights_directory = None
        if model is None and has_linked_weights(directory / path):
            model = read_structure(directory / path)
        if model is not None:
            weights_directory = locate_weights(model, (directory / path).parent)
            source = model.SerializeToString()
        trim_memory()
        self._session = open_session(
            source, threads=threads, use_arena=False, weights_directory=weights_directory
        )

    def run(self, inputs: Inputs) -> Tensors:
        """Return all outputs by name."""
        return self.run_feed(inputs.feed())

    def run_feed(self, feed: Feed) -> Tensors:
        """Return all outputs by name for inputs by name."""
        names = [output.name for output in self._session.get_outputs()]
        return dict(zip(names, self._session.run(None, feed), strict=True))


class ProcessGraph:
    """A graph in the process of another runtime. Validates the shapes of its outputs.

    Args:
        path: Path of the ONNX file in the bundle.
        process: Process with the open graph.
        config: Configuration of the encoder.
        num_logits: Number of logits per text. 0 for a graph that does not return logits.

    Attributes:
        path: Path of the ONNX file in the bundle.
        precision: Precision that the runtime reports.
        processor: Processor name that the runtime reports. Empty if it reports none.
    """

    def __init__(self, path: str, process: GraphProcess, config: EncoderConfig, num_logits: int = 0) -> None:
        self.path = path
        self._num_logits = num_logits
        self.precision = process.precision
        self.processor = process.processor
        self._process = process
        self._config = config

    def run(self, inputs: Inputs) -> Tensors:
        """Return all outputs by name.

        Raises:
            RuntimeFailureError: The runtime does not respond, or an output has the wrong shape.
        """
        return self.run_feed(inputs.feed())

    def run_feed(self, feed: Feed) -> Tensors:
        """Return all outputs by name for inputs by name.

        Raises:
            RuntimeFailureError: The runtime does not respond, or an output has the wrong shape.
        """
        batch_size, length = feed["input_ids"].shape
        sizes = {BATCH_AXIS: batch_size, LENGTH_AXIS: length}
        expected = {
            name: tuple(axis if isinstance(axis, int) else sizes[axis] for axis in axes)
            for name, axes in self._output_axes(feed).items()
        }
        outputs = self._process.run(feed)
        shapes, expected_shapes = [output.shape for output in outputs], list(expected.values())
        if shapes != expected_shapes:
            raise RuntimeFailureError(f"outputs of the shapes {shapes} instead of {expected_shapes}")
        return dict(zip(expected, outputs, strict=True))

    def _output_axes(self, feed: Feed) -> Mapping[str, tuple[int | str, ...]]:
        """Return the axes of each output, in the order of the graph."""
        if self.path == CONTRIBUTIONS_PATH:
            return contribution_outputs(self._config, feed[DIRECTION].shape[1])
        if self._num_logits:
            return {LOGITS_OUTPUT: (BATCH_AXIS, self._num_logits)}
        axes: dict[str, tuple[int | str, ...]] = {
            HIDDEN_OUTPUT: (BATCH_AXIS, LENGTH_AXIS, self._config.vector_size)
        }
        if self.path == ATTENTIONS_PATH:
            axes |= {name: output_axes(output) for name, (_, output) in layer_outputs(self._config).items()}
        return axes


@dataclass(frozen=True)
class Timings:
    """Latency of several sessions.

    Attributes:
        seconds: Minimum seconds per run, by session. Other programs on the machine only ever add to a time.
        is_reliable: Whether the last two rounds differ by at most `MAX_ROUND_DIFFERENCE`.
    """

    seconds: dict[str, float]
    is_reliable: bool


def measure_seconds(
    sessions: Mapping[str, onnxruntime.InferenceSession], feed: Feed, repetitions: int
) -> Timings:
    """Run sessions alternately, in rounds of `repetitions`, and measure the time.

    Stops when two consecutive rounds agree, or after `MAX_TIMING_ROUNDS`. The first run of each session is a
    warm-up.
    """
    for session in sessions.values():
        session.run(None, feed)
    rounds: list[dict[str, float]] = []
    while len(rounds) < MAX_TIMING_ROUNDS:
        rounds.append(dict.fromkeys(sessions, math.inf))
        for _ in range(repetitions):
            for name, session in sessions.items():
                started = time.perf_counter()
                session.run(None, feed)
                rounds[-1][name] = min(rounds[-1][name], time.perf_counter() - started)
        if len(rounds) > 1 and _agree(rounds[-2], rounds[-1]):
            break
    seconds = {name: min(times[name] for times in rounds) for name in sessions}
    return Timings(seconds, _agree(rounds[-2], rounds[-1]))


def _agree(first: Mapping[str, float], second: Mapping[str, float]) -> bool:
    return all(
        abs(seconds - second[name]) <= MAX_ROUND_DIFFERENCE * min(seconds, second[name])
        for name, seconds in first.items()
    )
