"""What the graphs of a bundle, their inputs, outputs and axes are called. H heads, T tokens."""

from attnlens.v1.manifest_pb2 import GraphKind
from attnlens_model import ATTENTION_WEIGHTS, EncoderConfig, OutputRole

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
    return [*names, "token_type_ids"] if config.embeddings.type_vocab_size > 1 else names


def output_names(config: EncoderConfig) -> list[str]:
    """Return the outputs of the attention graph in order."""
    layers = range(config.num_layers)
    return [HIDDEN_OUTPUT, *(output_name(out.role, n) for n in layers for out in config.layer_outputs(n))]


def output_name(role: OutputRole, layer: int) -> str:
    """Return what a graph calls an output of a layer: `attentions.3`; for other roles `<role>.3`."""
    return f"{ATTENTION_PREFIX}{layer}" if role == ATTENTION_WEIGHTS else f"{role}.{layer}"
