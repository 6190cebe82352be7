"""DeBERTa v2 and v3 (deberta-v3-base, mdeberta-v3-base, deberta-v2-xlarge): disentangled attention.

He et al. 2020, https://arxiv.org/abs/2006.03654; He et al. 2021, https://arxiv.org/abs/2111.09543. The
published models do not add position embeddings. A checkpoint may still contain them for its pretraining head.
"""

from collections.abc import Mapping
from dataclasses import replace

from attnlens_model.errors import ConfigError
from attnlens_model.families.bert import bert
from attnlens_model.families.buffers import holds_indices
from attnlens_model.families.config_json.table import ConfigTable, Keys
from attnlens_model.family import COMMON_PREFIXES, Parameters, linear_and_norm_names

_TERMS = ("c2p", "p2c")
_ATTENTION = "encoder.layer.{layer}.attention.self"

KEYS: Keys = {
    **bert.ENCODER_KEYS,
    "embeddings.type_vocab_size": ("type_vocab_size", 0),
    "norm.eps": ("layer_norm_eps", 1e-7),
    "embeddings.size": ("embedding_size", -1),
}

_CONFIG = ConfigTable(keys=KEYS, required_values={"pruned_heads": ({}, None)})


def _read_config(content: Mapping[str, object]) -> dict[str, object]:
    relative = _read_relative_attention(content)
    fields = _CONFIG.read(content) | relative
    _check_head_size(content, fields)
    return fields | read_embeddings(content, fields) | {"convolution": _read_convolution(content)}


def read_embeddings(content: Mapping[str, object], fields: Mapping[str, object]) -> dict[str, object]:
    """Return the settings of positions and embeddings, given the values that a table has read."""
    width = number_or_none(fields["embeddings.size"])
    is_projected = width not in (None, fields["hidden_size"])
    return {
        "positions.scheme": "absolute" if content.get("position_biased_input", True) else "none",
        "embeddings.size": width if is_projected else None,
        "embeddings.projection": "before_norm" if is_projected else "after_norm",
    }


def _read_relative_attention(content: Mapping[str, object]) -> dict[str, object]:
    terms, has_norm = read_terms(content), _read_norm(content)
    if not terms:
        # The other keys have no effect without terms, as in transformers.
        return {}
    return {
        "attention.kind": "disentangled",
        "attention.terms": terms,
        "attention.distance_buckets": number_or_none(content.get("position_buckets")) or 0,
        "attention.max_relative_positions": number_or_none(content.get("max_relative_positions")),
        "attention.share_att_key": content.get("share_att_key", False),
        "attention.distance_norm": has_norm,
    }


def _read_convolution(content: Mapping[str, object]) -> dict[str, object] | None:
    size = number_or_none(content.get("conv_kernel_size"))
    if size is None:
        return None
    return {
        "kernel_size": size,
        "groups": content.get("conv_groups", 1),
        "activation": content.get("conv_act", "tanh"),
    }


def read_terms(content: Mapping[str, object]) -> str:
    """Return the relative-position terms of the scores, or "" if there are none.

    Raises:
        ConfigError: A term is unknown, or there are terms without `relative_attention`.
    """
    stated, is_relative = content.get("pos_att_type"), content.get("relative_attention", False)
    names = stated.lower().split("|") if isinstance(stated, str) else stated or []
    found = sorted(str(name).strip() for name in names) if isinstance(names, list) else None
    if found is None or len(set(found)) < len(found) or not set(found) <= set(_TERMS):
        raise ConfigError(f"pos_att_type={stated!r} is not supported: only c2p, p2c or both are")
    if bool(found) != bool(is_relative):
        raise ConfigError(
            f"pos_att_type={stated!r} with relative_attention={is_relative!r} is not supported: only both "
            "together, or neither, are"
        )
    return "|".join(found)


