"""A session whose attention weights stay on the device; only what is asked for is copied to the host.

All heads of a batch are many times what a request for some of them, or for their mean, wants.

Letters: B texts, T tokens of a text, T' tokens of a row of the batch, with padding, H heads, K of them,
W columns of a band or of blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from attnlens_server.bundle import Layout
from attnlens_server.engine.batch import HeadSelection, HostOutputs, Inputs, Wanted, to_dense
from attnlens_server.engine.runtimes.onnx_session import (
    OnnxSession,
    check_placement,
    count_placements,
    open_graph,
)
from attnlens_server.engine.runtimes.runtime import TimeLimit, feed_of

# Slice of attentions (B, H, T', T' or W) from `starts` to `ends`, both (row, token, column), then Gather of
# `heads` (K,); in the second graph then ReduceMean over them. Two graphs, since ONNX Runtime runs every node
# of one whatever outputs are fetched.
_SELECT_GRAPH = Path(__file__).with_name("select_heads.onnx")
_MEAN_GRAPH = Path(__file__).with_name("mean_of_heads.onnx")
_WEIGHTS_RANK = 4  # of (B, H, T', T') and (B, H, T', W)
_OPERATORS = frozenset({"Slice", "Gather", "ReduceMean"})


class DeviceSession(OnnxSession):
    """The attention graph, ready to run on a device, by many threads at a time: a binding is a call's own."""

    def __init__(
        self,
        graph: Path,
        provider: Literal["cpu", "cuda"],
        *,
        threads: int,
        device_id: int,
        limit: TimeLimit | None = None,
    ) -> None:
        """Open `graph`, within `limit`, and the two that cut its attention weights.

        Raises:
            StartupError: one of them can't be opened, or CUDA was asked for and does not run it.
        """
        super().__init__(graph, provider, threads=threads, device_id=device_id, limit=limit)
        self._device = (provider, device_id)  # ONNX Runtime's devices are called like our providers
        self._cutter = AttentionCutter(provider, device_id)
        self._kept_there = {value.name for value in self.outputs if len(value.shape) == _WEIGHTS_RANK}

    def run(self, inputs: Inputs, output_names: Sequence[str]) -> "DeviceOutputs":
        """Run a batch to the named outputs, fp32."""
        binding = self._session.io_binding()
        for name, array in feed_of(inputs, self.inputs).items():
            binding.bind_cpu_input(name, array)
        for name in output_names:
            binding.bind_output(name, *(self._device if name in self._kept_there else ("cpu", 0)))
        self._session.run_with_iobinding(binding)
        self.check_results()
        values = dict(zip(output_names, binding.get_outputs(), strict=True))
        on_host = {name: value.numpy() for name, value in values.items() if name not in self._kept_there}
        kept = {name: value for name, value in values.items() if name in self._kept_there}
        return DeviceOutputs(HostOutputs(on_host), kept, self._cutter)


@dataclass(frozen=True, slots=True)
class DeviceOutputs:
    """Outputs, the largest of them on the device.

    Attributes:
        host: those with a row for each token.
        attentions: by the graph's names, (B, H, T', T') or (B, H, T', W) on the device.
        cutter: cuts them there.
    """

    host: HostOutputs
    attentions: dict[str, ort.OrtValue]
    cutter: "AttentionCutter"

    def part(self, row: int, num_tokens: int, wanted: Wanted) -> npt.NDArray[np.float32]:
        """Return what is wanted of a text, as `ItemResult.arrays` says."""
        if wanted.name not in self.attentions:
            return self.host.part(row, num_tokens, wanted)
        selection = wanted.keep if isinstance(wanted.keep, HeadSelection) else HeadSelection()
        attentions = self.attentions[wanted.name]
        if wanted.layout is Layout.DENSE:
            return self.cutter.cut(attentions, row, (num_tokens, num_tokens), selection)
        sizes = num_tokens, attentions.shape()[-1]
        if not selection.is_dense or wanted.pattern is None:
            return self.cutter.cut(attentions, row, sizes, selection)
        rows = self.cutter.cut(attentions, row, sizes, replace(selection, is_mean=False))
        weights = to_dense(rows, wanted.pattern, selection.heads)
        return weights.mean(axis=0, keepdims=True) if selection.is_mean else weights


class AttentionCutter:
    """Cuts a text's attention weights out of a batch's, on the device that they are on."""

    def __init__(self, provider: Literal["cpu", "cuda"], device_id: int) -> None:
        """Open the two graphs.

        Raises:
            StartupError: one can't be opened, or CUDA was asked for and does not run it.
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
        """Cut weights on the device to (K, *sizes) or, averaged, (1, *sizes) on the host.

        Args:
            attentions: (B, H, T', T') or (B, H, T', W).
            row: of the text.
            sizes: (T, T) or (T, W).
            selection: of heads; nothing is put together here.
        """
        session = self._mean if selection.is_mean else self._select
        num_heads = attentions.shape()[1]
        heads = range(num_heads) if selection.heads is None else selection.heads
        binding = session.io_binding()
        binding.bind_ortvalue_input("attentions", attentions)
        binding.bind_cpu_input("starts", np.array([row, 0, 0], np.int64))
        binding.bind_cpu_input("ends", np.array([row + 1, *sizes], np.int64))
        binding.bind_cpu_input("heads", np.array(heads, np.int64))
        binding.bind_output("weights")  # on the host
        session.run_with_iobinding(binding)
        [output] = binding.get_outputs()
        weights: npt.NDArray[np.float32] = output.numpy()[0]  # (1, K, ...) -> (K, ...)
        return weights
