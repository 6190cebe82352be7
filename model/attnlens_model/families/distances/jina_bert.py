"""Jina embeddings v2: BERT with linear biases by distance for positions and, mostly, a gated feed-forward.

Günther et al. 2023, https://arxiv.org/abs/2310.19923. The checkpoints say that their model type is "bert" and
were published with code of their own, of which there are two kinds. That of jina-embeddings-v2-base-code also
normalises queries and keys, and adds and normalises attention's residual twice; a configuration tells the
two apart by nothing but the name of the repository that holds the code.
"""

from collections.abc import Mapping

from attnlens_model.errors import ConfigError
from attnlens_model.families.bert import bert
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.family import Family, Layout, Parameters, linear_and_norm_names

_NORMALISING_CODE = "jina-bert-v2-qk-post-norm"
_FEED_FORWARDS: Mapping[str, dict[str, object]] = {
    "original": {"feed_forward.kind": "plain"},
    "geglu": {"feed_forward.kind": "gated", "feed_forward.activation": "gelu", "feed_forward.up_bias": False},
    "reglu": {"feed_forward.kind": "gated", "feed_forward.activation": "relu", "feed_forward.up_bias": False},
}
_GATED_TYPES = {"gelu": "geglu", "relu": "reglu"}

_CONFIG = ConfigTable(
    keys=bert.KEYS,
    implied={"positions.scheme": "none", "attention.alibi": True},
    required_values={**bert.REQUIRED_VALUES, "position_embedding_type": ("alibi",)},
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
            f"feed_forward_type={kind!r} is not supported: this version knows {', '.join(_FEED_FORWARDS)}"
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
    "embeddings.token.weight": "embeddings.word_embeddings.weight",
    "embeddings.token_type.weight": "embeddings.token_type_embeddings.weight",
    **linear_and_norm_names(
        {
            "embeddings.norm": "embeddings.LayerNorm",
            "layers.{layer}.attention.query": "encoder.layer.{layer}.attention.self.query",
            "layers.{layer}.attention.key": "encoder.layer.{layer}.attention.self.key",
            "layers.{layer}.attention.value": "encoder.layer.{layer}.attention.self.value",
            "layers.{layer}.attention.output": "encoder.layer.{layer}.attention.output.dense",
            "layers.{layer}.attention_norm": "encoder.layer.{layer}.attention.output.LayerNorm",
        }
    ),
}
_ROOTS = ("embeddings.", "encoder.")

_PLAIN_LAYOUT = Layout(
    weights={
        **_COMMON,
        **linear_and_norm_names(
            {
                "layers.{layer}.feed_forward.up": "encoder.layer.{layer}.intermediate.dense",
                "layers.{layer}.feed_forward.down": "encoder.layer.{layer}.output.dense",
                "layers.{layer}.output_norm": "encoder.layer.{layer}.output.LayerNorm",
            }
        ),
    },
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
        # Here the second half goes through the activation.
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

FAMILY = Family(
    name="jina_bert",
    model_types=("bert",),
    architecture="JinaBertModel",
    read_config=_read_config,
    write_config=_write_config,
    weights={
        **_COMMON,
        # The first half goes through the activation.
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
    prefixes=("", "bert.", "model.", "0.auto_model."),
    anchor="encoder.layer.0.mlp.gated_layers.weight",
    roots=_ROOTS,
    other_layouts=(_PLAIN_LAYOUT, _NORMALISING_GATED_LAYOUT, _NORMALISING_PLAIN_LAYOUT),
    buffers=bert.BUFFERS,
    claims=_is_jina,
)
