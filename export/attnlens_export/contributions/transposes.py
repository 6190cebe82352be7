"""Rules that propagate a gradient from the result y = f(x) of an operator to its linear input x.

All other inputs are held constant, so each rule is the transpose of a linear map.

B batch, T tokens, R rows, N indices, C channels, K kernel size.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from attnlens_export.contributions.state import SweepState
from attnlens_export.contributions.writer import GraphWriter
from attnlens_export.errors import GraphError
from attnlens_export.graph.simplify import Shape, constant_target

Transpose = Callable[[SweepState, onnx.NodeProto, str], None]
_WHOLE = np.iinfo(np.int64).max


def sum_to_shape(writer: GraphWriter, gradient: str, shape: Shape) -> str:
    """Sum a gradient over the axes along which a value of `shape` was repeated."""
    found = writer.shape(gradient)
    extra = len(found) - len(shape)
    if extra:
        gradient = writer.sum(gradient, range(extra))
    axes = [axis for axis, size in enumerate(shape) if size == 1 and writer.shape(gradient)[axis] != 1]
    return writer.sum(gradient, axes, keepdims=True) if axes else gradient


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def _constant(sweep: SweepState, node: onnx.NodeProto, name: str) -> list[int]:
    """Return the values of an input that must be an initializer."""
    if name not in sweep.writer.weights:
        raise GraphError(
            f"no contributions: {node.op_type} {node.name!r} reads {name!r}, which is not a constant"
        )
    return [int(number) for number in sweep.writer.weights[name].reshape(-1)]


def _add(sweep: SweepState, node: onnx.NodeProto, gradient: str) -> None:
    writer = sweep.writer
    for number, value in enumerate(node.input):
        own = gradient
        if number == 1 and node.op_type == "Sub":
            own = writer.add("Mul", gradient, writer.constant(-1.0), shape=writer.shape(gradient))
        if sweep.flow(value).is_linear:
            sweep.add_gradient(value, sum_to_shape(writer, own, writer.shape(value)))
        else:
            sweep.add_baseline(node, value, own)


def _multiply(sweep: SweepState, node: onnx.NodeProto, gradient: str) -> None:
    """For y = x * f: g * f. If both factors are linear, the result of the activation is held constant."""
    writer = sweep.writer
    linear = [value for value in node.input if sweep.flow(value).is_linear]
    if len(linear) > 1:
        linear = [value for value in linear if not sweep.flow(value).is_activated]
    (value,) = linear
    (factor,) = [other for other in node.input if other != value]
    product = writer.add("Mul", gradient, factor, shape=writer.shape(node.output[0]))
    sweep.add_gradient(value, sum_to_shape(writer, product, writer.shape(value)))


def _divide(sweep: SweepState, node: onnx.NodeProto, gradient: str) -> None:
    writer, (value, divisor) = sweep.writer, node.input
    quotient = writer.add("Div", gradient, divisor, shape=writer.shape(node.output[0]))
    sweep.add_gradient(value, sum_to_shape(writer, quotient, writer.shape(value)))


def _multiply_matrices(sweep: SweepState, node: onnx.NodeProto, gradient: str) -> None:
    """For y = x W: g W'. For y = A x: A' g."""
    writer, (left, right) = sweep.writer, node.input
    is_left = sweep.flow(left).is_linear
    value, other = (left, right) if is_left else (right, left)
    transposed = _swapped(writer, other)
    factors = (gradient, transposed) if is_left else (transposed, gradient)
    own = writer.shape(value)
    batch = _longer(writer.shape(gradient)[:-2], writer.shape(other)[:-2])
    product = writer.add("MatMul", *factors, shape=(*batch, *own[-2:]))
    sweep.add_gradient(value, sum_to_shape(writer, product, own))


def _longer(first: Shape, second: Shape) -> Shape:
    """Return the broadcast batch axes of a matrix product."""
    longer, shorter = (first, second) if len(first) >= len(second) else (second, first)
    padded = (1,) * (len(longer) - len(shorter)) + tuple(shorter)
    return tuple(other if size == 1 else size for size, other in zip(longer, padded, strict=True))


def _swapped(writer: GraphWriter, matrix: str) -> str:
    shape = writer.shape(matrix)
    order = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
    swapped: Shape = (*shape[:-2], shape[-1], shape[-2])
    if matrix not in writer.weights or shape != swapped:
        return writer.add("Transpose", matrix, perm=order, shape=swapped)
    # OpenVINO 2026 in fp32 confuses a square weight with its transpose if a graph multiplies by both. This
    # expression makes a separate constant, which runtimes fold when they open the graph.
    minus = writer.constant(-1.0)
    negative = writer.add("Mul", matrix, minus, shape=shape)
    negative = writer.add("Transpose", negative, perm=order, shape=swapped)
    return writer.add("Mul", negative, minus, shape=swapped)


def _reshape(sweep: SweepState, node: onnx.NodeProto, gradient: str) -> None:
    writer, value = sweep.writer, node.input[0]
    before, after = writer.shape(value), writer.shape(node.output[0])
    target = constant_target(after, before)
    if target is not None:
        sweep.add_gradient(value, writer.reshape(gradient, target, before))
        return
    axis = _merged_axis(before, after)
    if axis is None:
        raise GraphError(
            f"no contributions: Reshape {node.name!r} goes from {before} to {after}, and its transpose has "
            "no constant target"
        )
    # Some runtimes require constant targets, so look up row i, column j at i * columns + j.
    num_rows, num_columns = (_size(writer, value, axis + step) for step in (0, 1))
    starts = writer.add("Mul", _range(writer, num_rows), num_columns)
    starts = writer.add("Unsqueeze", starts, writer.constant([1]))
    offsets = writer.add("Unsqueeze", _range(writer, num_columns), writer.constant([0]))
    indices = writer.add("Add", starts, offsets)
    sweep.add_gradient(value, writer.add("Gather", gradient, indices, axis=axis, shape=before))


def _merged_axis(before: Shape, after: Shape) -> int | None:
    """Return the first of two axes that a Reshape merges, or None for any other Reshape."""
    for axis in range(len(after)):
        if before[:axis] == after[:axis] and before[axis + 2 :] == after[axis + 1 :]:
            return axis if len(before) == len(after) + 1 else None
    return None


def _size(writer: GraphWriter, value: str, axis: int) -> str:
    """Return the length of a non-negative axis as a scalar."""
    of_axis = [writer.constant([axis]), writer.constant([axis + 1])]
    length = writer.add("Slice", writer.add("Shape", value), *of_axis)
    return writer.add("Squeeze", length, writer.constant([0]), shape=())


def _range(writer: GraphWriter, count: str) -> str:
    """Return 0, 1, ..., `count` - 1."""
    zero, one = (writer.constant(np.array(number, dtype=np.int64)) for number in (0, 1))
    return writer.add("Range", zero, count, one)


def _transpose(sweep: SweepState, node: onnx.NodeProto, gradient: str) -> None:
    order = list(helper.get_node_attr_value(node, "perm"))
    value = node.input[0]
    back = sweep.writer.add(
        "Transpose", gradient, perm=[int(axis) for axis in np.argsort(order)], shape=sweep.writer.shape(value)
    )
    sweep.add_gradient(value, back)


def _unsqueeze(sweep: SweepState, node: onnx.NodeProto, gradient: str) -> None:
    kind = "Squeeze" if node.op_type == "Unsqueeze" else "Unsqueeze"
    value = node.input[0]
    sweep.add_gradient(
        value, sweep.writer.add(kind, gradient, node.input[1], shape=sweep.writer.shape(value))
    )


def _cast(sweep: SweepState, node: onnx.NodeProto, gradient: str) -> None:
    sweep.add_gradient(node.input[0], gradient)


def _slice(sweep: SweepState, node: onnx.NodeProto, gradient: str) -> None:
    """Pad with zeros, by concatenation, because few runtimes support Pad with computed lengths."""
    writer, value = sweep.writer, node.input[0]
    shape, names = writer.shape(value), list(node.input)
    axes = _constant(sweep, node, names[3])
    if len(axes) != 1 or (len(names) > 4 and _constant(sweep, node, names[4]) != [1]):  # noqa: PLR2004 - the steps
        raise GraphError(f"no contributions: Slice {node.name!r} has several axes, or steps")
    (axis,) = axes
    zeros = writer.add("Mul", value, writer.constant(0.0), shape=shape)
    # The recorded length of this axis is wrong, but no later step reads it.
    own = writer.shape(gradient)
    parts = [gradient]
    start, end = names[1], names[2]
    if not (start in writer.weights and _constant(sweep, node, start) == [0]):
        parts.insert(0, writer.add("Slice", zeros, writer.constant([0]), start, names[3], shape=own))
    size = shape[axis]
    is_open = end in writer.weights and _constant(sweep, node, end)[0] >= (
        size if isinstance(size, int) else _WHOLE
    )
    if not is_open:
        parts.append(writer.add("Slice", zeros, end, writer.constant([_WHOLE]), names[3], shape=own))
    whole = parts[0] if len(parts) == 1 else writer.add("Concat", *parts, axis=axis % len(shape), shape=shape)
    sweep.add_gradient(value, whole)


def _concatenate(sweep: SweepState, node: onnx.NodeProto, gradient: str) -> None:
    """Slice the gradient. Parts after one of unknown size are indexed from the end."""
    writer = sweep.writer
    axis = int(helper.get_node_attr_value(node, "axis"))
    shapes = [writer.shape(value) for value in node.input]
    axis %= len(shapes[0])
    sizes = [shape[axis] for shape in shapes]
    unknown = [number for number, size in enumerate(sizes) if not isinstance(size, int)]
    bounds = (
        [(writer.constant([start]), writer.constant([end])) for start, end in _fixed_bounds(sizes, *unknown)]
        if len(unknown) < 2  # noqa: PLR2004 - otherwise, compute the bounds at run time
        else _measured_bounds(writer, node.input, axis)
    )
    for value, (start, end), shape in zip(node.input, bounds, shapes, strict=True):
        part = writer.add("Slice", gradient, start, end, writer.constant([axis]), shape=shape)
        if sweep.flow(value).is_linear:
            sweep.add_gradient(value, part)
        else:
            sweep.add_baseline(node, value, part)


def _fixed_bounds(sizes: Sequence[int | str], unknown: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield start and end of each part. At most one part has an unknown size."""
    middle = len(sizes) if unknown is None else unknown
    for number, own in enumerate(sizes):
        before = sum(int(size) for size in sizes[:number]) if number <= middle else None
        behind = sum(int(size) for size in sizes[number + 1 :]) if number >= middle else None
        if before is None:
            yield -(int(own) + (behind or 0)), -behind if behind else _WHOLE
        else:
            yield before, before + own if isinstance(own, int) else -(behind or 0) or _WHOLE


