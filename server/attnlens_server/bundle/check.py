"""Validation of manifests: sizes, names, and the inputs and outputs of graphs."""

from pathlib import Path

from attnlens.bundle import MANIFEST_NAME, BundleError, embedding_size, find_graph, max_dimensions
from attnlens.classifiers import ScoreActivation
from attnlens.embedding_types import ranges_problem
from attnlens.similarity import Similarity
from attnlens.tensors import from_tensor
from attnlens.v1.manifest_pb2 import Architecture, Graph, GraphOutput, Manifest, Pooling, Precision
from attnlens.v1.tensor_pb2 import DataType
from attnlens_server.bundle.manifest import (
    CONTRIBUTIONS,
    LOGITS,
    PURPOSES,
    has_contributions,
    is_known,
    main_graph,
    read_graph,
)
from attnlens_server.bundle.model import Output, OutputRole
from attnlens_server.errors import StartupError

INPUT_NAMES = ("input_ids", "attention_mask", "token_type_ids")  # the last one is optional
REMEDY = "export the bundle again"

# Additional inputs, and outputs, of the contributions graph with their axes: B texts, T tokens, E components
# of an embedding, L layers, H heads. Equal to those in the exporter's graph/names.py.
CONTRIBUTION_INPUTS = {
    "pooling_weights": "BT",
    "takes_maximum": "B",
    "direction": "BE",
    "towards_itself": "B",
    "num_dimensions": "B",
    "head_gates": "BLH",
}
CONTRIBUTION_OUTPUTS = {
    "embedding": "BE",
    "token_contributions": "BT",
    "baseline": "B",
    "head_contributions": "BLH",
}

# Far beyond any encoder. Larger values would exhaust memory or time.
_MAX_SIZES = {
    "hidden_size": 1 << 17,
    "num_layers": 1 << 12,
    "num_heads": 1 << 12,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 24,
}
_MAX_LABELS = 1 << 20
_MAX_TEXT_BYTES = {"model_name": 256, "source": 4096, "source_revision": 4096, "weights_license": 4096}


def check_manifest(directory: Path, manifest: Manifest) -> None:
    """Validate a manifest without opening its graphs. Unknown graphs and outputs are ignored.

    Raises:
        StartupError: A size is out of range, a name is too long, a graph is missing or repeated, the pooling
            is unknown, or the inputs or outputs of a graph or the ranges do not fit the sizes.
    """
    path = directory / MANIFEST_NAME
    _check_sizes(path, manifest)
    _check_texts(path, manifest)
    _check_defaults(path, manifest)
    graphs = [
        graph
        for graph in manifest.graphs
        if graph.purpose in {*PURPOSES.values(), main_graph(manifest)[1]}
        and graph.precision in Precision.values()
    ]
    try:
        for graph in graphs:
            find_graph(manifest, graph.purpose, graph.precision)
            _check_graph(path, graph, manifest)
        for purpose in {*PURPOSES.values(), main_graph(manifest)[1]}:
            find_graph(manifest, purpose)
        if has_contributions(manifest):
            _check_contributions(path, find_graph(manifest, CONTRIBUTIONS), manifest)
    except BundleError as error:
        raise StartupError(f"{path}: {error}") from error
    if manifest.HasField("embedding_ranges"):
        _check_ranges(path, manifest)


def _check_sizes(path: Path, manifest: Manifest) -> None:
    sizes = manifest.architecture
    ranges = [(f"architecture.{name}", getattr(sizes, name), 1, most) for name, most in _MAX_SIZES.items()]
    ranges += [
        ("architecture.type_vocab_size", sizes.type_vocab_size, 0, 1 << 24),
        ("architecture.pad_token_id", sizes.pad_token_id, 0, sizes.vocab_size - 1),
        ("max_tokens", manifest.max_tokens, 1, sizes.max_position_embeddings),
        ("pooling.truncate_dim", manifest.pooling.truncate_dim, 0, max_dimensions(manifest)),
    ]
    for name, value, low, high in ranges:
        if not low <= value <= high:
            problem = f"{name} is {value}, which is outside the range {low} to {high}"
            raise StartupError(f"{path}: {problem}: {REMEDY}")


def _check_texts(path: Path, manifest: Manifest) -> None:
    """Check the length of texts that occur in responses and in the log."""
    for name, limit in _MAX_TEXT_BYTES.items():
        size = len(getattr(manifest, name).encode())
        if size > limit:
            raise StartupError(f"{path}: {name} has {size} bytes, but the limit is {limit}: {REMEDY}")


def _check_defaults(path: Path, manifest: Manifest) -> None:
    pooling = manifest.pooling.pooling
    if manifest.HasField("classifier"):
        _check_classifier(path, manifest)
    if pooling == Pooling.POOLING_UNSPECIFIED or pooling not in Pooling.values():
        raise StartupError(
            f"{path}: the pooling is missing or unknown: use the version of attnlens that exported the bundle"
        )
    template = manifest.chat_template
    if manifest.HasField("chat_template") and (
        manifest.supports_text_pairs
        or manifest.HasField("classifier")
        or (any(manifest.prompts.values()) and not template.HasField("with_prompt"))
    ):
        raise StartupError(f"{path}: the chat template does not support text pairs or prompts: {REMEDY}")
    if int(manifest.similarity) not in [0, *Similarity]:
        raise StartupError(
            f"{path}: the similarity is unknown: use the version of attnlens that exported the bundle"
        )
    if manifest.default_prompt_name and manifest.default_prompt_name not in manifest.prompts:
        raise StartupError(
            f"{path}: the default prompt {manifest.default_prompt_name!r} does not exist: {REMEDY}"
        )


