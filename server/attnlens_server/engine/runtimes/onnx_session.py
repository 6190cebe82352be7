"""ONNX Runtime sessions, and verification that the requested execution provider runs the graph."""

import functools
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from attnlens_server.engine.batch import BatchOutputs, HostOutputs, Inputs
from attnlens_server.engine.runtimes.mapped_weights import locate_weights
from attnlens_server.engine.runtimes.runtime import Cancellation, TimeLimit, Value, feed_of
from attnlens_server.engine.runtimes.saturation import int8_products_saturate
from attnlens_server.errors import OverloadedError, StartupError

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
# Compute-bound operators. ONNX Runtime deliberately assigns shape calculations to the CPU.
COMPUTE_OPERATORS = frozenset({"Attention", "FusedMatMul", "Gemm", "LayerNormalization", "MatMul", "Softmax"})

CUDA_OPTIONS = {
    # By default, ONNX Runtime multiplies fp32 matrices in TF32. With 10 instead of 23 mantissa bits, results
    # would differ from the checkpoint by more than the guaranteed 1e-5.
    "use_tf32": "0",
    # Allocate as much memory as a batch needs, instead of increasing powers of two.
    "arena_extend_strategy": "kSameAsRequested",
}
CHECK_CUDA = (
    "Check the driver (nvidia-smi), --device-id, and that CUDA and cuDNN are installed (attnlens[gpu] "
    "installs them), or use --provider cpu"
)
# Parts of messages about failed allocations, of ONNX Runtime, CUDA, cuBLAS and cuDNN. ONNX Runtime has no
# exception class for them.
OUT_OF_MEMORY = (
    "Failed to allocate memory",
    "smaller than requested bytes",
    "out of memory",
    "resource allocation failed",
    "ALLOC_FAILED",
)
MEMORY_RETRY_S = 1.0
_AS_REQUESTED = 1  # strategy to extend an arena: by the requested size instead of the next power of two


class OnnxSession:
    """An open ONNX graph. Implements `Session`."""

    survives_cancellation = True

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
            StartupError: The graph cannot be opened, or CUDA was requested and cannot run it.
        """
        self._session = open_graph(graph, provider, threads, device_id, limit)
        self.inputs = tuple(_describe(value) for value in self._session.get_inputs())
        self.outputs = tuple(_describe(value) for value in self._session.get_outputs())
        if provider == "cuda":
            check_placement(count_placements(self._session), graph)
        self.providers: tuple[str, ...] = tuple(self._session.get_providers())
        self.check_results: Callable[[], None] = lambda: None
        """Called after each batch. Raises if the results cannot be trusted."""

    def run(
        self, inputs: Inputs, output_names: Sequence[str], cancellation: Cancellation | None = None
    ) -> BatchOutputs:
        """Compute the named outputs of a batch, in fp32."""
        names = list(output_names)
        with reporting_lack_of_memory(*inputs.input_ids.shape), running(cancellation) as options:
            arrays = self._session.run(names, feed_of(inputs, self.inputs), options)
        self.check_results()
        return HostOutputs(dict(zip(names, arrays, strict=True)))

    def run_all(self, inputs: Inputs, limit: TimeLimit) -> dict[str, npt.NDArray[np.generic]]:
        """Compute all outputs of a batch with the graph's own data types."""
        with running(limit) as options:
            arrays = self._session.run(None, feed_of(inputs, self.inputs), options)
        return dict(zip((value.name for value in self.outputs), arrays, strict=True))


@contextmanager
def running(cancellation: Cancellation | None) -> Iterator[ort.RunOptions | None]:
    """Yield the options of a run that `cancellation` ends before its next node."""
    if cancellation is None:
        yield None
        return
    options = ort.RunOptions()
    with cancellation.ending_with(lambda: setattr(options, "terminate", True)):
        yield options


@contextmanager
def reporting_lack_of_memory(num_texts: int, length: int) -> Iterator[None]:
    """Convert a failed allocation of a batch to a transient request error.

    Raises:
        OverloadedError: The device has too little free memory for the batch.
    """
    try:
        yield
    except Exception as error:
        if not any(part in str(error) for part in OUT_OF_MEMORY):
            raise
        raise OverloadedError(
            f"the device has too little free memory for {num_texts} x {length} tokens: send shorter texts, "
            "try again later, or start the server with a smaller --max-batch-tokens and "
            "--max-attention-bytes",
            retry_after_s=MEMORY_RETRY_S,
        ) from error


def _describe(value: ort.NodeArg) -> Value:
    return Value(value.name, value.type, tuple(value.shape))


