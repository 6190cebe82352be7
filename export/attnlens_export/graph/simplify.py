"""From the graph that torch.onnx traces to one that every runtime reads.

What is done, and why, in order (docs/bundle.md shows the result):

1. A `Transpose` of a weight becomes the weight itself, stored transposed and named `<parameter>.T`.
2. Constant arithmetic on shapes is folded and the leftovers are removed.
3. Every `Reshape` gets a constant target such as `[0, 0, heads, width]`, where 0 means "as it was", and loses
   its `allowzero` attribute, which would give 0 another meaning and which some runtimes can't read.
   This removes all shape arithmetic from the layers.
4. A `Transpose` in front of a product that both moves rows and swaps the last two axes becomes one of each:
   runtimes take the swap into the product and copy whole rows for the rest, which is faster.
5. Equal constants become one. Parameters are never merged, even where two are equal: their names are how
   `attnlens check` finds them again.
6. Metadata, doc strings and shapes of inner values are dropped: they name files of the exporting machine.
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


Shape = tuple[int | str, ...]
"""The length of each axis, or what it depends on."""


def simplify(model: ir.Model, parameters: Collection[str]) -> dict[str, Shape]:
    """Rewrite a freshly traced model in place.

    Args:
        model: as `torch.onnx.export(..., optimize=False)` returns it.
        parameters: the names of the initializers that are the encoder's parameters.

    Returns:
        The shapes of values by name, as far as they are known. The model keeps those of inputs and outputs.

    Raises:
        GraphError: a reshape depends on the data in a way that no constant target expresses.
    """
    keep = {*parameters, *(name + TRANSPOSED_SUFFIX for name in parameters)}
    transpose_weights(model.graph, parameters)
    fold(model, keep)
    for node in model.graph:
        if node.op_type == "Reshape":
            make_target_constant(model.graph, node)
        if node.op_type == "MatMul":
            for factor in node.inputs:
                split_transpose(factor)
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
    """Replace `Transpose(weight)` by a stored transposed weight."""
    for node in list(graph):
        weight = node.inputs[0] if node.op_type == "Transpose" else None
        if weight is None or weight.name not in parameters or weight.const_value is None:
            continue
        name = f"{weight.name}{TRANSPOSED_SUFFIX}"
        # A view: the bytes are only reordered while they are written.
        transposed = weight.const_value.numpy().transpose(node.attributes["perm"].as_ints())
        ir.convenience.replace_all_uses_with(node.outputs[0], initializer(graph, name, transposed))
        graph.remove(node, safe=True)


def initializer(graph: ir.Graph, name: str, array: npt.NDArray[np.generic]) -> ir.Value:
    """Return the graph's initializer `name`, made from `array` if there is none."""
    if name not in graph.initializers:
        tensor = ir.Tensor(array, name=name)
        graph.register_initializer(
            ir.Value(name=name, const_value=tensor, shape=tensor.shape, type=ir.TensorType(tensor.dtype))
        )
    return graph.initializers[name]


def fold(model: ir.Model, keep: Collection[str]) -> None:
    """Fold constants and shape arithmetic until nothing changes, at most twice as torch.onnx itself does.

    What is computed of the initializers `keep` stays: folded, it would be a constant without their name.
    """

    def should_fold(node: ir.Node) -> bool | None:
        is_kept = any(value is not None and value.name in keep for value in node.inputs)
        return False if is_kept else None

    passes.InlinePass()(model)
    for _ in range(2):
        optimizer.fold_constants(model, should_fold=should_fold)
        rewriter.rewrite(model)
        passes.IdentityEliminationPass()(model)
        passes.RemoveUnusedNodesPass()(model)


def make_target_constant(graph: ir.Graph, node: ir.Node) -> None:
    """Give a Reshape a constant target without `allowzero`."""
    target = reshape_target(node)
    name = TARGET_PREFIX + "_".join("n" if length < 0 else str(length) for length in target)
    node.replace_input_with(1, initializer(graph, name, np.array(target, dtype=np.int64)))
    node.attributes.pop("allowzero", None)


def reshape_target(node: ir.Node) -> list[int]:
    """Derive the constant target of a Reshape from the shapes of its input and output.

    An axis of unknown length must be the input's axis at the same place (0), or be the only other one (-1).

    Raises:
        GraphError: neither holds, or a shape is unknown.
    """
    source, result = node.inputs[0], node.outputs[0]
    if source is None or source.shape is None or result.shape is None:
        raise GraphError(f"the Reshape that makes {result.name!r} has no inferred shape")
    target = constant_target(tuple(source.shape), tuple(result.shape))
    if target is None:
        raise GraphError(
            f"the Reshape that makes {result.name!r} goes from {source.shape} to {result.shape}: "
            "no constant target expresses that"
        )
    return target


def constant_target(source: Sequence[object], result: Sequence[object]) -> list[int] | None:
    """Return the target of a Reshape between two shapes, as `reshape_target` says; None: no constant is."""
    target = []
    for axis, length in enumerate(result):
        if isinstance(length, int):
            target.append(length)
        else:
            target.append(0 if axis < len(source) and source[axis] == length else -1)
    return target if target.count(-1) <= 1 else None


def split_transpose(factor: ir.Value | None) -> None:
    """Move rows first where a product's factor is a Transpose that moves rows and swaps the last two axes.

    Keys (B, T, H, K) reach their product as (B, H, K, T). Folding makes that one Transpose; by way of
    (B, H, T, K) the bits are the same.
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


def merge_constants(graph: ir.Graph, keep: Collection[str]) -> None:
    """Merge equal constants and number them; drop initializers without a reader."""
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
    """Give every node and inner value a name that is stable from export to export; return shapes by name."""
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