def _check_classifier(path: Path, manifest: Manifest) -> None:
    classifier = manifest.classifier
    if not 1 <= len(classifier.labels) <= _MAX_LABELS:
        problem = f"has {len(classifier.labels)} labels: use 1 to {_MAX_LABELS}"
        raise StartupError(f"{path}: the classifier {problem}, or {REMEDY}")
    if int(classifier.activation) not in [*ScoreActivation]:
        raise StartupError(
            f"{path}: the activation of the classifier is missing or unknown: use the version of attnlens "
            "that exported the bundle"
        )


def _check_ranges(path: Path, manifest: Manifest) -> None:
    try:
        ranges = from_tensor(manifest.embedding_ranges.values)
    except ValueError as error:
        raise StartupError(f"{path}: embedding_ranges is not a valid tensor: {error}: {REMEDY}") from error
    if problem := ranges_problem(ranges, embedding_size(manifest)):
        raise StartupError(f"{path}: embedding_ranges {problem}: {REMEDY}")


def _check_graph(path: Path, graph: Graph, manifest: Manifest) -> None:
    sizes = manifest.architecture
    inputs = tuple(value.name for value in graph.inputs)
    if inputs not in (INPUT_NAMES, INPUT_NAMES[:2]):
        raise StartupError(f"{path}: {graph.path} has the inputs {', '.join(inputs)}: {REMEDY}")
    known = read_graph(graph, manifest).outputs
    for output, stated in zip(known, filter(is_known, graph.outputs), strict=True):
        _check_output(path, graph.path, output, stated, sizes)
    meanings = [(output.role, output.layer) for output in known]
    names = [output.value.name for output in graph.outputs]
    if graph.purpose == LOGITS and meanings != [(OutputRole.LOGITS, None)]:
        raise StartupError(f"{path}: {graph.path} has other known outputs than logits: {REMEDY}")
    if graph.purpose != LOGITS and (OutputRole.LAST_HIDDEN_STATE, None) not in meanings:
        raise StartupError(f"{path}: {graph.path} has no output with the token vectors: {REMEDY}")
    if graph.purpose == PURPOSES["attention"] and all(layer is None for _, layer in meanings):
        raise StartupError(f"{path}: {graph.path} has no known output of a layer: {REMEDY}")
    if len({*meanings}) < len(meanings) or len({*names}) < len(names):
        raise StartupError(f"{path}: {graph.path} has two outputs with the same name or meaning: {REMEDY}")


def _check_contributions(path: Path, graph: Graph, manifest: Manifest) -> None:
    """Check the inputs and outputs of the contributions graph."""
    lengths = {
        "E": str(max_dimensions(manifest)),
        "L": str(manifest.architecture.num_layers),
        "H": str(manifest.architecture.num_heads),
    }
    inputs = {value.name: list(value.axes) for value in graph.inputs}
    outputs = {output.value.name: list(output.value.axes) for output in graph.outputs}
    names = list(inputs)
    num_ids = len(names) - len(CONTRIBUTION_INPUTS)
    fits = tuple(names[:num_ids]) in (INPUT_NAMES, INPUT_NAMES[:2])
    fits = fits and names[num_ids:] == list(CONTRIBUTION_INPUTS)
    for found, expected in ((inputs, CONTRIBUTION_INPUTS), (outputs, CONTRIBUTION_OUTPUTS)):
        for name, letters in expected.items():
            axes = found.get(name, [])
            fits = fits and len(axes) == len(letters)
            fits = fits and all(
                axis == lengths.get(letter, axis) for axis, letter in zip(axes, letters, strict=True)
            )
    if not fits:
        raise StartupError(
            f"{path}: {graph.path} is not a contributions graph with the inputs "
            f"{', '.join(CONTRIBUTION_INPUTS)} and the outputs {', '.join(CONTRIBUTION_OUTPUTS)} for "
            f"these sizes: {REMEDY}"
        )


def _check_output(path: Path, graph: str, output: Output, stated: GraphOutput, sizes: Architecture) -> None:
    """Check layer, heads, axes and data type of an output."""
    has_no_layer = output.role in (OutputRole.LAST_HIDDEN_STATE, OutputRole.LOGITS)
    fits = (
        (output.layer is None and not output.num_heads)
        if has_no_layer
        else (
            output.layer is not None
            and 0 <= output.layer < sizes.num_layers
            and 1 <= output.num_heads <= sizes.num_heads
        )
    )
    axes, shape = stated.value.axes, output.shape
    fits = (
        fits
        and len(axes) == len(shape)
        and all(size is None or axis == str(size) for axis, size in zip(axes, shape, strict=True))
    )
    if not fits or stated.value.data_type != DataType.DATA_TYPE_FLOAT32:
        layer = "no layer" if output.layer is None else f"layer {output.layer}"
        raise StartupError(
            f"{path}: {output.name} of {graph} is {DataType.Name(stated.value.data_type)} {list(axes)} of "
            f"{layer} with {output.num_heads} heads, which does not fit {sizes.num_layers} layers, at most "
            f"{sizes.num_heads} heads, a hidden size of {sizes.hidden_size} and fp32: {REMEDY}"
        )
