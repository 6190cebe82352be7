"""The encoder half of umT5: T5 with biases by distance of each layer's own.

Chung et al. 2023, https://arxiv.org/abs/2304.09151.
"""

from collections.abc import Mapping

from attnlens_model.families.distances import t5
from attnlens_model.family import Family, Layout, Parameters

_BIAS = "encoder.block.{layer}.layer.0.SelfAttention.relative_attention_bias.weight"


def _read_config(content: Mapping[str, object]) -> dict[str, object]:
    return t5.read_config(content) | {"attention.relative_bias.per_layer": True}


def _with_own_biases(weights: Mapping[Parameters, str]) -> dict[Parameters, str]:
    others = {ours: theirs for ours, theirs in weights.items() if ours != t5.SHARED_BIAS}
    return others | {"layers.{layer}.attention.relative_bias.weight": _BIAS}


FAMILY = Family(
    name="umt5",
    model_types=("umt5",),
    architecture="UMT5EncoderModel",
    read_config=_read_config,
    write_config=t5.write_config,
    weights=_with_own_biases(t5.FAMILY.weights),
    prefixes=t5.FAMILY.prefixes,
    anchor=t5.FAMILY.anchor,
    roots=t5.FAMILY.roots,
    other_layouts=tuple(
        Layout(_with_own_biases(layout.weights), layout.anchor, layout.roots)
        for layout in t5.FAMILY.other_layouts
    ),
    legacy_suffixes=t5.FAMILY.legacy_suffixes,
)
