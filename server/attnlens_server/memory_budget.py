"""Memory budget of the process: current memory, estimates for further graphs and batches, and calls.

The coefficients were measured with MiniLM on a CPU, in both engines (docs/operations.md).
"""

import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from attnlens_server.bundle import Bundle, Kind
from attnlens_server.config import MIB
from attnlens_server.core.execution import LIGHT_TOKENS
from attnlens_server.engine import Engine
from attnlens_server.engine.scheduler import BatchLimits
from attnlens_server.errors import StartupError

_FLOAT_BYTES = 4
GRAPH_BYTES = 16 * MIB  # structures of an open graph, without its weights
SHAPE_BYTES = MIB  # OpenVINO keeps kernels for each shape of a batch
ARRIVING_SHARE = 4  # the inverse share of arriving gRPC requests in the memory of calls
# Multiples of the values that all linear layers of a layer compute for a token.
ACTIVATIONS = 1.4
# Copies of the attention weights of all layers.
WEIGHT_COPIES: dict[Kind, float] = {"attention": 2.0, "contributions": 2.5}


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Memory of a process in bytes.

    Attributes:
        held_bytes: Memory of the process after the warm-up.
        graphs_bytes: Estimated memory of graphs that are opened later.
        batches_bytes: Estimated memory of the largest batches of all lanes.
        calls_bytes: Memory of all calls.
        arriving_bytes: Memory of gRPC requests that are still arriving. 0 if there is no limit.
        limit_bytes: Maximum memory of the process, or None.
    """

    held_bytes: int
    graphs_bytes: int
    batches_bytes: int
    calls_bytes: int
    arriving_bytes: int
    limit_bytes: int | None

    def __str__(self) -> str:
        """Return all terms in MiB."""
        total = (
            self.held_bytes + self.graphs_bytes + self.batches_bytes + self.calls_bytes + self.arriving_bytes
        )
        limit = "no limit" if self.limit_bytes is None else f"limit {_mib(self.limit_bytes)}"
        return (
            f"memory at most {_mib(total)} MiB ({limit}): process now {_mib(self.held_bytes)}, graphs opened "
            f"later {_mib(self.graphs_bytes)}, batches {_mib(self.batches_bytes)}, calls "
            f"{_mib(self.calls_bytes)}, arriving requests {_mib(self.arriving_bytes)}"
        )


def plan_memory(
    bundle: Bundle, engine: Engine, *, limit_bytes: int | None, calls_bytes: int, min_calls_bytes: int
) -> MemoryBudget:
    """Return the memory budget of a process that has opened its main graph.

    Args:
        bundle: The bundle.
        engine: Its engine.
        limit_bytes: Maximum memory of the process. If None, calls get `calls_bytes`.
        calls_bytes: Maximum memory of all calls.
        min_calls_bytes: Minimum memory of all calls.

    Raises:
        StartupError: The limit leaves too little memory for calls.
    """
    held_bytes = process_bytes()
    graphs_bytes = _graphs_bytes(bundle, engine)
    batches_bytes = sum(_batches_bytes(bundle, engine, kind) for kind in engine.lanes)
    arriving_bytes = 0
    if limit_bytes is not None:
        calls_bytes = min(calls_bytes, limit_bytes - held_bytes - graphs_bytes - batches_bytes)
        if calls_bytes < min_calls_bytes:
            needed = held_bytes + graphs_bytes + batches_bytes + min_calls_bytes
            raise StartupError(
                f"max_memory_bytes is {limit_bytes}, but at least {needed} are needed: the process holds "
                f"{held_bytes}, graphs that are opened later need {graphs_bytes}, batches {batches_bytes}, "
                f"and calls at least {min_calls_bytes}. Use a larger --max-memory-bytes, --lanes 1, "
                "--no-explain, or a smaller --max-batch-tokens, --max-attention-bytes or --max-response-bytes"
            )
        arriving_bytes = min(calls_bytes // ARRIVING_SHARE, calls_bytes - min_calls_bytes)
        calls_bytes -= arriving_bytes
    return MemoryBudget(held_bytes, graphs_bytes, batches_bytes, calls_bytes, arriving_bytes, limit_bytes)


def process_bytes() -> int:
    """Return the resident memory of this process. Where this is unknown, the largest so far."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(encoding="ascii").splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _graphs_bytes(bundle: Bundle, engine: Engine) -> int:
    """Return the memory of graphs that are not open yet, and of files that are mapped but not read yet."""
    is_onnx_runtime = engine.runtime.name == "onnxruntime"
    linear_bytes = 2 * bundle.model.token_flops  # two operations per fp32 weight
    num_sessions = 1 if engine.num_lanes == 1 else 2
    copies = {kind: 2 if kind == "contributions" else 1 for kind in engine.lanes if kind != engine.main_kind}
    if not is_onnx_runtime:
        copies = {kind: count + 1 for kind, count in copies.items()}
    if not engine.runtime.is_on_cpu:
        copies, num_sessions = {}, 1  # the weights are in the memory of the device
    paths = set[str]().union(*(bundle.graph_files[bundle.graph(kind).path] for kind in engine.lanes))
    file_bytes = sum(bundle.states[path].size_bytes for path in paths)
    # ONNX Runtime copies the linear layers and maps the other weights, whose pages all sessions share.
    # OpenVINO maps the file for each graph.
    unread_bytes = max(0, file_bytes - linear_bytes) if is_onnx_runtime else file_bytes * len(copies)
    return unread_bytes + sum(
        num_sessions * (count * linear_bytes + GRAPH_BYTES) for count in copies.values()
    )


def _batches_bytes(bundle: Bundle, engine: Engine, kind: Kind) -> int:
    """Return the memory of the largest concurrent batches of a graph, including the express lane."""
    if not engine.runtime.is_on_cpu:
        return 0
    limits = engine.lanes[kind].limits
    batches = {
        length: count * length * _token_bytes(bundle, kind, length)
        for count, length in _batches(limits, engine.max_tokens)
    }
    # OpenVINO's sessions keep the memory of their largest batches, and the session for the whole machine has
    # its own. ONNX Runtime's sessions share an arena, which needs less unless it is fragmented.
    num_batches = 1 if engine.num_lanes == 1 else engine.num_lanes + 1
    light = (size for length, size in batches.items() if length <= max(LIGHT_TOKENS, min(batches)))
    largest = num_batches * max(batches.values()) + max(light)
    num_shapes = 0 if engine.runtime.name == "onnxruntime" else len(batches)
    return int(largest) + num_shapes * SHAPE_BYTES


def _batches(limits: BatchLimits, max_tokens: int) -> Iterator[tuple[int, int]]:
    """Yield numbers of texts and lengths of the largest batches."""
    for length in sorted({*range(16, max_tokens, 16), max_tokens}):
        count = max(1, limits.max_tokens // length)
        if limits.max_square_tokens is not None:
            count = max(1, min(count, limits.max_square_tokens // length**2))
        yield count, length


def _token_bytes(bundle: Bundle, kind: Kind, length: int) -> float:
    """Return the memory of a token of a text with `length` tokens while its batch runs."""
    model = bundle.model
    layer_bytes = 2 * model.token_flops / (model.num_layers * model.hidden_size)
    weight_bytes = model.pair_bytes * length + model.row_bytes  # of all layers
    num_layers = model.num_layers + 1 if kind == "contributions" else ACTIVATIONS
    copies = WEIGHT_COPIES.get(kind, 1 / model.num_layers)
    return num_layers * layer_bytes + copies * weight_bytes


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:,.0f}"