def open_graph(
    graph: Path,
    provider: Literal["cpu", "cuda"],
    threads: int,
    device_id: int,
    limit: TimeLimit | None = None,
) -> ort.InferenceSession:
    """Open `graph` with the server's session options. Use `check_placement` to verify that CUDA runs it.

    Raises:
        StartupError: ONNX Runtime cannot open the graph.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors are raised as exceptions
    # Threads that spin between batches would compete with tokenization and the event loop. Without spinning,
    # a single text takes longer. See docs/performance.md.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    disabled_optimizers = []
    providers: list[Any] = [CPU]
    if provider == "cuda":
        ort.set_default_logger_severity(3)  # each session warns that CUDA is not a plugin
        with redirect_stdout(sys.stderr):  # it prints missing libraries, but stdout is for the ready line
            ort.preload_dlls()  # CUDA and cuDNN from the dependencies of attnlens[gpu], if installed
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        providers = [(CUDA, {**CUDA_OPTIONS, "device_id": str(device_id)}), CPU]
    else:
        # The fused CPU kernel is reported to be slower and less accurate. It does not match any nodes of
        # current graphs (docs/performance.md).
        disabled_optimizers = ["SkipLayerNormFusion"]
        if int8_products_saturate():
            options.add_session_config_entry("session.x64quantprecision", "1")
        _share_arena()
        options.add_session_config_entry("session.use_env_allocators", "1")
        options.enable_mem_pattern = False  # one block for each batch shape would fragment the arena
    content = _with_located_weights(graph, options, is_mapped=provider == "cpu")
    ending = limit.ending_with(lambda: options.set_load_cancellation_flag(True)) if limit else nullcontext()
    try:
        with ending:
            return ort.InferenceSession(
                content or str(graph),
                options,
                providers=providers,
                disabled_optimizers=disabled_optimizers,
                enable_fallback=0,  # otherwise it prints errors of CUDA and opens the graph on the CPU
            )
    except Exception as error:  # ONNX Runtime raises a different class for each status code
        problem = str(error).strip().removesuffix(".")
        remedy = f". {CHECK_CUDA}" if provider == "cuda" else ""
        raise StartupError(f"ONNX Runtime cannot open {graph} on {provider}: {problem}{remedy}") from error


@functools.cache
def _share_arena() -> None:
    """Let all CPU sessions of this process allocate from one arena, which keeps as much as they use at once.

    Otherwise, each session keeps the memory of its largest batch, rounded up to powers of two.
    """
    memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    arena = ort.OrtArenaCfg({"arena_extend_strategy": _AS_REQUESTED})
    ort.create_and_register_allocator(memory, arena)


def _with_located_weights(graph: Path, options: ort.SessionOptions, *, is_mapped: bool) -> bytes | None:
    """Return the graph with external weights, which `options` locates, or None if the file can be opened."""
    try:
        located = locate_weights(graph, is_mapped=is_mapped)
    except (OSError, ValueError, IndexError, StartupError):
        return None  # ONNX Runtime reports the problem
    if located is None:
        return None
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(located.folder)
    )
    return located.content


def count_placements(session: ort.InferenceSession) -> dict[str, Counter[str]]:
    """Return the number of nodes per operator that each execution provider runs."""
    placements: dict[str, Counter[str]] = {}
    for subgraph in session.get_provider_graph_assignment_info():
        counter = placements.setdefault(subgraph.ep_name, Counter())
        counter.update(node.op_type for node in subgraph.get_nodes())
    return placements


def check_placement(
    placements: dict[str, Counter[str]], graph: Path, operators: Collection[str] = COMPUTE_OPERATORS
) -> None:
    """Verify that CUDA runs every node of `operators`.

    Raises:
        StartupError: CUDA runs no nodes, because the driver or a library is missing, or only some of them.
    """
    if CUDA not in placements:
        raise StartupError(
            f"CUDA was requested, but it runs no node of {graph.name}: ONNX Runtime fell back to "
            f"{', '.join(sorted(placements))}. {CHECK_CUDA}"
        )
    misplaced = {
        provider: {op: count for op, count in counter.items() if op in operators}
        for provider, counter in placements.items()
        if provider != CUDA
    }
    for provider, counts in misplaced.items():
        if counts:
            listed = ", ".join(f"{count} {op}" for op, count in sorted(counts.items()))
            raise StartupError(
                f"CUDA was requested, but {provider} runs {listed} of {graph.name}: "
                "use another version of onnxruntime-gpu, or --provider cpu"
            )
