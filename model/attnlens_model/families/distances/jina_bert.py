"""Jina embeddings v2: BERT with ALiBi and, in most models, a gated feed-forward network.

Günther et al. 2023, https://arxiv.org/abs/2310.19923. The checkpoints were published with custom code and the
model type "bert". There are two versions of the code. The version of jina-embeddings-v2-base-code also
normalizes queries and keys, and adds and normalizes the attention residual twice. Configurations of the two
versions differ only in the name of the repository that contains the code.
"""

from collections.abc import Mapping
from dataclasses import replace

from attnlens_model.errors import ConfigError
from attnlens_model.families.bert import bert
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.family import COMMON_PREFIXES, Layout, Parameters, linear_and_norm_names

_NORMALISING_CODE = "jina-bert-v2-qk-post-norm"
_FEED_FORWARDS: Mapping[str, dict[str, object]] = {
    "original": {"feed_forward.kind": "plain"},
    "geglu": {"feed_forward.kind": "gated", "feed_forward.activation": "gelu", "feed_forward.up_bias": False},
    "reglu": {"feed_forward.kind": "gated", "feed_forward.activation": "relu", "feed_forward.up_bias": False},
}
_GATED_TYPES = {"gelu": "geglu", "relu": "reglu"}

_CONFIG = ConfigTable(
    keys=bert.ENCODER_KEYS,
    implied={"positions.scheme": "none", "attention.alibi": True},
    required_values={
        **bert.REQUIRED_VALUES,
        "position_embedding_type": ("alibi",),
        "is_decoder": (False, None),
    },
)


def _is_jina(content: Mapping[str, object]) -> bool:
    classes = content.get("architectures")
    names = [str(name) for name in classes] if isinstance(classes, list) else []
    return content.get("position_embedding_type") == "alibi" or any("JinaBert" in name for name in names)


def _is_normalising(content: Mapping[str, object]) -> bool:
    code = content.get("auto_map")
    names = [content.get("_name_or_path"), *(code.values() if isinstance(code, Mapping) else ())]
    return any(_NORMALISING_CODE in str(name) for name in names)


def _read_config(content: Mapping[str, object]) -> dict[str, object]:
    kind, is_normalising = content.get("feed_forward_type", "original"), _is_normalising(content)
    if kind not in _FEED_FORWARDS:
        raise ConfigError(
            f"feed_forward_type={kind!r} is not supported: choose one of {', '.join(_FEED_FORWARDS)}"
        )
    fields = _CONFIG.read(content) | _FEED_FORWARDS[str(kind)]
    if is_normalising:
        fields |= {
            "feed_forward.up_bias": False,
            "attention.projection_norm": True,
            "norm.placement": "post_twice",
        }
    return fields


def _write_config(fields: Mapping[str, object]) -> dict[str, object]:
    is_gated = fields["feed_forward.kind"] == "gated"
    is_normalising = fields.get("attention.projection_norm")
    activation = str(fields["feed_forward.activation"])
    return _CONFIG.write(fields) | {
        "feed_forward_type": _GATED_TYPES.get(activation, activation) if is_gated else "original",
        **({"_name_or_path": f"jinaai/{_NORMALISING_CODE}"} if is_normalising else {}),
    }


_COMMON: Mapping[Parameters, str] = {
    **bert.TOKEN_WEIGHTS,
    **bert.EMBEDDINGS_NORM,
    **bert.ATTENTION_WEIGHTS,
    **bert.ATTENTION_OUTPUT,
    **bert.ATTENTION_NORM,
}
_ROOTS = bert.FAMILY.roots

_PLAIN_LAYOUT = Layout(
    weights={**_COMMON, **bert.FEED_FORWARD_WEIGHTS, **bert.OUTPUT_NORM},
    anchor="encoder.layer.0.intermediate.dense.weight",
    roots=_ROOTS,
)

_SELF = "encoder.layer.{layer}.attention.self"
_NORMALISING: Mapping[Parameters, str] = {
    **_COMMON,
    **linear_and_norm_names(
        {
            "layers.{layer}.attention.query_projection_norm": f"{_SELF}.layer_norm_q",
            "layers.{layer}.attention.key_projection_norm": f"{_SELF}.layer_norm_k",
            "layers.{layer}.second_attention_norm": "encoder.layer.{layer}.layer_norm_1",
            "layers.{layer}.feed_forward.down": "encoder.layer.{layer}.mlp.down_layer",
            "layers.{layer}.output_norm": "encoder.layer.{layer}.layer_norm_2",
        }
    ),
}
_NORMALISING_GATED_LAYOUT = Layout(
    weights={
        **_NORMALISING,
        # The activation is applied to the second half.
        (
            "layers.{layer}.feed_forward.up.weight",
            "layers.{layer}.feed_forward.gate.weight",
        ): "encoder.layer.{layer}.mlp.up_gated_layer.weight",
    },
    anchor="encoder.layer.0.mlp.up_gated_layer.weight",
    roots=_ROOTS,
)
_NORMALISING_PLAIN_LAYOUT = Layout(
    weights={
        **_NORMALISING,
        "layers.{layer}.feed_forward.up.weight": "encoder.layer.{layer}.mlp.up_layer.weight",
    },
    anchor="encoder.layer.0.mlp.up_layer.weight",
    roots=_ROOTS,
)

FAMILY = replace(
    bert.FAMILY,
    name="jina_bert",
    model_types=("bert",),
    architecture="JinaBertModel",
    read_config=_read_config,
    write_config=_write_config,
    weights={
        **_COMMON,
        # The activation is applied to the first half.
        (
            "layers.{layer}.feed_forward.gate.weight",
            "layers.{layer}.feed_forward.up.weight",
        ): "encoder.layer.{layer}.mlp.gated_layers.weight",
        **linear_and_norm_names(
            {
                "layers.{layer}.feed_forward.down": "encoder.layer.{layer}.mlp.wo",
                "layers.{layer}.output_norm": "encoder.layer.{layer}.mlp.layernorm",
            }
        ),
    },
    prefixes=("bert.", *COMMON_PREFIXES),
    anchor="encoder.layer.0.mlp.gated_layers.weight",
    other_layouts=(_PLAIN_LAYOUT, _NORMALISING_GATED_LAYOUT, _NORMALISING_PLAIN_LAYOUT),
    claims=_is_jina,
    legacy_suffixes={},
)