def _measured_bounds(writer: GraphWriter, values: Sequence[str], axis: int) -> Iterator[tuple[str, str]]:
    """Yield start and end of each part, (1,) each, computed at run time from the sizes of `values`."""
    start = writer.constant([0])
    for value in values:
        size = writer.add("Unsqueeze", _size(writer, value, axis), writer.constant([0]))
        end = writer.add("Add", start, size)
        yield start, end
        start = end


def _gather(sweep: SweepState, node: onnx.NodeProto, gradient: str) -> None:
    """For y = P x, where row n of P is 1 at index n of the lookup: P' g.

    A matrix product instead of a ScatterND with addition: with duplicate indices and several threads,
    ScatterND of ONNX Runtime loses updates on CPUs, and on GPUs the order of additions varies from run to
    run. The cost is proportional to the size of P, so mechanisms should look up blocks of tokens rather than
    tokens.
    """
    writer, value = sweep.writer, node.input[0]
    shape = writer.shape(value)
    axis = int(_attributes(node).get("axis", 0)) % len(shape)
    outer, inner = shape[:axis], shape[axis + 1 :]
    if not all(isinstance(size, int) for size in inner):
        raise GraphError(
            f"no contributions: Gather {node.name!r} looks up rows of the dynamic shape {inner} in {value!r}"
        )
    size = math.prod(int(length) for length in inner)
    columns: Shape = (*outer, f"rows of {node.name}", size)
    gradient = writer.reshape(gradient, [*(0 for _ in outer), -1, size], columns)
    selection = _selection(sweep, node, shape[axis])  # (R, N)
    product = writer.add("MatMul", selection, gradient, shape=(*outer, shape[axis], size))
    sweep.add_gradient(
        value, writer.reshape(product, [*(0 for _ in range(axis + 1)), *map(int, inner)], shape)
    )


