"""Simplification of graphs traced by torch.onnx, so that every runtime can read them.

The steps, in order (docs/bundle.md shows the result):

1. Replace each `Transpose` of a weight by the transposed weight, named `<parameter>.T`.
2. Fold constants and shape arithmetic.
3. Remove each pair of `Reshape` nodes that restores a shape, such as that of a mask per head of
   `nn.MultiheadAttention`. Give the others a constant target such as `[0, 0, heads, width]`, where 0 keeps
   the length of an axis. This removes all shape arithmetic from the layers. Remove the attribute
   `allowzero`, which changes the meaning of 0 and which some runtimes do not support.
4. Replace each `Split` by slices, which the backward sweep supports.
5. Split each `Transpose` before a matrix product that both moves rows and swaps the last two axes. Runtimes
   fuse the swap into the product and copy whole rows for the rest, which is faster.
6. Multiply GELU in the order that runtimes fuse.
7. Merge equal constants. Equal parameters are kept, because `attnlens check` finds them by name.
8. Remove metadata, doc strings and shapes of inner values, which contain paths of the exporting machine.
"""

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes import common as passes
from onnxscript import optimizer, rewriter

from attnlens_export.errors import GraphError

TRANSPOSED_SUFFIX = ".T"
CONSTANT_PREFIX = "constant_"
TARGET_PREFIX = "target_"
IR_VERSION = 8
MAX_FP16 = float(np.finfo(np.float16).max)
# The number with which an operation changes nothing.
_NEUTRAL = {"Add": 0.0, "Sub": 0.0, "Mul": 1.0, "Div": 1.0}

Shape = tuple[int | str, ...]
"""Length of each axis: a number, or an expression in the names of dynamic axes."""


def simplify(model: ir.Model, parameters: Collection[str]) -> dict[str, Shape]:
    """Simplify a traced model in place.

    Args:
        model: Model returned by `torch.onnx.export(..., optimize=False)`.
        parameters: Names of the initializers that are parameters of the encoder.

    Returns:
        Known shapes of values by name. The model keeps only the shapes of inputs and outputs.

    Raises:
        GraphError: A `Reshape` has no equivalent constant target.
    """
    keep = {*parameters, *(name + TRANSPOSED_SUFFIX for name in parameters)}
    transpose_weights(model.graph, parameters)
    fold(model, keep)
    remove_reversed_reshapes(model)
    for node in list(model.graph):
        if node.op_type == "Reshape":
            make_target_constant(model.graph, node)
        if node.op_type == "Split":
            replace_split(model.graph, node)
        if node.op_type == "MatMul":
            for factor in node.inputs:
                split_transpose(factor)
        if node.op_type == "Erf":
            reorder_gelu(node)
    passes.RemoveUnusedNodesPass()(model)
    passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    merge_constants(model.graph, keep)
    passes.CommonSubexpressionEliminationPass()(model)
    passes.RemoveUnusedNodesPass()(model)
    passes.RemoveUnusedOpsetsPass()(model)
    passes.ClearMetadataAndDocStringPass()(model)
    model.ir_version = IR_VERSION
    return rename_values(model.graph)


def transpose_weights(graph: ir.Graph, parameters: Collection[str]) -> None:
    """Replace each `Transpose(weight)` by a transposed initializer."""
    for node in list(graph):
        weight = node.inputs[0] if node.op_type == "Transpose" else None
        if weight is None or weight.name not in parameters or weight.const_value is None:
            continue
        name = f"{weight.name}{TRANSPOSED_SUFFIX}"
        # A view: the bytes are reordered when they are written.
        transposed = weight.const_value.numpy().transpose(node.attributes["perm"].as_ints())
        ir.convenience.replace_all_uses_with(node.outputs[0], initializer(graph, name, transposed))
        graph.remove(node, safe=True)


def initializer(graph: ir.Graph, name: str, array: npt.NDArray[np.generic]) -> ir.Value:
    """Return the initializer `name`. If it does not exist, create it from `array`."""
    if name not in graph.initializers:
        tensor = ir.Tensor(array, name=name)
        graph.register_initializer(
            ir.Value(name=name, const_value=tensor, shape=tensor.shape, type=ir.TensorType(tensor.dtype))
        )
    return graph.initializers[name]


