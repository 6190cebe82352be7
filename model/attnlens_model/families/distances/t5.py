"""The encoder of T5, mT5 and derived models (Flan-T5, ByT5, sentence-T5, GTR).

Raffel et al. 2019, https://arxiv.org/abs/1910.10683; Xue et al. 2020, https://arxiv.org/abs/2010.11934.
Pre-RMSNorm, no biases, unscaled scores, an independent head size, and a learned relative bias instead of
position embeddings, stored in block 0 and shared by all blocks.
"""

from collections.abc import Mapping
from typing import Any

from attnlens_model.errors import ConfigError
from attnlens_model.families.config_json.table import WRITTEN_ACTIVATIONS, ConfigTable, unusual_head_size
from attnlens_model.family import Family, Layout, Parameters

_DEFAULT_HEAD_SIZE = 64
_DEFAULT_FEED_FORWARD = {"t5": "relu", "mt5": "gated-gelu", "umt5": "gated-gelu"}
_GATED = "gated-"
# Alternative keys. transformers reads either; these take precedence if a file has both.
_ALIASES = {
    "num_layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "num_heads": "num_attention_heads",
    "d_kv": "head_dim",
}

_CONFIG = ConfigTable(
    keys={
        "embeddings.vocab_size": ("vocab_size", None),
        "hidden_size": ("d_model", None),
        "num_layers": ("num_layers", None),
        "attention.num_heads": ("num_heads", None),
        "feed_forward.intermediate_size": ("d_ff", None),
        # The encoder has no length limit. This is the training length.
        "positions.max_position_embeddings": ("n_positions", 512),
        "norm.eps": ("layer_norm_epsilon", 1e-6),
        "hidden_dropout": ("dropout_rate", 0.1),
        "attention.dropout": ("dropout_rate", 0.1),
        "attention.relative_bias.num_buckets": ("relative_attention_num_buckets", 32),
        "attention.relative_bias.max_distance": ("relative_attention_max_distance", 128),
    },
    activation=("dense_act_fn", "relu"),
    implied={
        "embeddings.type_vocab_size": 0,
        "positions.scheme": "none",
        "norm.kind": "rms",
        "norm.bias": False,
        "norm.placement": "pre",
        "embeddings.norm": False,
        "attention.bias": False,
        "feed_forward.up_bias": False,
        "feed_forward.down_bias": False,
        "attention.scale": 1.0,
    },
    required_values={"is_decoder": (False, None)},
)


def read_config(content: Mapping[str, object]) -> dict[str, object]:
    """Return the `EncoderConfig` values, by path, of a T5, mT5 or umT5 `config.json`.

    Raises:
        ConfigError: See `ConfigTable.read`, or two keys contradict each other.
    """
    _check_aliases(content)
    name = str(content.get("feed_forward_proj", _DEFAULT_FEED_FORWARD[str(content["model_type"])]))
    activation = name.removeprefix(_GATED)
    if name == "gated-gelu":
        # T5 v1.1 was trained with the tanh approximation.
        activation = "gelu_new"
    # transformers also writes dense_act_fn and is_gated_act, which take precedence over feed_forward_proj.
    fields = _CONFIG.read({"dense_act_fn": activation, **content})
    is_gated = content.get("is_gated_act", name.startswith(_GATED))
    return fields | {
        "feed_forward.kind": "gated" if is_gated else "plain",
        "attention.head_size": unusual_head_size(content.get("d_kv", _DEFAULT_HEAD_SIZE), fields),
    }


def _check_aliases(content: Mapping[str, object]) -> None:
    """Reject a file in which a key and its alias have different values.

    Raises:
        ConfigError: The values differ.
    """
    stated = {"d_kv": _DEFAULT_HEAD_SIZE, **content}
    for key, alias in _ALIASES.items():
        if key in stated and alias in content and stated[key] != content[alias]:
            raise ConfigError(
                f"{key}={stated[key]!r} contradicts {alias}={content[alias]!r}: keep the value used in "
                "training in config.json and remove the other"
            )


def _write_config(fields: Mapping[str, Any]) -> dict[str, object]:
    """Return the content of a `config.json`; the inverse of `read_config`."""
    content = _CONFIG.write(fields)
    del content["dense_act_fn"]
    activation = WRITTEN_ACTIVATIONS[fields["feed_forward.activation"]]
    if fields["feed_forward.kind"] == "gated":
        activation = _GATED + ("gelu_python" if activation == "gelu" else activation)
    head_size = fields.get("attention.head_size") or fields["hidden_size"] // fields["attention.num_heads"]
    return content | {"feed_forward_proj": activation, "d_kv": head_size}


_BLOCK = "encoder.block.{layer}.layer"
SHARED_BIAS = "shared.0.relative_bias.bias.weight"


_WEIGHTS: Mapping[Parameters, str] = {
    "embeddings.token.weight": "shared.weight",
    SHARED_BIAS: "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    "layers.{layer}.attention.query.weight": f"{_BLOCK}.0.SelfAttention.q.weight",
    "layers.{layer}.attention.key.weight": f"{_BLOCK}.0.SelfAttention.k.weight",
    "layers.{layer}.attention.value.weight": f"{_BLOCK}.0.SelfAttention.v.weight",
    "layers.{layer}.attention.output.weight": f"{_BLOCK}.0.SelfAttention.o.weight",
    "layers.{layer}.attention_norm.weight": f"{_BLOCK}.0.layer_norm.weight",
    "layers.{layer}.feed_forward.down.weight": f"{_BLOCK}.1.DenseReluDense.wo.weight",
    "layers.{layer}.output_norm.weight": f"{_BLOCK}.1.layer_norm.weight",
    "final_norm.weight": "encoder.final_layer_norm.weight",
}
_ROOTS = ("shared.", "encoder.")

_GATED_LAYOUT = Layout(
    weights={
        **_WEIGHTS,
        "layers.{layer}.feed_forward.gate.weight": f"{_BLOCK}.1.DenseReluDense.wi_0.weight",
        "layers.{layer}.feed_forward.up.weight": f"{_BLOCK}.1.DenseReluDense.wi_1.weight",
    },
    anchor="encoder.block.0.layer.1.DenseReluDense.wi_0.weight",
    roots=_ROOTS,
)

FAMILY = Family(
    name="t5",
    model_types=("t5", "mt5"),
    architecture="T5EncoderModel",
    read_config=read_config,
    write_config=_write_config,
    weights={
        **_WEIGHTS,
        "layers.{layer}.feed_forward.up.weight": f"{_BLOCK}.1.DenseReluDense.wi.weight",
    },
    prefixes=("", "transformer.", "0.auto_model."),
    anchor="encoder.block.0.layer.1.DenseReluDense.wi.weight",
    roots=_ROOTS,
    other_layouts=(_GATED_LAYOUT,),
    # Older files store the embeddings twice, for the encoder and for the decoder.
    legacy_suffixes={"encoder.embed_tokens.weight": "shared.weight"},
)
