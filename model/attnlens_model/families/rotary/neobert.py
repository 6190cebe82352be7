"""NeoBERT: pre-RMSNorm, no biases, gated SiLU, RoPE on pairs of adjacent components.

Le Breton et al. 2025, https://arxiv.org/abs/2502.19587. transformers has no such class; the checkpoint comes
with custom code. Query, key and value are fused within each head. The feed-forward size is two thirds of
`intermediate_size`, rounded up to a multiple of 8. Theta is always 10,000.
"""

from collections.abc import Mapping

from attnlens_model.errors import ConfigError
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.families.row_orders import rotated_parts_within_heads
from attnlens_model.family import COMMON_PREFIXES, QUERY_KEY_VALUE, Family, linear_and_norm_names

_STEP = 8
_LAYER = "transformer_encoder.{layer}"

_CONFIG = ConfigTable(
    keys={
        "embeddings.vocab_size": ("vocab_size", None),
        "hidden_size": ("hidden_size", None),
        "num_layers": ("num_hidden_layers", None),
        "attention.num_heads": ("num_attention_heads", None),
        "feed_forward.intermediate_size": ("intermediate_size", None),
        "positions.max_position_embeddings": ("max_length", 1024),
        "norm.eps": ("norm_eps", 1e-6),
    },
    activation=("hidden_act", "silu"),
    implied={
        "embeddings.type_vocab_size": 0,
        "embeddings.norm": False,
        "positions.scheme": "none",
        "norm.kind": "rms",
        "norm.bias": False,
        "norm.placement": "pre",
        "feed_forward.kind": "gated",
        "feed_forward.up_bias": False,
        "feed_forward.down_bias": False,
        "hidden_dropout": 0.0,
        "attention.bias": False,
        "attention.rotary.theta": 10_000.0,
        "attention.rotary.divisor": 1.0,
        "attention.dropout": 0.0,
    },
    # Keys written by third-party training code, with the values of the published encoder.
    required_values={"rope": (True, None), "rms_norm": (True, None), "ngpt": (False, None)},
)


def _read_config(content: Mapping[str, object]) -> dict[str, object]:
    activation = content.get("hidden_act", "swiglu")
    if str(activation).lower() not in ("swiglu", "silu"):
        raise ConfigError(f"hidden_act={activation!r} is not supported: only 'swiglu' is")
    fields = _CONFIG.read({**content, "hidden_act": "silu"})
    stated = fields["feed_forward.intermediate_size"]
    if isinstance(stated, int):
        width = 2 * stated // 3
        fields["feed_forward.intermediate_size"] = -(-width // _STEP) * _STEP
    return fields


def _write_config(fields: Mapping[str, object]) -> dict[str, object]:
    width = fields["feed_forward.intermediate_size"]
    stated = width // 2 * 3 if isinstance(width, int) else width
    return _CONFIG.write({**fields, "feed_forward.intermediate_size": stated})


FAMILY = Family(
    name="neobert",
    model_types=("neobert",),
    architecture="NeoBERT",
    read_config=_read_config,
    write_config=_write_config,
    weights={
        "embeddings.token.weight": "encoder.weight",
        **linear_and_norm_names(
            {
                QUERY_KEY_VALUE: f"{_LAYER}.qkv",
                "layers.{layer}.attention.output": f"{_LAYER}.wo",
                "layers.{layer}.attention_norm": f"{_LAYER}.attention_norm",
                # The activation is applied to the first half.
                ("layers.{layer}.feed_forward.gate", "layers.{layer}.feed_forward.up"): f"{_LAYER}.ffn.w12",
                "layers.{layer}.feed_forward.down": f"{_LAYER}.ffn.w3",
                "layers.{layer}.output_norm": f"{_LAYER}.ffn_norm",
                "final_norm": "layer_norm",
            }
        ),
    },
    prefixes=COMMON_PREFIXES,
    anchor="transformer_encoder.0.qkv.weight",
    roots=("encoder.", "transformer_encoder.", "layer_norm."),
    row_orders={".qkv.weight": rotated_parts_within_heads},
)
