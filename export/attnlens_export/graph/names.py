"""What the graphs of a bundle, their inputs, outputs and axes are called. H heads, T tokens."""

from attnlens.v1.manifest_pb2 import GraphPurpose, OutputRole
from attnlens_model import EncoderConfig

EMBEDDINGS_PATH = "onnx/model.onnx"
ATTENTIONS_PATH = "onnx/model_attentions.onnx"
DATA_PATH = "onnx/model.onnx_data"
# The graphs in fp32, which every bundle has.
GRAPH_PURPOSES = {
    EMBEDDINGS_PATH: GraphPurpose.GRAPH_PURPOSE_EMBEDDINGS,
    ATTENTIONS_PATH: GraphPurpose.GRAPH_PURPOSE_ATTENTION,
}
# What the manifest calls them.
GRAPH_IDS = {
    EMBEDDINGS_PATH: "embeddings",
    ATTENTIONS_PATH: "attention",
    "onnx/model_fp16.onnx": "embeddings.fp16",
    "onnx/model_int8.onnx": "embeddings.int8",
}

BATCH_AXIS = "batch_size"
LENGTH_AXIS = "sequence_length"
HIDDEN_OUTPUT = "last_hidden_state"
ATTENTION_PREFIX = "attentions."
# All attention maps together, in reports.
ATTENTIONS = "attentions"
ROLES = {
    HIDDEN_OUTPUT: OutputRole.OUTPUT_ROLE_LAST_HIDDEN_STATE,
    ATTENTIONS: OutputRole.OUTPUT_ROLE_ATTENTION_WEIGHTS,
}


def input_names(config: EncoderConfig) -> list[str]:
    """Return the graph's inputs in order; `token_type_ids` only where there is more than one type."""
    names = ["input_ids", "attention_mask"]
    return [*names, "token_type_ids"] if config.type_vocab_size > 1 else names


def output_names(config: EncoderConfig) -> list[str]:
    """Return the outputs of the attention graph in order."""
    return [HIDDEN_OUTPUT, *(map_name(layer) for layer in range(config.num_layers))]


def map_name(layer: int) -> str:
    """Return the output with the attention weights of a layer, (H, T, T) for each text."""
    return f"{ATTENTION_PREFIX}{layer}"
