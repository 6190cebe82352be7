"""Names of graphs and of their inputs, outputs and axes.

B batch, T tokens, D hidden size, E embedding size.
"""

from pathlib import Path

from attnlens.v1 import manifest_pb2
from attnlens_export.errors import GraphError
from attnlens_model import ATTENTION_WEIGHTS, AttentionOutput, EncoderConfig, OutputRole

MODEL_PATH = "onnx/model.onnx"
"""The graph that other tools open: token vectors, or the logits of a classifier."""
EMBEDDINGS_PATH = MODEL_PATH
# The token vectors of a classifier.
ENCODER_PATH = "onnx/model_encoder.onnx"
ATTENTIONS_PATH = "onnx/model_attentions.onnx"
CONTRIBUTIONS_PATH = "onnx/model_contributions.onnx"
DATA_PATH = "onnx/model.onnx_data"

INPUT_IDS = "input_ids"
ATTENTION_MASK = "attention_mask"
BATCH_AXIS = "batch_size"
LENGTH_AXIS = "sequence_length"
HIDDEN_OUTPUT = "last_hidden_state"
LOGITS_OUTPUT = "logits"
ATTENTION_PREFIX = "attentions."
# Input of the first layer, (B, T, D).
EMBEDDED = "embedded"

# Additional inputs of the contributions graph, then its outputs.
POOLING_WEIGHTS = "pooling_weights"
TAKES_MAXIMUM = "takes_maximum"
DIRECTION = "direction"
TOWARDS_ITSELF = "towards_itself"
NUM_DIMENSIONS = "num_dimensions"
HEAD_GATES = "head_gates"
EMBEDDING_OUTPUT = "embedding"
TOKEN_CONTRIBUTIONS = "token_contributions"  # noqa: S105 - no secret
BASELINE = "baseline"
HEAD_CONTRIBUTIONS = "head_contributions"


def graph_id(path: str) -> str:
    """Return the ID of a graph in the manifest, such as `embeddings`, `attention` or `embeddings.fp16`."""
    named = {ATTENTIONS_PATH: "attention", CONTRIBUTIONS_PATH: "contributions", ENCODER_PATH: "encoder"}
    if path in named:
        return named[path]
    precision = Path(path).stem.removeprefix(Path(EMBEDDINGS_PATH).stem).removeprefix("_")
    return f"embeddings.{precision}" if precision else "embeddings"


def embeddings_path(directory: Path) -> str:
    """Return the path of a bundle's graph of token vectors."""
    return ENCODER_PATH if (directory / ENCODER_PATH).is_file() else EMBEDDINGS_PATH


def input_names(config: EncoderConfig) -> list[str]:
    """Return the inputs of a graph in order. Encoders with one token type have no `token_type_ids`."""
    names = [INPUT_IDS, ATTENTION_MASK]
    return [*names, "token_type_ids"] if config.embeddings.type_vocab_size > 1 else names


def contribution_inputs(config: EncoderConfig, embedding_size: int) -> dict[str, tuple[int | str, ...]]:
    """Return the inputs of the contributions graph in order, with their axes."""
    layers = [attention.num_heads for attention in config.layer_attentions]
    return {
        **dict.fromkeys(input_names(config), (BATCH_AXIS, LENGTH_AXIS)),
        POOLING_WEIGHTS: (BATCH_AXIS, LENGTH_AXIS),
        TAKES_MAXIMUM: (BATCH_AXIS,),
        DIRECTION: (BATCH_AXIS, embedding_size),
        TOWARDS_ITSELF: (BATCH_AXIS,),
        NUM_DIMENSIONS: (BATCH_AXIS,),
        HEAD_GATES: (BATCH_AXIS, len(layers), max(layers)),
    }


def contribution_outputs(config: EncoderConfig, embedding_size: int) -> dict[str, tuple[int | str, ...]]:
    """Return the outputs of the contributions graph in order, with their axes."""
    return {
        EMBEDDING_OUTPUT: (BATCH_AXIS, embedding_size),
        TOKEN_CONTRIBUTIONS: (BATCH_AXIS, LENGTH_AXIS),
        BASELINE: (BATCH_AXIS,),
        HEAD_CONTRIBUTIONS: contribution_inputs(config, embedding_size)[HEAD_GATES],
    }


def output_names(config: EncoderConfig) -> list[str]:
    """Return the outputs of the attention graph in order."""
    return [HIDDEN_OUTPUT, *layer_outputs(config)]


def output_name(role: OutputRole, layer: int) -> str:
    """Return the name of an output of a layer, such as `attentions.3` or, for other roles, `<role>.3`."""
    return f"{ATTENTION_PREFIX}{layer}" if role == ATTENTION_WEIGHTS else f"{role}.{layer}"


def inner_name(output: str) -> str:
    """Return the name of an inner value that is an output of another graph. It contains no dot."""
    return output.replace(".", "_")


def layer_outputs(config: EncoderConfig) -> dict[str, tuple[int, AttentionOutput]]:
    """Return layer index and description of each output of the attention graph that belongs to a layer."""
    return {
        output_name(output.role, layer): (layer, output)
        for layer in range(config.num_layers)
        for output in config.layer_outputs(layer)
    }


def output_axes(output: AttentionOutput) -> tuple[int | str, ...]:
    """Return the axes of an output of a layer: the length of a fixed axis, the name of a dynamic axis."""
    match output.layout:
        case "per_token":
            return BATCH_AXIS, LENGTH_AXIS, output.num_heads
        case "dense":
            return BATCH_AXIS, output.num_heads, LENGTH_AXIS, LENGTH_AXIS
    if output.pattern is None:
        raise GraphError(f"the role {output.role} has the layout {output.layout}, but no pattern")
    return BATCH_AXIS, output.num_heads, LENGTH_AXIS, output.pattern.width


def role_number(role: str) -> manifest_pb2.OutputRole.ValueType:
    """Return the protocol value of a role.

    Raises:
        GraphError: `attnlens.v1.OutputRole` has no value for the role.
    """
    name = f"OUTPUT_ROLE_{role.upper()}"
    if name not in manifest_pb2.OutputRole.DESCRIPTOR.values_by_name:
        raise GraphError(f"the role {role} has no value {name} in attnlens.v1.OutputRole: add one")
    return manifest_pb2.OutputRole.Value(name)


def role_name(number: manifest_pb2.OutputRole.ValueType) -> str:
    """Return the role of a protocol value."""
    return manifest_pb2.OutputRole.Name(number).removeprefix("OUTPUT_ROLE_").lower()
