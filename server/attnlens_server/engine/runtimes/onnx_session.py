"""An ONNX Runtime session on the execution provider that was asked for, or an error that says why not."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from attnlens_server.engine.batch import BatchOutputs, HostOutputs, Inputs
from attnlens_server.engine.runtimes.runtime import TimeLimit, Value, feed_of
from attnlens_server.engine.runtimes.saturation import int8_products_saturate
from attnlens_server.errors import StartupError

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
# The operators that do the arithmetic. Bookkeeping on shapes may stay on the CPU: ONNX Runtime puts it
# there on purpose.
COMPUTE_OPERATORS = frozenset({"Attention", "FusedMatMul", "Gemm", "LayerNormalization", "MatMul", "Softmax"})

CUDA_OPTIONS = {
    # By default, ONNX Runtime multiplies fp32 matrices in TF32, which has 10 bits of mantissa in place of 23:
    # not within the 1e-5 of the checkpoint that is promised.
    "use_tf32": "0",
    # By default, memory is taken in ever larger powers of two; so, as much as a batch needs.
    "arena_extend_strategy": "kSameAsRequested",
}


class OnnxSession:
    """One ONNX graph, ready to run, by many threads at a time. See `Session`."""

    def __init__(
        self,
        graph: Path,
        provider: Literal["cpu", "cuda"],
        *,
        threads: int,
        device_id: int,
        limit: TimeLimit | None = None,
    ) -> None:
        """Open `graph`, within `limit`.

        Raises:
            StartupError: the graph can't be opened, or CUDA was asked for and does not run it.
        """
        self._session = open_graph(graph, provider, threads, device_id, limit)
        self.inputs = tuple(_describe(value) for value in self._session.get_inputs())
        self.outputs = tuple(_describe(value) for value in self._session.get_outputs())
        if provider == "cuda":
            check_placement(count_placements(self._session), graph)
        self.providers: tuple[str, ...] = tuple(self._session.get_providers())
        self.check_results: Callable[[], None] = lambda: None
        """Called after each batch; raises where what it has brought can't be trusted."""

    def run(self, inputs: Inputs, output_names: Sequence[str]) -> BatchOutputs:
        """Run a batch to the named outputs, fp32."""
        names = list(output_names)
        arrays = self._session.run(names, feed_of(inputs, self.inputs))
        self.check_results()
        return HostOutputs(dict(zip(names, arrays, strict=True)))

    def run_all(self, inputs: Inputs, limit: TimeLimit) -> dict[str, npt.NDArray[np.generic]]:
        """Run a batch to every output as the graph gives it, by name."""
        options = ort.RunOptions()
        with limit.ending_with(lambda: setattr(options, "terminate", True)):
            arrays = self._session.run(None, feed_of(inputs, self.inputs), options)
        return dict(zip((value.name for value in self.outputs), arrays, strict=True))


def _describe(value: ort.NodeArg) -> Value:
    return Value(value.name, value.type, tuple(value.shape))


def open_graph(
    graph: Path,
    provider: Literal["cpu", "cuda"],
    threads: int,
    device_id: int,
    limit: TimeLimit | None = None,
) -> ort.InferenceSession:
    """Open `graph` with our settings. With CUDA, `check_placement` tells whether it really runs there.

    Raises:
        StartupError: ONNX Runtime can't open it.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors come as exceptions; its warnings are about its own choices
    # Threads that spin between two batches take the cores from tokenizing and from the event loop;
    # the price is a slower single text. See docs/performance.md.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    disabled_optimizers = []
    providers: list[Any] = [CPU]
    if provider == "cuda":
        ort.preload_dlls()  # CUDA and cuDNN from the wheels of attnlens[gpu], where they are installed
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        providers = [(CUDA, {**CUDA_OPTIONS, "device_id": str(device_id)}), CPU]
    else:
        # Its CPU kernel is reported slower and less exact than what it replaces. It finds nothing to fuse in
        # our graphs today (docs/performance.md); this keeps it so.
        disabled_optimizers = ["SkipLayerNormFusion"]
        if int8_products_saturate():
            options.add_session_config_entry("session.x64quantprecision", "1")
    ending = limit.ending_with(lambda: options.set_load_cancellation_flag(True)) if limit else nullcontext()
    try:
        with ending:
            return ort.InferenceSession(
                str(graph), options, providers=providers, disabled_optimizers=disabled_optimizers
            )
    except Exception as error:  # ONNX Runtime raises a class of its own for each of its status codes
        raise StartupError(f"ONNX Runtime can't open {graph} on {provider}: {error}") from error


def count_placements(session: ort.InferenceSession) -> dict[str, Counter[str]]:
    """Return, for each execution provider that got any, the operators that it runs and how many of each."""
    placements: dict[str, Counter[str]] = {}
    for subgraph in session.get_provider_graph_assignment_info():
        counter = placements.setdefault(subgraph.ep_name, Counter())
        counter.update(node.op_type for node in subgraph.get_nodes())
    return placements


def check_placement(
    placements: dict[str, Counter[str]], graph: Path, operators: Collection[str] = COMPUTE_OPERATORS
) -> None:
    """Make sure that CUDA runs all arithmetic, that is, every node of `operators`.

    Raises:
        StartupError: it runs none (the driver or a library is missing) or leaves some to the CPU.
    """
    if CUDA not in placements:
        raise StartupError(
            f"CUDA was asked for, but it runs no node of {graph.name}: ONNX Runtime fell back to "
            f"{', '.join(sorted(placements))}. Check the driver (nvidia-smi) and that CUDA and cuDNN are "
            "installed (attnlens[gpu] brings them), or use --provider cpu"
        )
    strays = {
        provider: {op: count for op, count in counter.items() if op in operators}
        for provider, counter in placements.items()
        if provider != CUDA
    }
    for provider, stray in strays.items():
        if stray:
            listed = ", ".join(f"{count} {op}" for op, count in sorted(stray.items()))
            raise StartupError(
                f"CUDA was asked for, but {provider} runs {listed} of {graph.name}: "
                "use another version of onnxruntime-gpu, or --provider cpu"
            )