def _selection(sweep: SweepState, node: onnx.NodeProto, num_rows: int | str) -> str:
    """Return P': (R, N), 1 if the n-th index is r, else 0."""
    writer, (value, indices) = sweep.writer, node.input
    axis = int(_attributes(node).get("axis", 0))
    if isinstance(num_rows, int):
        rows = writer.constant(np.arange(num_rows))
    else:
        rows = _range(writer, _size(writer, value, axis % len(writer.shape(value))))
    distance = writer.add(
        "Sub",
        writer.add("Unsqueeze", rows, writer.constant([1])),
        writer.reshape(indices, [1, -1], (1, "indices")),
    )
    differs = writer.add("Sign", writer.add("Cast", distance, to=TensorProto.FLOAT))
    differs = writer.add("Mul", differs, differs)
    return writer.add("Sub", writer.constant(1.0), differs)


def _normalize(sweep: SweepState, node: onnx.NodeProto, gradient: str) -> None:
    """For y = weight * (x - mean) / deviation + bias: (weight g - mean(weight g)) / deviation."""
    writer, value, weight = sweep.writer, node.input[0], node.input[1]
    shape = writer.shape(value)
    axis, width = len(shape) - 1, int(shape[-1])
    epsilon = float(_attributes(node).get("epsilon", 1e-5))
    if len(node.input) > 2:  # noqa: PLR2004 - the bias
        sweep.add_baseline(node, node.input[2], gradient)
    share = writer.constant(1.0 / width)

    def centered(name: str) -> str:
        summed = writer.sum(name, [axis], keepdims=True)
        mean = writer.add("Mul", summed, share, shape=writer.shape(summed))
        return writer.add("Sub", name, mean, shape=shape)

    around = centered(value)
    squares = writer.add("Mul", around, around, shape=shape)
    variance = writer.sum(squares, [axis], keepdims=True)
    variance = writer.add("Mul", variance, share, shape=writer.shape(variance))
    variance = writer.add("Add", variance, writer.constant(epsilon), shape=writer.shape(variance))
    deviation = writer.add("Sqrt", variance, shape=writer.shape(variance))
    weighted = writer.add("Mul", gradient, weight, shape=shape)
    sweep.add_gradient(value, writer.add("Div", centered(weighted), deviation, shape=shape))


