"""Conversion of a validated manifest to the model description."""

from attnlens.bundle import embedding_size, find_graph, max_dimensions
from attnlens.chat_template import ChatTemplate
from attnlens.classifiers import ScoreActivation
from attnlens.costs import flops_per_token
from attnlens.pattern_messages import read_pattern
from attnlens.pooling import Pooling
from attnlens.published import describe_comparison, describe_tokenizer
from attnlens.similarity import Similarity
from attnlens.tensors import from_tensor
from attnlens.v1 import manifest_pb2 as pb
from attnlens_server.bundle.model import (
    Classifier,
    ContributionsGraph,
    Faithfulness,
    Graph,
    Kind,
    Layout,
    Model,
    ModelOutputs,
    Output,
    OutputRole,
    RowSum,
)
from attnlens_server.config import Precision, graph_precision

PRECISIONS: dict[Precision, pb.Precision.ValueType] = {
    "fp32": pb.Precision.PRECISION_FP32,
    "fp16": pb.Precision.PRECISION_FP16,
    "int8": pb.Precision.PRECISION_INT8,
    "bf16": pb.Precision.PRECISION_BF16,
}
PURPOSES: dict[Kind, pb.GraphPurpose.ValueType] = {
    "embeddings": pb.GraphPurpose.GRAPH_PURPOSE_EMBEDDINGS,
    "attention": pb.GraphPurpose.GRAPH_PURPOSE_ATTENTION,
}
"""Graphs of every bundle."""
LOGITS = pb.GraphPurpose.GRAPH_PURPOSE_LOGITS
CONTRIBUTIONS = pb.GraphPurpose.GRAPH_PURPOSE_CONTRIBUTIONS
_ROLES, _ROW_SUMS = (frozenset(map(int, enum)) for enum in (OutputRole, RowSum))
_LAYOUTS = frozenset(map(int, Layout)) - {int(Layout.PER_TEXT)}


def read_model(manifest: pb.Manifest, version: str, precision: Precision) -> Model:
    """Return the model description with the embeddings graph, or that of logits, for `precision`.

    Raises:
        BundleError: The graph is missing or repeated.
    """
    sizes, pooling = manifest.architecture, manifest.pooling
    classifier = _read_classifier(manifest)
    found: dict[Kind, pb.Graph] = {kind: find_graph(manifest, purpose) for kind, purpose in PURPOSES.items()}
    main_kind, main_purpose = main_graph(manifest)
    found[main_kind] = find_graph(manifest, main_purpose, PRECISIONS[graph_precision(precision)])
    graphs = {kind: read_graph(graph, manifest) for kind, graph in found.items()}
    return Model(
        name=manifest.model_name,
        version=version,
        max_tokens=manifest.max_tokens,
        max_positions=sizes.max_position_embeddings,
        hidden_size=sizes.hidden_size,
        num_layers=sizes.num_layers,
        token_flops=flops_per_token(sizes.hidden_size, sizes.intermediate_size, sizes.num_layers),
        vocab_size=sizes.vocab_size,
        type_vocab_size=sizes.type_vocab_size,
        pad_token_id=sizes.pad_token_id,
        takes_pairs=manifest.supports_text_pairs,
        pooling=Pooling(pooling.pooling),
        normalize=pooling.normalize,
        exclude_prompt=pooling.exclude_prompt,
        max_dimensions=max_dimensions(manifest),
        embedding_size=0 if classifier else embedding_size(manifest),
        prompts=dict(manifest.prompts),
        default_prompt_name=manifest.default_prompt_name,
        graphs=graphs,
        outputs=ModelOutputs(graphs["embeddings"], graphs["attention"], graphs.get("logits")),
        contributions=_read_contributions(manifest),
        faithfulness={
            int(each.method): Faithfulness(each.rank_correlation, each.num_texts)
            for each in manifest.faithfulness
        },
        embedding_ranges=(
            from_tensor(manifest.embedding_ranges.values) if manifest.HasField("embedding_ranges") else None
        ),
        classifier=classifier,
        comparison=_describe_origin(manifest),
        chat_template=(
            ChatTemplate.read(manifest.chat_template) if manifest.HasField("chat_template") else None
        ),
        similarity=Similarity(manifest.similarity or Similarity.COSINE),
    )


def _describe_origin(manifest: pb.Manifest) -> str:
    """Return the comparison with the publisher's pipeline, and the choice of token ids if there is one."""
    compared = describe_comparison(manifest.publisher if manifest.HasField("publisher") else None)
    return "; ".join(filter(None, (compared, describe_tokenizer(manifest.tokenizer_choice))))


def main_graph(manifest: pb.Manifest) -> tuple[Kind, pb.GraphPurpose.ValueType]:
    """Return kind and purpose of the graph that exists in each precision."""
    if manifest.HasField("classifier"):
        return "logits", LOGITS
    return "embeddings", PURPOSES["embeddings"]


def _read_classifier(manifest: pb.Manifest) -> Classifier | None:
    if not manifest.HasField("classifier"):
        return None
    classifier = manifest.classifier
    return Classifier(tuple(classifier.labels), ScoreActivation(classifier.activation))


def read_graph(graph: pb.Graph, manifest: pb.Manifest) -> Graph:
    """Return the description of a graph.

    Raises:
        BundleError: The pattern of an output is invalid.
    """
    known = [output for output in graph.outputs if is_known(output)]
    return Graph(
        graph.path,
        tuple(value.name for value in graph.inputs),
        tuple(_read_output(output, manifest) for output in known),
        frozenset(output.value.name for output in graph.outputs if not is_known(output)),
    )


def has_contributions(manifest: pb.Manifest) -> bool:
    """Return whether there is a contributions graph."""
    return any(
        (graph.purpose, graph.precision) == (CONTRIBUTIONS, PRECISIONS["fp32"]) for graph in manifest.graphs
    )


def _read_contributions(manifest: pb.Manifest) -> ContributionsGraph | None:
    if not has_contributions(manifest):
        return None
    graph, sizes = find_graph(manifest, CONTRIBUTIONS), manifest.architecture
    names = tuple(value.name for value in graph.inputs)
    return ContributionsGraph(
        graph.path, names, max_dimensions(manifest), (sizes.num_layers, sizes.num_heads)
    )


def is_known(output: pb.GraphOutput) -> bool:
    """Return whether this version knows the role and the layout of an output."""
    if output.role == pb.OutputRole.OUTPUT_ROLE_LOGITS:
        return output.layout == pb.OutputLayout.OUTPUT_LAYOUT_PER_TEXT
    return int(output.role) in _ROLES and int(output.layout) in _LAYOUTS


def _read_output(output: pb.GraphOutput, manifest: pb.Manifest) -> Output:
    is_logits = output.role == pb.OutputRole.OUTPUT_ROLE_LOGITS
    width = len(manifest.classifier.labels) if is_logits else manifest.architecture.hidden_size
    return Output(
        output.value.name,
        OutputRole(output.role),
        Layout(output.layout),
        output.layer if output.HasField("layer") else None,
        output.num_heads,
        0 if output.num_heads else width,
        RowSum(output.row_sum) if int(output.row_sum) in _ROW_SUMS else RowSum.UNSPECIFIED,
        read_pattern(output),
    )
