"""Creation of `manifest.json`, which describes a bundle."""

import importlib.metadata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx

from attnlens import chat_template
from attnlens.bundle import FORMAT_VERSION, describe_file
from attnlens.pattern_messages import write_pattern
from attnlens.v1.manifest_pb2 import (
    Architecture,
    Gate,
    Graph,
    GraphOutput,
    LayerInfo,
    Manifest,
    OutputLayout,
    OutputRole,
    ParityFigure,
    RowSum,
    Similarity,
    ValueInfo,
)
from attnlens.v1.tensor_pb2 import DataType
from attnlens_export.contents import Verdict, bundle_files, graphs_of
from attnlens_export.graph.lint import axes_of
from attnlens_export.graph.names import (
    BASELINE,
    EMBEDDING_OUTPUT,
    HEAD_CONTRIBUTIONS,
    HIDDEN_OUTPUT,
    LOGITS_OUTPUT,
    TOKEN_CONTRIBUTIONS,
    graph_id,
    input_names,
    layer_outputs,
    role_number,
)
from attnlens_export.graph.read import external_files, read_structure
from attnlens_export.int8.result import INT8_PATH, Int8Result
from attnlens_export.published.chat_template import read_message
from attnlens_export.published.classifier import FEATURE, read_stored_classifier
from attnlens_export.published.pooling import read_pooling
from attnlens_export.published.prompts import read_prompts, read_similarity
from attnlens_export.published.side_files import read_max_tokens, read_task, read_tokenizer_choice
from attnlens_export.tokenizer.pairs import takes_pairs
from attnlens_model import AttentionConfig, AttentionOutput, EncoderConfig

TOOLS = ("attnlens", "numpy", "onnx", "onnxruntime", "onnxscript", "torch")

_DATA_TYPES: dict[int, DataType.ValueType] = {
    onnx.TensorProto.FLOAT: DataType.DATA_TYPE_FLOAT32,
    onnx.TensorProto.INT64: DataType.DATA_TYPE_INT64,
}

_ROLES = {
    LOGITS_OUTPUT: OutputRole.OUTPUT_ROLE_LOGITS,
    EMBEDDING_OUTPUT: OutputRole.OUTPUT_ROLE_EMBEDDING,
    TOKEN_CONTRIBUTIONS: OutputRole.OUTPUT_ROLE_TOKEN_CONTRIBUTIONS,
    BASELINE: OutputRole.OUTPUT_ROLE_BASELINE,
    HEAD_CONTRIBUTIONS: OutputRole.OUTPUT_ROLE_HEAD_CONTRIBUTIONS,
}


@dataclass(frozen=True)
class Origin:
    """Origin of the weights of a bundle.

    Attributes:
        name: Model name.
        source: Hub id, name of a directory, or `config+seed:N` for a randomly initialized encoder.
        revision: Commit on the hub. Empty if unknown.
        license: License of the weights. Empty if unknown.
    """

    name: str
    source: str
    revision: str = ""
    license: str = ""


def describe_bundle(directory: Path, config: EncoderConfig, origin: Origin, verdict: Verdict) -> Manifest:
    """Return the manifest of a bundle. All other files must exist."""
    manifest = describe_facts(directory, config)
    manifest.format_version = FORMAT_VERSION
    manifest.model_name, manifest.source = origin.name, origin.source
    manifest.source_revision, manifest.weights_license = origin.revision, origin.license
    graphs = {graph.path: graph for graph in manifest.graphs}
    for result in verdict.precisions.values():
        if isinstance(result, Int8Result):
            graphs[INT8_PATH].quantization.CopyFrom(result.quantization)
    manifest.parity.CopyFrom(verdict.to_message())
    ids = classifier_ids(directory)
    rename_graphs(manifest.parity.gates, ids)
    rename_graphs(manifest.parity.figures, ids)
    manifest.tool_versions.update(tool_versions())
    manifest.files.extend(describe_file(directory, path) for path in bundle_files(directory))
    return manifest


def rename_graphs(entries: Iterable[Gate | ParityFigure], ids: Mapping[str, str]) -> None:
    """Replace the ids of graphs in place. Ids that are not in `ids` stay the same."""
    for entry in entries:
        entry.graph = ids.get(entry.graph, entry.graph)


def classifier_ids(directory: Path) -> dict[str, str]:
    """Return the ids of a classifier's graphs by the ids that `graph_id` derives from their paths."""
    return {
        graph_id(graph.path): graph.id for graph in graphs_of(directory) if graph_id(graph.path) != graph.id
    }


