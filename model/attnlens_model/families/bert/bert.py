"""BERT and models with the same checkpoint layout: MiniLM, E5, BGE, GTE (v1), Snowflake Arctic, Splinter.

Devlin et al. 2018, https://arxiv.org/abs/1810.04805. Names follow `transformers` (`BertConfig`,
`BertModel.state_dict()`); legacy names occur in checkpoints converted from the original TensorFlow release.
Families that kept BERT's layout import these tables.
"""

from collections.abc import Mapping

from attnlens_model.errors import ConfigError
from attnlens_model.families.buffers import holds_indices, holds_zeros
from attnlens_model.families.config_json.table import ConfigTable, Keys
from attnlens_model.family import COMMON_PREFIXES, Family, Parameters, linear_and_norm_names

ENCODER_KEYS: Keys = {
    "embeddings.vocab_size": ("vocab_size", None),
    "hidden_size": ("hidden_size", None),
    "num_layers": ("num_hidden_layers", None),
    "attention.num_heads": ("num_attention_heads", None),
    "feed_forward.intermediate_size": ("intermediate_size", None),
    "positions.max_position_embeddings": ("max_position_embeddings", None),
    "embeddings.type_vocab_size": ("type_vocab_size", 2),
    "norm.eps": ("layer_norm_eps", 1e-12),
    "hidden_dropout": ("hidden_dropout_prob", 0.1),
    "attention.dropout": ("attention_probs_dropout_prob", 0.1),
}
KEYS: Keys = {**ENCODER_KEYS, "is_causal": ("is_decoder", False)}

REQUIRED_VALUES: Mapping[str, tuple[object, ...]] = {
    "position_embedding_type": ("absolute", None),
    "add_cross_attention": (False, None),
    "pruned_heads": ({}, None),
}

TOKEN_WEIGHTS: Mapping[Parameters, str] = {
    "embeddings.token.weight": "embeddings.word_embeddings.weight",
    "embeddings.token_type.weight": "embeddings.token_type_embeddings.weight",
}
TABLE_WEIGHTS: Mapping[Parameters, str] = {
    **TOKEN_WEIGHTS,
    "embeddings.position.weight": "embeddings.position_embeddings.weight",
}
EMBEDDINGS_NORM: Mapping[Parameters, str] = linear_and_norm_names({"embeddings.norm": "embeddings.LayerNorm"})

ATTENTION_WEIGHTS: Mapping[Parameters, str] = linear_and_norm_names(
    {
        "layers.{layer}.attention.query": "encoder.layer.{layer}.attention.self.query",
        "layers.{layer}.attention.key": "encoder.layer.{layer}.attention.self.key",
        "layers.{layer}.attention.value": "encoder.layer.{layer}.attention.self.value",
    }
)
ATTENTION_OUTPUT: Mapping[Parameters, str] = linear_and_norm_names(
    {"layers.{layer}.attention.output": "encoder.layer.{layer}.attention.output.dense"}
)
ATTENTION_NORM: Mapping[Parameters, str] = linear_and_norm_names(
    {"layers.{layer}.attention_norm": "encoder.layer.{layer}.attention.output.LayerNorm"}
)
FEED_FORWARD_WEIGHTS: Mapping[Parameters, str] = linear_and_norm_names(
    {
        "layers.{layer}.feed_forward.up": "encoder.layer.{layer}.intermediate.dense",
        "layers.{layer}.feed_forward.down": "encoder.layer.{layer}.output.dense",
    }
)
OUTPUT_NORM: Mapping[Parameters, str] = linear_and_norm_names(
    {"layers.{layer}.output_norm": "encoder.layer.{layer}.output.LayerNorm"}
)

# Without norms, whose names differ in pre-LN families.
PROJECTION_WEIGHTS: Mapping[Parameters, str] = {
    **ATTENTION_WEIGHTS,
    **ATTENTION_OUTPUT,
    **FEED_FORWARD_WEIGHTS,
}
WEIGHTS: Mapping[Parameters, str] = {
    **TABLE_WEIGHTS,
    **EMBEDDINGS_NORM,
    **PROJECTION_WEIGHTS,
    **ATTENTION_NORM,
    **OUTPUT_NORM,
}

_CONFIG = ConfigTable(keys=KEYS, required_values=REQUIRED_VALUES)


def _read_config(content: Mapping[str, object]) -> dict[str, object]:
    if content.get("model_type") == "splinter" and content.get("is_decoder"):
        raise ConfigError("is_decoder is set, which transformers ignores for splinter: remove it")
    return _CONFIG.read(content)


FAMILY = Family(
    name="bert",
    model_types=("bert", "splinter"),
    architecture="BertModel",
    read_config=_read_config,
    write_config=_CONFIG.write,
    weights=WEIGHTS,
    prefixes=("bert.", "splinter.", *COMMON_PREFIXES),
    anchor="embeddings.word_embeddings.weight",
    roots=("embeddings.", "encoder."),
    buffers={"embeddings.position_ids": holds_indices, "embeddings.token_type_ids": holds_zeros},
    legacy_suffixes={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
)