def _read_norm(content: Mapping[str, object]) -> bool:
    stated = content.get("norm_rel_ebd", "none")
    if stated not in ("none", "layer_norm"):
        raise ConfigError(f"norm_rel_ebd={stated!r} is not supported: only 'layer_norm' or 'none' is")
    if stated != "none" and not content.get("relative_attention", False):
        raise ConfigError(f"norm_rel_ebd={stated!r} is not supported without relative_attention")
    return stated == "layer_norm"


def _check_head_size(content: Mapping[str, object], fields: Mapping[str, object]) -> None:
    size, heads = content.get("attention_head_size"), fields["attention.num_heads"]
    if isinstance(size, int) and isinstance(heads, int) and size * heads != fields["hidden_size"]:
        raise ConfigError(
            f"attention_head_size={size} is not supported: only hidden_size / num_attention_heads is"
        )


def number_or_none(value: object) -> object:
    """Return a number, or None if it is less than 1, which disables a setting in transformers."""
    return None if isinstance(value, int) and value < 1 else value


def write_embeddings(fields: Mapping[str, object]) -> dict[str, object]:
    """Return the keys of positions and embeddings; the inverse of `read_embeddings`."""
    return {
        "position_biased_input": fields["positions.scheme"] != "none",
        "embedding_size": fields["embeddings.size"] or fields["hidden_size"],
    }


def write_terms(fields: Mapping[str, object]) -> dict[str, object]:
    """Return the keys of the relative-position terms and of the maximum distance."""
    terms = fields.get("attention.terms")
    return {
        "relative_attention": terms is not None,
        "pos_att_type": [] if terms is None else str(terms).split("|"),
        "max_relative_positions": fields.get("attention.max_relative_positions") or -1,
    }


def _write_config(fields: Mapping[str, object]) -> dict[str, object]:
    return (
        _CONFIG.write(fields)
        | write_embeddings(fields)
        | write_terms(fields)
        | {
            "position_buckets": fields.get("attention.distance_buckets") or -1,
            "share_att_key": fields.get("attention.share_att_key", False),
            "norm_rel_ebd": "layer_norm" if fields.get("attention.distance_norm") else "none",
            "conv_kernel_size": fields.get("convolution.kernel_size", 0),
            "conv_groups": fields.get("convolution.groups", 1),
            "conv_act": fields.get("convolution.activation", "tanh"),
        }
    )


COMMON_WEIGHTS: Mapping[Parameters, str] = {
    **bert.TABLE_WEIGHTS,
    "embeddings.projection.weight": "embeddings.embed_proj.weight",
    "shared.0.distances.table.weight": "encoder.rel_embeddings.weight",
    **bert.EMBEDDINGS_NORM,
    **bert.ATTENTION_OUTPUT,
    **bert.ATTENTION_NORM,
    **bert.FEED_FORWARD_WEIGHTS,
    **bert.OUTPUT_NORM,
}

FAMILY = replace(
    bert.FAMILY,
    name="deberta_v2",
    model_types=("deberta-v2",),
    architecture="DebertaV2Model",
    read_config=_read_config,
    write_config=_write_config,
    weights={
        **COMMON_WEIGHTS,
        **linear_and_norm_names(
            {
                "shared.0.distances.norm": "encoder.LayerNorm",
                "convolution.conv": "encoder.conv.conv",
                "convolution.norm": "encoder.conv.LayerNorm",
                "layers.{layer}.attention.query": f"{_ATTENTION}.query_proj",
                "layers.{layer}.attention.key": f"{_ATTENTION}.key_proj",
                "layers.{layer}.attention.value": f"{_ATTENTION}.value_proj",
                "layers.{layer}.attention.distance_query": f"{_ATTENTION}.pos_query_proj",
                "layers.{layer}.attention.distance_key": f"{_ATTENTION}.pos_key_proj",
            }
        ),
    },
    prefixes=("deberta.", *COMMON_PREFIXES),
    # Excludes position embeddings: unused ones are reported, not rejected.
    roots=(
        *("embeddings.word_embeddings.", "embeddings.token_type_embeddings.", "embeddings.LayerNorm."),
        *("embeddings.embed_proj.", "encoder."),
    ),
    buffers={"embeddings.position_ids": holds_indices},
)