def describe_facts(directory: Path, config: EncoderConfig) -> Manifest:
    """Return the manifest fields that can be derived from the files, which `claims` compares."""
    prompts = read_prompts(directory)
    classifier = read_stored_classifier(directory)
    template = read_message(directory)
    return Manifest(
        classifier=classifier,
        required_features=([] if classifier is None else [FEATURE])
        + ([] if template is None else [chat_template.FEATURE]),
        chat_template=template,
        similarity=Similarity.ValueType(0 if classifier else read_similarity(directory)),
        architecture=_describe_architecture(config),
        graphs=[_describe_graph(directory, config, graph) for graph in graphs_of(directory)],
        pooling=read_pooling(directory, config.vector_size),
        max_tokens=read_max_tokens(directory, config),
        prompts=prompts.texts,
        default_prompt_name=prompts.default_name,
        supports_text_pairs=takes_pairs(directory, config),
        adapter_task=read_task(directory),
        tokenizer_choice=read_tokenizer_choice(directory),
    )


def tool_versions() -> dict[str, str]:
    """Return the versions of the installed packages that determine the content of a bundle."""
    versions = {}
    for name in TOOLS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _describe_architecture(config: EncoderConfig) -> Architecture:
    """Return the sizes of the encoder."""
    return Architecture(
        family=config.family,
        hidden_size=config.vector_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        intermediate_size=config.intermediate_size,
        vocab_size=config.embeddings.vocab_size,
        type_vocab_size=config.embeddings.type_vocab_size if "token_type_ids" in input_names(config) else 0,
        max_position_embeddings=config.max_tokens,
        pad_token_id=config.embeddings.pad_token_id,
        is_causal=config.is_causal,
        layers=[_describe_layer(config, attention) for attention in config.layer_attentions],
    )


def _describe_layer(config: EncoderConfig, attention: AttentionConfig) -> LayerInfo:
    return LayerInfo(
        attention=attention.kind,
        num_heads=attention.num_heads,
        num_key_value_heads=attention.num_shared_heads,
        head_size=attention.head_dim(config.hidden_size),
        window_radius=attention.reach or 0,
    )


def _describe_graph(directory: Path, config: EncoderConfig, graph: Graph) -> Graph:
    model = read_structure(directory / graph.path)
    files = (path.relative_to(directory).as_posix() for path in external_files(directory / graph.path))
    graph.data_files.extend(files)
    graph.opset = model.opset_import[0].version
    graph.ir_version = model.ir_version
    graph.inputs.extend(_describe_value(value) for value in model.graph.input)
    described = layer_outputs(config)
    graph.outputs.extend(_describe_output(described, value) for value in model.graph.output)
    return graph


def _describe_output(
    described: Mapping[str, tuple[int, AttentionOutput]], value: onnx.ValueInfoProto
) -> GraphOutput:
    info = _describe_value(value)
    if value.name == HIDDEN_OUTPUT:
        return GraphOutput(
            value=info,
            role=OutputRole.OUTPUT_ROLE_LAST_HIDDEN_STATE,
            layout=OutputLayout.OUTPUT_LAYOUT_PER_TOKEN,
        )
    if value.name in _ROLES:
        return GraphOutput(value=info, role=_ROLES[value.name], layout=_layout(value.name))
    layer, output = described[value.name]
    message = GraphOutput(
        value=info,
        role=role_number(output.role),
        layer=layer,
        layout=OutputLayout.Value(f"OUTPUT_LAYOUT_{output.layout.upper()}"),
        num_heads=output.num_heads,
        row_sum=RowSum.Value(f"ROW_SUM_{output.row_sum.upper()}"),
    )
    write_pattern(message, output.pattern)
    return message


def _layout(name: str) -> OutputLayout.ValueType:
    is_per_token = name == TOKEN_CONTRIBUTIONS
    return OutputLayout.OUTPUT_LAYOUT_PER_TOKEN if is_per_token else OutputLayout.OUTPUT_LAYOUT_PER_TEXT


def _describe_value(value: onnx.ValueInfoProto) -> ValueInfo:
    data_type = _DATA_TYPES[value.type.tensor_type.elem_type]
    return ValueInfo(name=value.name, data_type=data_type, axes=[str(axis) for axis in axes_of(value)])
