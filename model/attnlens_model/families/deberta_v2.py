"""DeBERTa versions 2 and 3 (deberta-v3-base, mdeberta-v3-base, deberta-v2-xlarge): disentangled attention.

He et al. 2020, https://arxiv.org/abs/2006.03654; He et al. 2021, https://arxiv.org/abs/2111.09543. The
published models add no position embeddings. A checkpoint may have some all the same, for the head of its
pretraining.
"""

from collections.abc import Mapping

from attnlens_model.errors import ConfigError
from attnlens_model.families import bert
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.family import Family, linear_and_norm_names

_TERMS = ("c2p", "p2c")
_ATTENTION = "encoder.layer.{layer}.attention.self"

_CONFIG = ConfigTable(
    keys={
        **{ours: key for ours, key in bert.KEYS.items() if ours != "is_causal"},
        "type_vocab_size": ("type_vocab_size", 0),
        "layer_norm_eps": ("layer_norm_eps", 1e-7),
        "share_att_key": ("share_att_key", False),
        "distance_buckets": ("position_buckets", -1),
        "max_relative_positions": ("max_relative_positions", -1),
        "embedding_size": ("embedding_size", -1),
        "conv_kernel_size": ("conv_kernel_size", 0),
        "conv_groups": ("conv_groups", 1),
        "conv_activation": ("conv_act", "tanh"),
    },
    required_values={"pruned_heads": ({}, None)},
)


def _read_config(content: Mapping[str, object]) -> dict[str, object]:
    terms, has_norm = _read_terms(content), _read_norm(content)
    fields = _CONFIG.read(content)
    _check_head_size(content, fields)
    # A number below 1 is how their class says that there is none.
    buckets, farthest, kernel, width = (
        _number_or_none(fields[name])
        for name in ("distance_buckets", "max_relative_positions", "conv_kernel_size", "embedding_size")
    )
    is_projected = width not in (None, fields["hidden_size"])
    return fields | {
        "position_scheme": "absolute" if content.get("position_biased_input", True) else "none",
        "disentangled_attention": terms,
        # Of no effect, in their class too, where distances play no part.
        "distance_buckets": 0 if buckets is None or terms == "none" else buckets,
        "max_relative_positions": None if terms == "none" else farthest,
        "share_att_key": fields["share_att_key"] if terms != "none" else False,
        "distance_norm": has_norm,
        "embedding_size": width if is_projected else None,
        "embedding_projection": "before_norm" if is_projected else "after_norm",
        "conv_kernel_size": kernel or 0,
    }


def _read_terms(content: Mapping[str, object]) -> str:
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
    return "|".join(found) or "none"


def _read_norm(content: Mapping[str, object]) -> bool:
    stated = content.get("norm_rel_ebd", "none")
    if stated not in ("none", "layer_norm"):
        raise ConfigError(f"norm_rel_ebd={stated!r} is not supported: only 'layer_norm' or 'none' is")
    if stated != "none" and not content.get("relative_attention", False):
        raise ConfigError(f"norm_rel_ebd={stated!r} is not supported without relative_attention")
    return stated == "layer_norm"


def _check_head_size(content: Mapping[str, object], fields: Mapping[str, object]) -> None:
    size, heads = content.get("attention_head_size"), fields["num_heads"]
    if isinstance(size, int) and isinstance(heads, int) and size * heads != fields["hidden_size"]:
        raise ConfigError(
            f"attention_head_size={size} is not supported: only hidden_size / num_attention_heads is"
        )


def _number_or_none(value: object) -> object:
    return None if isinstance(value, int) and value < 1 else value


def _write_config(fields: Mapping[str, object]) -> dict[str, object]:
    terms = str(fields["disentangled_attention"])
    return _CONFIG.write(fields) | {
        "position_biased_input": fields["position_scheme"] != "none",
        "relative_attention": terms != "none",
        "pos_att_type": terms.split("|") if terms != "none" else [],
        "position_buckets": fields["distance_buckets"] or -1,
        "max_relative_positions": fields["max_relative_positions"] or -1,
        "norm_rel_ebd": "layer_norm" if fields["distance_norm"] else "none",
        "embedding_size": fields["embedding_size"] or fields["hidden_size"],
    }


FAMILY = Family(
    name="deberta_v2",
    model_types=("deberta-v2",),
    architecture="DebertaV2Model",
    read_config=_read_config,
    write_config=_write_config,
    weights={
        **bert.TABLE_WEIGHTS,
        "embeddings.projection.weight": "embeddings.embed_proj.weight",
        "distances.table.weight": "encoder.rel_embeddings.weight",
        **linear_and_norm_names(
            {
                "embeddings.norm": "embeddings.LayerNorm",
                "distances.norm": "encoder.LayerNorm",
                "convolution.conv": "encoder.conv.conv",
                "convolution.norm": "encoder.conv.LayerNorm",
                "layers.{layer}.attention.query": f"{_ATTENTION}.query_proj",
                "layers.{layer}.attention.key": f"{_ATTENTION}.key_proj",
                "layers.{layer}.attention.value": f"{_ATTENTION}.value_proj",
                "layers.{layer}.attention.distance_query": f"{_ATTENTION}.pos_query_proj",
                "layers.{layer}.attention.distance_key": f"{_ATTENTION}.pos_key_proj",
                "layers.{layer}.attention.output": "encoder.layer.{layer}.attention.output.dense",
                "layers.{layer}.attention_norm": "encoder.layer.{layer}.attention.output.LayerNorm",
                "layers.{layer}.feed_forward.up": "encoder.layer.{layer}.intermediate.dense",
                "layers.{layer}.feed_forward.down": "encoder.layer.{layer}.output.dense",
                "layers.{layer}.output_norm": "encoder.layer.{layer}.output.LayerNorm",
            }
        ),
    },
    prefixes=("", "deberta.", "model.", "0.auto_model."),
    anchor=bert.ANCHOR,
    # Not all of "embeddings.": position embeddings that no encoder reads are reported, not refused.
    roots=(
        *("embeddings.word_embeddings.", "embeddings.token_type_embeddings.", "embeddings.LayerNorm."),
        *("embeddings.embed_proj.", "encoder."),
    ),
    buffers=("embeddings.position_ids",),
    legacy_suffixes=bert.LEGACY_SUFFIXES,
)