def fold(model: ir.Model, keep: Collection[str]) -> None:
    """Fold constants and shape arithmetic twice, like torch.onnx itself.

    Nodes that read an initializer in `keep` are not folded, because the result would lose its name.
    """

    def should_fold(node: ir.Node) -> bool | None:
        is_kept = any(value is not None and value.name in keep for value in node.inputs)
        return False if is_kept else None

    passes.InlinePass()(model)
    for _ in range(2):
        keep_small_constants(model.graph)
        optimizer.fold_constants(model, should_fold=should_fold)
        rewriter.rewrite(model)
        passes.IdentityEliminationPass()(model)
        passes.RemoveUnusedNodesPass()(model)


def keep_small_constants(graph: ir.Graph) -> None:
    """Make vectors of numbers that are nearly 0 or 1.

    The rewriter removes a sum with a scalar below 1e-8, such as the epsilon of a norm, and a product with a
    scalar that differs from 1 by less than 1e-5.
    """
    for node in list(graph):
        if node.op_type not in _NEUTRAL:
            continue
        neutral = _NEUTRAL[node.op_type]
        for index, value in enumerate(node.inputs):
            tensor = None if value is None else ir.convenience.get_const_tensor(value)
            other = node.inputs[1 - index]
            if tensor is None or tensor.size != 1 or tensor.shape.rank() or not (other and other.shape):
                continue
            number = float(tensor.numpy())
            if number != neutral and np.isclose(number, neutral):
                vector = initializer(graph, f"{CONSTANT_PREFIX}{number!r}", tensor.numpy().reshape(1))
                node.replace_input_with(index, vector)


def remove_reversed_reshapes(model: ir.Model) -> None:
    """Skip each pair of Reshapes whose result has the shape of its input."""
    for node in list(model.graph):
        first = node.inputs[0].producer() if node.op_type == "Reshape" and node.inputs[0] else None
        source = first.inputs[0] if first is not None and first.op_type == "Reshape" else None
        if source is None or source.shape is None or node.outputs[0].shape is None:
            continue
        if tuple(source.shape) == tuple(node.outputs[0].shape):
            ir.convenience.replace_all_uses_with(node.outputs[0], source)
    passes.RemoveUnusedNodesPass()(model)


def make_target_constant(graph: ir.Graph, node: ir.Node) -> None:
    """Give a Reshape a constant target without `allowzero`."""
    target = reshape_target(node)
    name = TARGET_PREFIX + "_".join("n" if length < 0 else str(length) for length in target)
    node.replace_input_with(1, initializer(graph, name, np.array(target, dtype=np.int64)))
    node.attributes.pop("allowzero", None)


def reshape_target(node: ir.Node) -> list[int]:
    """Derive the constant target of a Reshape from the shapes of its input and output.

    A dynamic axis becomes 0 if the input has the same axis at the same index. One other axis may be -1. If a
    shape is unknown, a constant target without zeros is kept.

    Raises:
        GraphError: A shape is unknown, or several axes would be -1.
    """
    source, result = node.inputs[0], node.outputs[0]
    if source is None or source.shape is None or result.shape is None:
        given = None if node.inputs[1] is None else node.inputs[1].const_value
        if given is not None and given.numpy().all():
            return [int(length) for length in given.numpy()]
        raise GraphError(f"the Reshape that computes {result.name!r} has no inferred shape")
    target = constant_target(tuple(source.shape), tuple(result.shape))
    if target is None:
        raise GraphError(
            f"the Reshape that computes {result.name!r} goes from {source.shape} to {result.shape}: at most "
            "one axis may change to an unknown length"
        )
    return target


def constant_target(source: Sequence[object], result: Sequence[object]) -> list[int] | None:
    """Return the constant target of a Reshape between two shapes (see `reshape_target`), or None."""
    target = []
    for axis, length in enumerate(result):
        if isinstance(length, int):
            target.append(length)
        else:
            target.append(0 if axis < len(source) and source[axis] == length else -1)
    return target if target.count(-1) <= 1 else None


def replace_split(graph: ir.Graph, node: ir.Node) -> None:
    """Replace a Split by one Slice per part.

    Raises:
        GraphError: The length of a part is not constant.
    """
    source, start = node.inputs[0], 0
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
    stated = next((each.const_value for each in node.inputs[1:] if each is not None), None)
    # Parts that nothing reads have no shape. Without stated lengths, all but the last one are equal.
    shapes = [part.shape for part in node.outputs]
    default = next((shape for shape in shapes if shape is not None), None)
    for index, part in enumerate(node.outputs):
        shape = shapes[index] or default
        size = shape and shape[axis] if stated is None else int(stated.numpy()[index])
        if not isinstance(size, int):
            raise GraphError(f"the Split that computes {part.name!r} has parts of unknown length")
        bounds = [
            initializer(graph, f"{TARGET_PREFIX}{number}", np.array([number], dtype=np.int64))
            for number in (start, start + size, axis)
        ]
        sliced = ir.node("Slice", [source, *bounds])
        sliced.outputs[0].shape, sliced.outputs[0].type = part.shape, part.type
        graph.insert_before(node, sliced)
        ir.convenience.replace_all_uses_with(part, sliced.outputs[0])
        start += size
    graph.remove(node, safe=True)


