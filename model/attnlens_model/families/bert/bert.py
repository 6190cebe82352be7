"""BERT and what shares its checkpoint layout: MiniLM, E5, BGE, GTE (v1), Snowflake Arctic, Splinter.

Devlin et al. 2018, https://arxiv.org/abs/1810.04805. Names as in `transformers` (`BertConfig`,
`BertModel.state_dict()`) and, for the legacy ones, in checkpoints converted from the original TensorFlow
release. Later families that kept BERT's layout import these tables.
"""

from collections.abc import Mapping

from attnlens_model.families.buffers import holds_indices, holds_zeros
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.family import Buffer, Family, Parameters, linear_and_norm_names

KEYS: Mapping[str, tuple[str, object]] = {
    "embeddings.vocab_size": ("vocab_size", None),
    "hidden_size": ("hidden_size", None),
    "num_layers": ("num_hidden_layers", None),
    "attention.num_heads": ("num_attention_heads", None),
    "feed_forward.intermediate_size": ("intermediate_size", None),
    "positions.max_position_embeddings": ("max_position_embeddings", None),
    "embeddings.type_vocab_size": ("type_vocab_size", 2),
    "norm.eps": ("layer_norm_eps", 1e-12),
    "is_causal": ("is_decoder", False),
    "hidden_dropout": ("hidden_dropout_prob", 0.1),
    "attention.dropout": ("attention_probs_dropout_prob", 0.1),
}

REQUIRED_VALUES: Mapping[str, tuple[object, ...]] = {
    "position_embedding_type": ("absolute", None),
    "add_cross_attention": (False, None),
    "pruned_heads": ({}, None),
}

TABLE_WEIGHTS: Mapping[Parameters, str] = {
    "embeddings.token.weight": "embeddings.word_embeddings.weight",
    "embeddings.position.weight": "embeddings.position_embeddings.weight",
    "embeddings.token_type.weight": "embeddings.token_type_embeddings.weight",
}

PROJECTION_WEIGHTS: Mapping[Parameters, str] = linear_and_norm_names(
    {
        "layers.{layer}.attention.query": "encoder.layer.{layer}.attention.self.query",
        "layers.{layer}.attention.key": "encoder.layer.{layer}.attention.self.key",
        "layers.{layer}.attention.value": "encoder.layer.{layer}.attention.self.value",
        "layers.{layer}.attention.output": "encoder.layer.{layer}.attention.output.dense",
        "layers.{layer}.feed_forward.up": "encoder.layer.{layer}.intermediate.dense",
        "layers.{layer}.feed_forward.down": "encoder.layer.{layer}.output.dense",
    }
)

LAYER_WEIGHTS: Mapping[Parameters, str] = {
    **PROJECTION_WEIGHTS,
    **linear_and_norm_names(
        {
            "layers.{layer}.attention_norm": "encoder.layer.{layer}.attention.output.LayerNorm",
            "layers.{layer}.output_norm": "encoder.layer.{layer}.output.LayerNorm",
        }
    ),
}

WEIGHTS: Mapping[Parameters, str] = {
    **TABLE_WEIGHTS,
    **linear_and_norm_names({"embeddings.norm": "embeddings.LayerNorm"}),
    **LAYER_WEIGHTS,
}

ANCHOR = "embeddings.word_embeddings.weight"
BUFFERS: Mapping[str, Buffer] = {
    "embeddings.position_ids": holds_indices,
    "embeddings.token_type_ids": holds_zeros,
}
LEGACY_SUFFIXES: Mapping[str, str] = {
    "LayerNorm.gamma": "LayerNorm.weight",
    "LayerNorm.beta": "LayerNorm.bias",
}

_CONFIG = ConfigTable(keys=KEYS, required_values=REQUIRED_VALUES)

FAMILY = Family(
    name="bert",
    model_types=("bert", "splinter"),
    architecture="BertModel",
    read_config=_CONFIG.read,
    write_config=_CONFIG.write,
    weights=WEIGHTS,
    prefixes=("", "bert.", "splinter.", "model.", "0.auto_model."),
    anchor=ANCHOR,
    roots=("embeddings.", "encoder."),
    buffers=BUFFERS,
    legacy_suffixes=LEGACY_SUFFIXES,
)
