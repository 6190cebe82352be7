"""What the graphs of a bundle, their inputs, outputs and axes are called. H heads, T tokens."""

from pathlib import Path

from attnlens.v1 import manifest_pb2
from attnlens.v1.manifest_pb2 import GraphPurpose
from attnlens_export.errors import GraphError
from attnlens_model import ATTENTION_WEIGHTS, AttentionOutput, EncoderConfig, OutputRole

EMBEDDINGS_PATH = "onnx/model.onnx"
ATTENTIONS_PATH = "onnx/model_attentions.onnx"
DATA_PATH = "onnx/model.onnx_data"
# The graphs in fp32, which every bundle has, with what each is there for.
GRAPH_PURPOSES = {
    EMBEDDINGS_PATH: GraphPurpose.GRAPH_PURPOSE_EMBEDDINGS,
    ATTENTIONS_PATH: GraphPurpose.GRAPH_PURPOSE_ATTENTION,
}

BATCH_AXIS = "batch_size"
LENGTH_AXIS = "sequence_length"
HIDDEN_OUTPUT = "last_hidden_state"
ATTENTION_PREFIX = "attentions."


def graph_id(path: str) -> str:
    """Return what the manifest calls a graph: `embeddings`, `attention`, `embeddings.fp16`."""
    if path == ATTENTIONS_PATH:
        return "attention"
    precision = Path(path).stem.removeprefix(Path(EMBEDDINGS_PATH).stem).removeprefix("_")
    return f"embeddings.{precision}" if precision else "embeddings"


def input_names(config: EncoderConfig) -> list[str]:
    """Return the graph's inputs in order; `token_type_ids` only where there is more than one type."""
    names = ["input_ids", "attention_mask"]
    return [*names, "token_type_ids"] if config.embeddings.type_vocab_size > 1 else names


def output_names(config: EncoderConfig) -> list[str]:
    """Return the outputs of the attention graph in order."""
    return [HIDDEN_OUTPUT, *layer_outputs(config)]


def output_name(role: OutputRole, layer: int) -> str:
    """Return what a graph calls an output of a layer: `attentions.3`; for other roles `<role>.3`."""
    return f"{ATTENTION_PREFIX}{layer}" if role == ATTENTION_WEIGHTS else f"{role}.{layer}"


def layer_outputs(config: EncoderConfig) -> dict[str, tuple[int, AttentionOutput]]:
    """Return the outputs of the attention graph that belong to a layer: name -> layer, what it is."""
    return {
        output_name(output.role, layer): (layer, output)
        for layer in range(config.num_layers)
        for output in config.layer_outputs(layer)
    }


def output_axes(output: AttentionOutput) -> tuple[int | str, ...]:
    """Return the axes of an output that belongs to a layer: a length where it is fixed, else a name."""
    match output.layout:
        case "per_token":
            return BATCH_AXIS, LENGTH_AXIS, output.num_heads
        case "dense":
            return BATCH_AXIS, output.num_heads, LENGTH_AXIS, LENGTH_AXIS
    if output.pattern is None:
        raise GraphError(f"the role {output.role} is laid out as {output.layout}, without a pattern")
    return BATCH_AXIS, output.num_heads, LENGTH_AXIS, output.pattern.width


def role_number(role: str) -> manifest_pb2.OutputRole.ValueType:
    """Return what the manifest calls a role.

    Raises:
        GraphError: it has no name for it; a new role is a value of `attnlens.v1.OutputRole`.
    """
    name = f"OUTPUT_ROLE_{role.upper()}"
    if name not in manifest_pb2.OutputRole.DESCRIPTOR.values_by_name:
        raise GraphError(f"the role {role} has no value {name} in attnlens.v1.OutputRole: add one")
    return manifest_pb2.OutputRole.Value(name)


def role_name(number: manifest_pb2.OutputRole.ValueType) -> str:
    """Return the role that the manifest calls `number`."""
    return manifest_pb2.OutputRole.Name(number).removeprefix("OUTPUT_ROLE_").lower()
