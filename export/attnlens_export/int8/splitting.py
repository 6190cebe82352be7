"""Splitting the largest columns of an activation f, so that one scale suits all columns. K width, R rows.

    f(z) ~ min(f(z), w) + min(f(2 (z - w)), w) / 2 + min(f(2 (z - 3/2 w)), w) / 2 + ...

That holds where f(z) is about z for large z and about 0 for small ones, and w is well above 0. Quantization
cuts off at w anyway: so a column that exceeds w needs further columns of the weight and the bias before the
activation, and rows of the weight behind it. The further columns are computed for twice the value, since the
sum is off where one of them begins, by as much as f is from max(z, 0), and then by half of that.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from attnlens_export.graph.trace import TracedGraph
from attnlens_export.int8.products import FloatArray

GAIN = 2
# Widths of the parts that are tried, each larger than the one before by this factor.
_NUM_WIDTHS = 24
_WIDTH_STEP = 1.025
_TABLE_STEP = 0.01
_LARGEST_INPUT = 64.0


@dataclass(frozen=True)
class Activation:
    """A function of one number, as a table.

    Attributes:
        inputs: ascending, (I,).
        outputs: what it makes of them, (I,).
    """

    inputs: FloatArray
    outputs: FloatArray

    @classmethod
    def tabulate(cls, graph: TracedGraph, nodes: Sequence[onnx.NodeProto], source: str, result: str) -> Self:
        """Compute the table of `nodes`, which make `result` of `source`."""
        read = {name for node in nodes for name in node.input}
        body = helper.make_graph(
            list(nodes),
            "activation",
            [helper.make_tensor_value_info(source, TensorProto.FLOAT, ["I"])],
            [helper.make_tensor_value_info(result, TensorProto.FLOAT, ["I"])],
            [numpy_helper.from_array(graph.weights[name], name) for name in graph.weights if name in read],
        )
        proto = onnx.ModelProto()
        proto.CopyFrom(graph.proto)
        proto.graph.CopyFrom(body)
        session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
        inputs = np.arange(-_LARGEST_INPUT, _LARGEST_INPUT, _TABLE_STEP, dtype=np.float32)
        [outputs] = session.run(None, {source: inputs})
        return cls(inputs, outputs)

    def __call__(self, inputs: FloatArray) -> FloatArray:
        """Return the outputs; beyond the table, those at its ends."""
        return np.asarray(np.interp(inputs, self.inputs, self.outputs), np.float32)

    def inverse(self, outputs: FloatArray) -> FloatArray:
        """Return the inputs of 0 and more that have such outputs, 0 for outputs below 0."""
        rising = self.inputs >= 0
        return np.asarray(np.interp(outputs, self.outputs[rising], self.inputs[rising]), np.float32)


@dataclass(frozen=True)
class Split:
    """Further columns of an activation.

    Attributes:
        columns: which column each further one is of, (E,).
        offsets: what is taken off before the activation, (E,).
        width: where every column is cut off.
    """

    columns: npt.NDArray[np.int64]
    offsets: FloatArray
    width: float

    def parts(self, rows: FloatArray, activation: Activation) -> FloatArray:
        """Return the columns with the further ones (R, K + E), given what the activation returned (R, K)."""
        inputs = activation.inverse(rows[:, self.columns]) - self.offsets
        return np.concatenate([rows, activation(GAIN * inputs)], axis=1)

    def merged(self, parts: FloatArray) -> FloatArray:
        """Return the columns (R, K) that parts (R, K + E) stand for together."""
        width = parts.shape[1] - len(self.columns)
        columns = parts[:, :width].copy()
        for column, part in zip(self.columns, parts.T[width:], strict=True):
            columns[:, column] += part / GAIN
        return columns

    def widen_weight(self, weight: FloatArray) -> FloatArray:
        """Return the weight (., K) before the activation with the further columns."""
        return np.concatenate([weight, GAIN * weight[:, self.columns]], axis=1)

    def widen_bias(self, bias: FloatArray) -> FloatArray:
        """Return the bias (K,) before the activation with those of the further columns."""
        return np.concatenate([bias, GAIN * (bias[self.columns] - self.offsets)])


def possible_splits(largest: FloatArray, max_columns: int) -> Iterator[Split]:
    """Yield splits of columns with values up to `largest` (K,) into at most `max_columns` further ones."""
    low, high = 0.0, float(max(largest.max(), _TABLE_STEP))
    while high - low > 1e-3 * high:
        width = (low + high) / 2
        low, high = (low, width) if _num_parts(largest, width).sum() <= max_columns else (width, high)
    for number in range(_NUM_WIDTHS):
        width = high * _WIDTH_STEP**number
        counts = _num_parts(largest, width)
        parts = np.concatenate([np.arange(count) for count in counts])
        offsets = width + parts * width / GAIN
        yield Split(np.repeat(np.arange(len(largest)), counts), np.asarray(offsets, np.float32), width)


def _num_parts(largest: FloatArray, width: float) -> npt.NDArray[np.int64]:
    """Return how many further columns each column (K,) needs."""
    return np.maximum(np.ceil((largest - width) * GAIN / width), 0).astype(np.int64)
