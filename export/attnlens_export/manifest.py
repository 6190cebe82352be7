"""What `manifest.json` says of a bundle's graphs, tools and files: read from the files themselves."""

import importlib.metadata
from pathlib import Path

import onnx

from attnlens.bundle import FORMAT_VERSION, MANIFEST_NAME, describe_file
from attnlens.v1.manifest_pb2 import (
    Architecture,
    Graph,
    GraphOutput,
    GraphPurpose,
    LayerInfo,
    Manifest,
    OutputLayout,
    OutputRole,
    Precision,
    RowSum,
    ValueInfo,
)
from attnlens.v1.tensor_pb2 import DataType
from attnlens_export.graph.lint import axes_of
from attnlens_export.graph.names import (
    ATTENTION_PREFIX,
    GRAPH_IDS,
    GRAPH_PURPOSES,
    HIDDEN_OUTPUT,
    input_names,
)
from attnlens_export.graph.read import external_files, read_structure
from attnlens_model import EncoderConfig

HALF_PATH = "onnx/model_fp16.onnx"
INT8_PATH = "onnx/model_int8.onnx"
# Graphs of the embeddings that a bundle may have beside those.
MORE_PRECISIONS = {HALF_PATH: Precision.PRECISION_FP16, INT8_PATH: Precision.PRECISION_INT8}
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
    return [_describe_graph(directory, path, purpose) for path, purpose in graph_purposes(directory).items()]


def graph_purposes(directory: Path) -> dict[str, GraphPurpose.ValueType]:
    """Return the graphs of a bundle by path: both in fp32, then those in fp16 and int8 that are there."""
    more = (path for path in MORE_PRECISIONS if (directory / path).is_file())
    return GRAPH_PURPOSES | dict.fromkeys(more, GraphPurpose.GRAPH_PURPOSE_EMBEDDINGS)


def precision_of(path: str) -> Precision.ValueType:
    """Return what the graph with this path computes in."""
    return MORE_PRECISIONS.get(path, Precision.PRECISION_FP32)


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
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        type_vocab_size=config.type_vocab_size if "token_type_ids" in input_names(config) else 0,
        max_position_embeddings=config.max_tokens,
        pad_token_id=config.pad_token_id,
        is_causal=config.is_causal,
        layers=[_describe_layer(config, layer) for layer in range(config.num_layers)],
    )


def _describe_layer(config: EncoderConfig, layer: int) -> LayerInfo:
    is_disentangled = config.disentangled_attention != "none"
    return LayerInfo(
        attention="disentangled" if is_disentangled else "softmax",
        num_heads=config.num_heads,
        num_key_value_heads=config.num_key_value_heads or config.num_heads,
        head_size=config.head_dim,
        window=(config.local_window or 0) if config.is_local(layer) else 0,
    )


def _describe_graph(directory: Path, path: str, purpose: GraphPurpose.ValueType) -> Graph:
    model = read_structure(directory / path)
    data_files = (file.relative_to(directory).as_posix() for file in external_files(directory / path))
    return Graph(
        id=GRAPH_IDS[path],
        path=path,
        data_files=sorted(set(data_files) - {path}),
        purpose=purpose,
        precision=precision_of(path),
        opset=model.opset_import[0].version,
        ir_version=model.ir_version,
        inputs=[_describe_value(value) for value in model.graph.input],
        outputs=[_describe_output(value) for value in model.graph.output],
    )


def _describe_output(value: onnx.ValueInfoProto) -> GraphOutput:
    if value.name == HIDDEN_OUTPUT:
        return GraphOutput(
            value=_describe_value(value),
            role=OutputRole.OUTPUT_ROLE_LAST_HIDDEN_STATE,
            layout=OutputLayout.OUTPUT_LAYOUT_PER_TOKEN,
        )
    return GraphOutput(
        value=_describe_value(value),
        role=OutputRole.OUTPUT_ROLE_ATTENTION_WEIGHTS,
        layer=int(value.name.removeprefix(ATTENTION_PREFIX)),
        layout=OutputLayout.OUTPUT_LAYOUT_DENSE,
        num_heads=value.type.tensor_type.shape.dim[1].dim_value,
        row_sum=RowSum.ROW_SUM_ONE,
    )


def _describe_value(value: onnx.ValueInfoProto) -> ValueInfo:
    data_type = _DATA_TYPES[value.type.tensor_type.elem_type]
    return ValueInfo(name=value.name, data_type=data_type, axes=[str(axis) for axis in axes_of(value)])
