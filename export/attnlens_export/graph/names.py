"""What the graphs of a bundle, their inputs, outputs and axes are called. H heads, T tokens."""

from attnlens.v1.manifest_pb2 import GraphKind
from attnlens_model import EncoderConfig

EMBEDDINGS_PATH = "onnx/model.onnx"
ATTENTIONS_PATH = "onnx/model_attentions.onnx"
DATA_PATH = "onnx/model.onnx_data"
# The graphs in fp32, which every bundle has.
GRAPH_KINDS = {
    EMBEDDINGS_PATH: GraphKind.GRAPH_KIND_EMBEDDINGS,
    ATTENTIONS_PATH: GraphKind.GRAPH_KIND_ATTENTIONS,
}

BATCH_AXIS = "batch_size"
LENGTH_AXIS = "sequence_length"
HIDDEN_OUTPUT = "last_hidden_state"
ATTENTION_PREFIX = "attentions."
# All attention maps together, in reports.
ATTENTIONS = "attentions"


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
