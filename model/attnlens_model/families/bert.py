"""BERT and what shares its checkpoint layout: MiniLM, E5, BGE, GTE (v1), Snowflake Arctic.

Names as in `transformers` (`BertConfig`, `BertModel.state_dict()`) and, for the legacy ones, in checkpoints
converted from the original TensorFlow release.
"""

from collections.abc import Mapping

from attnlens_model.errors import ConfigError, nearest
from attnlens_model.family import Family

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}

# Our field -> (their key, what `BertConfig` takes when the key is absent; None: the file must say it).
_FIELDS: dict[str, tuple[str, object]] = {
    "vocab_size": ("vocab_size", None),
    "hidden_size": ("hidden_size", None),
    "num_layers": ("num_hidden_layers", None),
    "num_heads": ("num_attention_heads", None),
    "intermediate_size": ("intermediate_size", None),
    "max_position_embeddings": ("max_position_embeddings", None),
    "type_vocab_size": ("type_vocab_size", 2),
    "layer_norm_eps": ("layer_norm_eps", 1e-12),
    "is_causal": ("is_decoder", False),
    "hidden_dropout": ("hidden_dropout_prob", 0.1),
    "attention_dropout": ("attention_probs_dropout_prob", 0.1),
}

# Their key -> the only values that mean the encoder built here.
_REQUIRED_VALUES: dict[str, tuple[object, ...]] = {
    "position_embedding_type": ("absolute", None),
    "add_cross_attention": (False, None),
    "pruned_heads": ({}, None),
}


def _activation(config: Mapping[str, object]) -> str:
    name = str(config.get("hidden_act", "gelu"))
    if name not in _ACTIVATIONS:
        supported = ", ".join(_ACTIVATIONS)
        raise ConfigError(
            f"hidden_act={name!r} is not supported: this version knows {supported} "
            f"(nearest: {nearest(name, _ACTIVATIONS)!r})"
        )
    return _ACTIVATIONS[name]


def _config_fields(config: Mapping[str, object]) -> dict[str, object]:
    for key, accepted in _REQUIRED_VALUES.items():
        if config.get(key) not in accepted:
            raise ConfigError(f"{key}={config[key]!r} is not supported: only {accepted[0]!r} is")
    missing = [key for key, default in _FIELDS.values() if default is None and key not in config]
    if missing:
        raise ConfigError(
            f"config.json does not say {', '.join(missing)}: add what the model was trained with"
        )
    fields = {ours: config.get(theirs, default) for ours, (theirs, default) in _FIELDS.items()}
    pad_token_id = config.get("pad_token_id")
    return fields | {
        "activation": _activation(config),
        "pad_token_id": 0 if pad_token_id is None else pad_token_id,
    }


def _linear_and_norm_names(modules: Mapping[str, str]) -> dict[str, str]:
    return {
        f"{ours}.{kind}": f"{theirs}.{kind}"
        for ours, theirs in modules.items()
        for kind in ("weight", "bias")
    }


FAMILY = Family(
    name="bert",
    model_types=("bert",),
    config_fields=_config_fields,
    weights={
        "embeddings.token.weight": "embeddings.word_embeddings.weight",
        "embeddings.position.weight": "embeddings.position_embeddings.weight",
        "embeddings.token_type.weight": "embeddings.token_type_embeddings.weight",
    }
    | _linear_and_norm_names(
        {
            "embeddings.norm": "embeddings.LayerNorm",
            "layers.{layer}.attention.query": "encoder.layer.{layer}.attention.self.query",
            "layers.{layer}.attention.key": "encoder.layer.{layer}.attention.self.key",
            "layers.{layer}.attention.value": "encoder.layer.{layer}.attention.self.value",
            "layers.{layer}.attention.output": "encoder.layer.{layer}.attention.output.dense",
            "layers.{layer}.attention_norm": "encoder.layer.{layer}.attention.output.LayerNorm",
            "layers.{layer}.feed_forward.up": "encoder.layer.{layer}.intermediate.dense",
            "layers.{layer}.feed_forward.down": "encoder.layer.{layer}.output.dense",
            "layers.{layer}.output_norm": "encoder.layer.{layer}.output.LayerNorm",
        }
    ),
    prefixes=("", "bert.", "model.", "0.auto_model."),
    anchor="embeddings.word_embeddings.weight",
    roots=("embeddings.", "encoder."),
    buffers=("embeddings.position_ids", "embeddings.token_type_ids"),
    legacy_suffixes={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
)
