"""What `manifest.json` says of a bundle's graphs, tools and files: read from the files themselves."""

import importlib.metadata
from pathlib import Path

import onnx

from attnlens.bundle import FORMAT_VERSION, MANIFEST_NAME, describe_file
from attnlens.v1.manifest_pb2 import Architecture, Graph, GraphKind, Manifest, ValueInfo
from attnlens.v1.tensor_pb2 import DataType
from attnlens_export.lint import axes_of
from attnlens_export.structure import read_structure
from attnlens_model import EncoderConfig

EMBEDDINGS_PATH = "onnx/model.onnx"
ATTENTIONS_PATH = "onnx/model_attentions.onnx"
HALF_PATH = "onnx/model_fp16.onnx"
INT8_PATH = "onnx/model_int8.onnx"
DATA_PATH = "onnx/model.onnx_data"
GRAPH_KINDS = {
    EMBEDDINGS_PATH: GraphKind.GRAPH_KIND_EMBEDDINGS,
    ATTENTIONS_PATH: GraphKind.GRAPH_KIND_ATTENTIONS,
}
# Graphs of the embeddings that a bundle may have beside those.
MORE_DATA_TYPES = {HALF_PATH: DataType.DATA_TYPE_FLOAT16, INT8_PATH: DataType.DATA_TYPE_INT8}
TOOLS = ("attnlens", "numpy", "onnx", "onnxruntime", "onnxscript", "torch")

_DATA_TYPES: dict[int, DataType.ValueType] = {
    onnx.TensorProto.FLOAT: DataType.DATA_TYPE_FLOAT32,
    onnx.TensorProto.INT64: DataType.DATA_TYPE_INT64,
}


def describe_bundle(directory: Path, config: EncoderConfig) -> Manifest:
    """Return the manifest's part that follows from the files below `directory` and the encoder's sizes."""
    return Manifest(
        format_version=FORMAT_VERSION,
        architecture=describe_architecture(config),
        graphs=describe_graphs(directory),
        tool_versions=tool_versions(),
        files=[describe_file(directory, path) for path in bundle_files(directory)],
    )


def bundle_files(directory: Path) -> list[Path]:
    """Return every file of a bundle but the manifest itself, which can't hold its own hash."""
    manifest = directory / MANIFEST_NAME
    return [path for path in sorted(directory.rglob("*")) if path.is_file() and path != manifest]


def describe_graphs(directory: Path) -> list[Graph]:
    """Return the description of each graph."""
    return [_describe_graph(directory, path, kind) for path, kind in graph_kinds(directory).items()]


def graph_kinds(directory: Path) -> dict[str, GraphKind.ValueType]:
    """Return the graphs of a bundle by path: both in fp32, then those in fp16 and int8 that are there."""
    more = (path for path in MORE_DATA_TYPES if (directory / path).is_file())
    return GRAPH_KINDS | dict.fromkeys(more, GraphKind.GRAPH_KIND_EMBEDDINGS)


def data_type_of(path: str) -> DataType.ValueType:
    """Return what the graph with this path computes in."""
    return MORE_DATA_TYPES.get(path, DataType.DATA_TYPE_FLOAT32)


def tool_versions() -> dict[str, str]:
    """Return the versions of the tools that shape a bundle, of those that are installed."""
    versions = {}
    for name in TOOLS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def describe_architecture(config: EncoderConfig) -> Architecture:
    """Return the encoder's sizes as the manifest holds them."""
    return Architecture(
        family=config.family,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        intermediate_size=config.feed_forward.intermediate_size,
        vocab_size=config.embeddings.vocab_size,
        max_position_embeddings=config.max_tokens,
        pad_token_id=config.embeddings.pad_token_id,
        is_causal=config.is_causal,
    )


def _describe_graph(directory: Path, path: str, kind: GraphKind.ValueType) -> Graph:
    model = read_structure(directory / path)
    return Graph(
        path=path,
        kind=kind,
        opset=model.opset_import[0].version,
        ir_version=model.ir_version,
        data_type=data_type_of(path),
        inputs=[_describe_value(value) for value in model.graph.input],
        outputs=[_describe_value(value) for value in model.graph.output],
    )


def _describe_value(value: onnx.ValueInfoProto) -> ValueInfo:
    data_type = _DATA_TYPES[value.type.tensor_type.elem_type]
    return ValueInfo(name=value.name, data_type=data_type, axes=[str(axis) for axis in axes_of(value)])
