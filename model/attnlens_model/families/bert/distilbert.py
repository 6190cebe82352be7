"""DistilBERT: half the layers of BERT, no token types, different tensor names.

Sanh et al. 2019, https://arxiv.org/abs/1910.01108. The LayerNorm epsilon is fixed at 1e-12.
"""

from dataclasses import replace

from attnlens_model.families.bert import bert
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.family import COMMON_PREFIXES, linear_and_norm_names

_CONFIG = ConfigTable(
    keys={
        "embeddings.vocab_size": ("vocab_size", None),
        "hidden_size": ("dim", None),
        "num_layers": ("n_layers", None),
        "attention.num_heads": ("n_heads", None),
        "feed_forward.intermediate_size": ("hidden_dim", None),
        "positions.max_position_embeddings": ("max_position_embeddings", 512),
        "hidden_dropout": ("dropout", 0.1),
        "attention.dropout": ("attention_dropout", 0.1),
    },
    activation=("activation", "gelu"),
    implied={"embeddings.type_vocab_size": 0, "norm.eps": 1e-12},
    required_values={"pruned_heads": ({}, None)},
)

FAMILY = replace(
    bert.FAMILY,
    name="distilbert",
    model_types=("distilbert",),
    architecture="DistilBertModel",
    read_config=_CONFIG.read,
    write_config=_CONFIG.write,
    weights={
        "embeddings.token.weight": "embeddings.word_embeddings.weight",
        "embeddings.position.weight": "embeddings.position_embeddings.weight",
        **linear_and_norm_names(
            {
                "embeddings.norm": "embeddings.LayerNorm",
                "layers.{layer}.attention.query": "transformer.layer.{layer}.attention.q_lin",
                "layers.{layer}.attention.key": "transformer.layer.{layer}.attention.k_lin",
                "layers.{layer}.attention.value": "transformer.layer.{layer}.attention.v_lin",
                "layers.{layer}.attention.output": "transformer.layer.{layer}.attention.out_lin",
                "layers.{layer}.attention_norm": "transformer.layer.{layer}.sa_layer_norm",
                "layers.{layer}.feed_forward.up": "transformer.layer.{layer}.ffn.lin1",
                "layers.{layer}.feed_forward.down": "transformer.layer.{layer}.ffn.lin2",
                "layers.{layer}.output_norm": "transformer.layer.{layer}.output_layer_norm",
            }
        ),
    },
    prefixes=("distilbert.", *COMMON_PREFIXES),
    roots=("embeddings.", "transformer."),
    legacy_suffixes={},
)
