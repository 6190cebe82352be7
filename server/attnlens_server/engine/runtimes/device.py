"""Session that keeps attention weights on the device and copies only the requested heads to the host.

For long texts, the weights of all heads are many times larger than the requested heads or their mean. For
short texts, a selection takes longer than a copy, so their weights are copied as a whole.

Shapes: B texts, T tokens of a text, T' tokens of a padded row, H heads, K selected heads, W columns of a band
or of blocks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from attnlens_server.bundle import Layout
from attnlens_server.engine.batch import HeadSelection, HostOutputs, Inputs, RequestedOutput, to_dense
from attnlens_server.engine.runtimes.onnx_session import (
    OnnxSession,
    check_placement,
    count_placements,
    open_graph,
    reporting_lack_of_memory,
    running,
)
from attnlens_server.engine.runtimes.runtime import Cancellation, TimeLimit, feed_of

# Both graphs slice the weights (B, H, T', T' or W) from `starts` to `ends`, which are (row, token, column),
# and gather `heads` (K,). The second graph also averages over heads. There are two graphs because ONNX
# Runtime runs all nodes of a graph, regardless of the requested outputs.
_SELECT_GRAPH = Path(__file__).with_name("select_heads.onnx")
_MEAN_GRAPH = Path(__file__).with_name("mean_of_heads.onnx")
_WEIGHTS_RANK = 4  # rank of weights (B, H, T', T') or (B, H, T', W)
_FLOAT_BYTES = 4
_OPERATORS = frozenset({"Slice", "Gather", "ReduceMean"})
# Weights of a layer and text up to this size are copied as a whole: one selection takes about as long.
COPIED_BYTES = 1 << 20


class DeviceSession(OnnxSession):
    """An attention graph on a device. Thread-safe, because each call has its own I/O binding."""

    def __init__(
        self,
        graph: Path,
        provider: Literal["cpu", "cuda"],
        *,
        threads: int,
        device_id: int,
        limit: TimeLimit | None = None,
    ) -> None:
        """Open `graph`, within `limit`, and the graphs that select heads.

        Raises:
            StartupError: A graph cannot be opened, or CUDA was requested and cannot run it.
        """
        super().__init__(graph, provider, threads=threads, device_id=device_id, limit=limit)
        self._device = (provider, device_id)  # ONNX Runtime's device names equal the provider names
        self._cutter = AttentionCutter(provider, device_id)
        self._kept_there = {value.name for value in self.outputs if len(value.shape) == _WEIGHTS_RANK}
        self.copied_bytes = COPIED_BYTES
        """Maximum size of the weights of a layer and text that are copied as a whole."""

    def run(
        self, inputs: Inputs, output_names: Sequence[str], cancellation: Cancellation | None = None
    ) -> "DeviceOutputs":
        """Compute the named outputs of a batch, in fp32."""
        with reporting_lack_of_memory(*inputs.input_ids.shape), running(cancellation) as options:
            binding = self._session.io_binding()
            for name, array in feed_of(inputs, self.inputs).items():
                binding.bind_cpu_input(name, array)  # may allocate, too: it copies to the device
            for name in output_names:
                binding.bind_output(name, *(self._device if name in self._kept_there else ("cpu", 0)))
            self._session.run_with_iobinding(binding, options)
        self.check_results()
        values = dict(zip(output_names, binding.get_outputs(), strict=True))
        kept = {name: value for name, value in values.items() if self._is_kept(name, value)}
        on_host = {name: value.numpy() for name, value in values.items() if name not in kept}
        return DeviceOutputs(HostOutputs(on_host), kept, self._cutter)

    def _is_kept(self, name: str, value: ort.OrtValue) -> bool:
        """Return whether the weights stay on the device until heads of a text are selected."""
        if name not in self._kept_there:
            return False
        size_bytes: int = _FLOAT_BYTES * math.prod(value.shape()[1:])
        return size_bytes > self.copied_bytes


@dataclass(frozen=True, slots=True)
class DeviceOutputs:
    """Outputs of a batch, with attention weights in device memory.

    Attributes:
        host: Outputs in host memory.
        attentions: Weights by graph output name, (B, H, T', T') or (B, H, T', W), in device memory.
        cutter: Selects the weights of a text on the device.
    """

    host: HostOutputs
    attentions: dict[str, ort.OrtValue]
    cutter: "AttentionCutter"

    def part(self, row: int, num_tokens: int, requested: RequestedOutput) -> npt.NDArray[np.float32]:
        """Return a requested output of one text, as described in `ItemResult.arrays`."""
        if requested.name not in self.attentions:
            return self.host.part(row, num_tokens, requested)
        selection = requested.keep if isinstance(requested.keep, HeadSelection) else HeadSelection()
        attentions = self.attentions[requested.name]
        if requested.layout is Layout.DENSE:
            return self.cutter.cut(attentions, row, (num_tokens, num_tokens), selection)
        sizes = num_tokens, attentions.shape()[-1]
        if not selection.is_dense or requested.pattern is None:
            return self.cutter.cut(attentions, row, sizes, selection)
        rows = self.cutter.cut(attentions, row, sizes, replace(selection, is_mean=False))
        weights = to_dense(rows, requested.pattern, selection.heads)
        return weights.mean(axis=0, keepdims=True) if selection.is_mean else weights


class AttentionCutter:
    """Selects the attention weights of one text of a batch, on the device."""

    def __init__(self, provider: Literal["cpu", "cuda"], device_id: int) -> None:
        """Open the two graphs.

        Raises:
            StartupError: A graph cannot be opened, or CUDA was requested and cannot run it.
        """
        self._select, self._mean = (
            open_graph(graph, provider, 1, device_id) for graph in (_SELECT_GRAPH, _MEAN_GRAPH)
        )
        if provider == "cuda":
            check_placement(count_placements(self._select), _SELECT_GRAPH, _OPERATORS)
            check_placement(count_placements(self._mean), _MEAN_GRAPH, _OPERATORS)

    def cut(
        self, attentions: ort.OrtValue, row: int, sizes: tuple[int, int], selection: HeadSelection
    ) -> npt.NDArray[np.float32]:
        """Return the weights of one text in host memory: (K, *sizes), or (1, *sizes) for the mean over heads.

        Args:
            attentions: Weights in device memory, (B, H, T', T') or (B, H, T', W).
            row: Index of the text in the batch.
            sizes: (T, T) or (T, W).
            selection: Selection of heads. `is_dense` is ignored.
        """
        session = self._mean if selection.is_mean else self._select
        num_heads = attentions.shape()[1]
        heads = range(num_heads) if selection.heads is None else selection.heads
        with reporting_lack_of_memory(1, sizes[0]):
            binding = session.io_binding()
            binding.bind_ortvalue_input("attentions", attentions)
            binding.bind_cpu_input("starts", np.array([row, 0, 0], np.int64))
            binding.bind_cpu_input("ends", np.array([row + 1, *sizes], np.int64))
            binding.bind_cpu_input("heads", np.array(heads, np.int64))
            binding.bind_output("weights")  # copied to host memory
            session.run_with_iobinding(binding)
        [output] = binding.get_outputs()
        weights: npt.NDArray[np.float32] = output.numpy()[0]  # (1, K, ...) -> (K, ...)
        return weights
