"""What a manifest may say: sizes that an encoder can have, and graphs that agree with them.

D hidden size, L layers, H heads.
"""

from pathlib import Path

from attnlens.bundle import MANIFEST_NAME, BundleError, find_graph, max_dimensions
from attnlens.v1.manifest_pb2 import Architecture, Graph, GraphKind, Manifest, Pooling
from attnlens.v1.tensor_pb2 import DataType
from attnlens_server.errors import StartupError

INPUT_NAMES = ("input_ids", "attention_mask", "token_type_ids")  # the last one may be absent
REMEDY = "export the bundle again"

# Far beyond any encoder; a number beyond them would be taken for memory or time at once.
_MOST = {
    "hidden_size": 1 << 17,
    "num_layers": 1 << 12,
    "num_heads": 1 << 12,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 24,
}


def output_shapes(kind: GraphKind.ValueType, sizes: Architecture) -> dict[str, tuple[int | None, ...]]:
    """Return the shape of each output of a graph by its name, in order; None is an axis that varies."""
    shapes: dict[str, tuple[int | None, ...]] = {"last_hidden_state": (None, None, sizes.hidden_size)}
    if kind == GraphKind.GRAPH_KIND_ATTENTIONS:
        attention = (None, sizes.num_heads, None, None)
        shapes |= {f"attentions.{layer}": attention for layer in range(sizes.num_layers)}
    return shapes


def check_manifest(directory: Path, manifest: Manifest) -> None:
    """Check what can be told without opening a graph.

    Raises:
        StartupError: a number is out of range, graphs are missing or there twice, the pooling is unknown, or
            a graph has other inputs or outputs than an encoder of these sizes.
    """
    path = directory / MANIFEST_NAME
    _check_sizes(path, manifest)
    _check_defaults(path, manifest)
    for graph in manifest.graphs:
        if graph.kind not in GraphKind.values() or graph.data_type not in DataType.values():
            raise StartupError(
                f"{path}: {graph.path} is a graph of a kind that this version does not know: "
                "install the version of attnlens that wrote it"
            )
        _check_graph(path, graph, manifest.architecture)
    try:
        for graph in manifest.graphs:
            find_graph(manifest, graph.kind, graph.data_type)
        for kind in (GraphKind.GRAPH_KIND_EMBEDDINGS, GraphKind.GRAPH_KIND_ATTENTIONS):
            find_graph(manifest, kind)
    except BundleError as error:
        raise StartupError(f"{path}: {error}") from error


def _check_sizes(path: Path, manifest: Manifest) -> None:
    sizes = manifest.architecture
    ranges = [(f"architecture.{name}", getattr(sizes, name), 1, most) for name, most in _MOST.items()]
    ranges += [
        ("architecture.pad_token_id", sizes.pad_token_id, 0, sizes.vocab_size - 1),
        ("max_tokens", manifest.max_tokens, 1, sizes.max_position_embeddings),
        ("pooling.truncate_dim", manifest.pooling.truncate_dim, 0, max_dimensions(manifest)),
    ]
    for name, value, low, high in ranges:
        if not low <= value <= high:
            raise StartupError(f"{path}: {name} is {value}: it must be from {low} to {high}, {REMEDY}")


def _check_defaults(path: Path, manifest: Manifest) -> None:
    pooling = manifest.pooling.pooling
    if pooling == Pooling.POOLING_UNSPECIFIED or pooling not in Pooling.values():
        raise StartupError(
            f"{path} states no pooling that this version knows: install the version of attnlens that wrote it"
        )
    if manifest.default_prompt_name and manifest.default_prompt_name not in manifest.prompts:
        raise StartupError(f"{path} has no prompt {manifest.default_prompt_name!r}, its default: {REMEDY}")


def _check_graph(path: Path, graph: Graph, sizes: Architecture) -> None:
    inputs = tuple(each.name for each in graph.inputs)
    if inputs not in (INPUT_NAMES, INPUT_NAMES[:2]):
        raise StartupError(f"{path}: {graph.path} has the inputs {', '.join(inputs)}: {REMEDY}")
    expected = output_shapes(graph.kind, sizes)
    outputs = [each.name for each in graph.outputs]
    if outputs != list(expected):
        raise StartupError(
            f"{path}: {graph.path} has {len(outputs)} outputs, the last {outputs[-1:]}; an encoder of "
            f"{sizes.num_layers} layers has {len(expected)}, the last {list(expected)[-1:]}: {REMEDY}"
        )
    for output, shape in zip(graph.outputs, expected.values(), strict=True):
        fits = len(output.axes) == len(shape) and all(
            size is None or axis == str(size) for axis, size in zip(output.axes, shape, strict=True)
        )
        if not fits or output.data_type != DataType.DATA_TYPE_FLOAT32:
            raise StartupError(
                f"{path}: {output.name} of {graph.path} is {DataType.Name(output.data_type)} "
                f"{list(output.axes)}, which is not that of {sizes.num_heads} heads and a width of "
                f"{sizes.hidden_size} in fp32: {REMEDY}"
            )
