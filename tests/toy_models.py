"""Fake models that consist only of their description."""

from typing import Any

from attnlens.pooling import Pooling
from attnlens_server.bundle import Graph, Layout, Model, ModelOutputs, Output, OutputRole

HIDDEN_STATE = Output("last_hidden_state", OutputRole.LAST_HIDDEN_STATE, Layout.PER_TOKEN, width=4)


def make_model(*outputs: Output, **changes: Any) -> Model:
    """Return a model whose layers have these outputs."""
    embeddings = Graph("embeddings.onnx", ("input_ids", "attention_mask"), (HIDDEN_STATE,))
    attention = Graph("attention.onnx", embeddings.inputs, (HIDDEN_STATE, *outputs))
    facts: dict[str, Any] = {
        "name": "toy",
        "version": "0" * 64,
        "max_tokens": 256,
        "max_positions": 512,
        "hidden_size": 4,
        "num_layers": 3,
        "token_flops": 1000,
        "vocab_size": 50,
        "type_vocab_size": 2,
        "pad_token_id": 1,
        "takes_pairs": True,
        "pooling": Pooling.MEAN,
        "normalize": False,
        "exclude_prompt": False,
        "max_dimensions": 4,
        "embedding_size": 4,
        "prompts": {},
        "default_prompt_name": "",
        "graphs": {"embeddings": embeddings, "attention": attention},
        "outputs": ModelOutputs(embeddings, attention),
    }
    return Model(**facts | changes)