def _expand(sweep: SweepState, node: onnx.NodeProto, gradient: str) -> None:
    """Sum over the copies, such as those of keys and values that several heads share."""
    value = node.input[0]
    sweep.add_gradient(value, sum_to_shape(sweep.writer, gradient, sweep.writer.shape(value)))


def _convolve(sweep: SweepState, node: onnx.NodeProto, gradient: str) -> None:
    """Convolve backward: (B, C, T) by (C, C / groups, K)."""
    writer, value = sweep.writer, node.input[0]
    if len(writer.shape(value)) != 3:  # noqa: PLR2004 - (B, C, T)
        raise GraphError(f"no contributions: Conv {node.name!r} moves along several axes")
    if len(node.input) > 2:  # noqa: PLR2004 - the bias
        batch, channels, length = writer.shape(gradient)
        rows = writer.add("Transpose", gradient, perm=[0, 2, 1], shape=(batch, length, channels))
        sweep.add_baseline(node, node.input[2], rows)
    kept = {key: number for key, number in _attributes(node).items() if key in ("group", "pads", "strides")}
    kept |= {"kernel_shape": [int(writer.shape(node.input[1])[2])]}
    sweep.add_gradient(
        value, writer.add("ConvTranspose", gradient, node.input[1], shape=writer.shape(value), **kept)
    )


def _relu(sweep: SweepState, node: onnx.NodeProto, gradient: str) -> None:
    """Multiply by the ratio relu(x) / x: 1 if x > 0, else 0."""
    writer, value = sweep.writer, node.input[0]
    ratio = writer.add("Sign", node.output[0], shape=writer.shape(value))
    sweep.add_gradient(value, writer.add("Mul", gradient, ratio, shape=writer.shape(value)))


def _tanh(sweep: SweepState, node: onnx.NodeProto, gradient: str) -> None:
    """Multiply by the ratio tanh(x) / x, which is 1 at 0."""
    writer, value = sweep.writer, node.input[0]
    shape = writer.shape(value)
    sign = writer.add("Sign", value, shape=shape)
    distance = writer.add("Mul", sign, sign, shape=shape)
    at_zero = writer.add("Sub", writer.constant(1.0), distance, shape=shape)  # 1 where x is 0, else 0
    above = writer.add("Add", node.output[0], at_zero, shape=shape)
    below = writer.add("Add", value, at_zero, shape=shape)
    ratio = writer.add("Div", above, below, shape=shape)
    sweep.add_gradient(value, writer.add("Mul", gradient, ratio, shape=shape))


def _square(sweep: SweepState, node: onnx.NodeProto, gradient: str) -> None:
    """Multiply by the activation, of which one factor is held constant."""
    writer, value = sweep.writer, node.input[0]
    sweep.add_gradient(value, writer.add("Mul", gradient, value, shape=writer.shape(value)))


def _sum(sweep: SweepState, node: onnx.NodeProto, gradient: str) -> None:
    """Every summand has the gradient of the sum. The next product broadcasts it."""
    writer, value = sweep.writer, node.input[0]
    shape = writer.shape(value)
    axes = {axis % len(shape) for axis in _constant(sweep, node, node.input[1])}
    kept = tuple(1 if axis in axes else size for axis, size in enumerate(shape))
    if not helper.get_node_attr_value(node, "keepdims"):
        gradient = writer.add("Unsqueeze", gradient, node.input[1], shape=kept)
    sweep.add_gradient(value, gradient)


TRANSPOSES: dict[str, Transpose] = {
    "Add": _add,
    "Cast": _cast,
    "Concat": _concatenate,
    "Conv": _convolve,
    "Div": _divide,
    "Expand": _expand,
    "Gather": _gather,
    "Identity": _cast,
    "LayerNormalization": _normalize,
    "MatMul": _multiply_matrices,
    "Mul": _multiply,
    "Pow": _square,
    "ReduceSum": _sum,
    "Relu": _relu,
    "Reshape": _reshape,
    "Slice": _slice,
    "Squeeze": _unsqueeze,
    "Sub": _add,
    "Tanh": _tanh,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