def split_transpose(factor: ir.Value | None) -> None:
    """Split a Transpose that moves rows and also swaps the last two axes, if it feeds a matrix product.

    Folding transposes keys from (B, T, H, K) to (B, H, K, T) in one step. The intermediate (B, H, T, K) gives
    bit-identical results.
    """
    node = None if factor is None else factor.producer()
    if factor is None or node is None or node.op_type != "Transpose" or node.graph is None:
        return
    *outer, last, row = node.attributes["perm"].as_ints()
    rows, axes = [*outer, row, last], list(range(len(outer) + 2))
    if last != axes[-1] or rows == axes:
        return
    swap = [*axes[:-2], axes[-1], axes[-2]]
    moved = ir.node("Transpose", [node.inputs[0]], {"perm": rows})
    moved.outputs[0].type = factor.type
    if factor.shape is not None:
        moved.outputs[0].shape = ir.Shape([factor.shape[axis] for axis in swap])
    node.graph.insert_before(node, moved)
    node.replace_input_with(0, moved.outputs[0])
    node.attributes["perm"] = ir.AttrInt64s("perm", swap)


def reorder_gelu(erf: ir.Node) -> None:
    """Change x * (0.5 * (1 + erf(...))), as torch.onnx writes GELU, to (x * 0.5) * (1 + erf(...)).

    ONNX Runtime fuses only the second order. As a factor of a product, GELU keeps the first one, because
    OpenCV crashes on the second. See `attnlens_model.activations`.
    """
    add = _only_consumer(erf, "Add")
    half = add and _only_consumer(add, "Mul")
    product = half and _only_consumer(half, "Mul")
    if not (add and half and product) or all(value.const_value is None for value in half.inputs if value):
        return
    x = product.inputs[1 - product.inputs.index(half.outputs[0])]
    if x is None or any(node.op_type == "Mul" for node in product.outputs[0].consumers()):
        return
    half.replace_input_with(half.inputs.index(add.outputs[0]), x)
    product.replace_input_with(product.inputs.index(x), add.outputs[0])
    half.outputs[0].shape = x.shape


def _only_consumer(node: ir.Node, op_type: str) -> ir.Node | None:
    """Return the node that reads the result of a node, if it is the only one and of this type."""
    consumers = list(node.outputs[0].consumers())
    return consumers[0] if len(consumers) == 1 and consumers[0].op_type == op_type else None


def merge_constants(graph: ir.Graph, keep: Collection[str]) -> None:
    """Merge and number equal constants, and remove unused initializers."""
    seen: dict[tuple[object, ...], ir.Value] = {}
    for name, value in list(graph.initializers.items()):
        if not value.uses():
            del graph.initializers[name]
        elif name not in keep and value.const_value is not None:
            array = value.const_value.numpy()
            first = seen.setdefault((array.dtype.str, array.shape, array.tobytes()), value)
            if first is not value:
                ir.convenience.replace_all_uses_with(value, first)
                del graph.initializers[name]
            elif not name.startswith(TARGET_PREFIX):
                value.name = f"{CONSTANT_PREFIX}{len(seen)}"


def rename_values(graph: ir.Graph) -> dict[str, Shape]:
    """Give nodes and inner values reproducible names. Return the shapes by name."""
    shapes: dict[str, Shape] = {}
    for value in (*graph.inputs, *graph.outputs):
        value.metadata_props.clear()
    boundary = {id(value) for value in (*graph.inputs, *graph.outputs)}
    counts: dict[str, int] = {}
    for node in graph:
        kind = node.op_type.lower()
        counts[kind] = number = counts.get(kind, -1) + 1
        node.name = f"{kind}_{number}"
        for value in node.outputs:
            if id(value) not in boundary:
                value.name = node.name
            if value.shape is not None and value.name is not None:
                shapes[value.name] = tuple(
                    size if isinstance(size, int) else str(size) for size in value.shape
                )
            if id(value) not in boundary:
                value.shape = value.type = None
    return shapes
