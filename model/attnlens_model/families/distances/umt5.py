"""The encoder of umT5: T5 with a separate relative bias in each layer.

Chung et al. 2023, https://arxiv.org/abs/2304.09151.
"""

from collections.abc import Mapping
from dataclasses import replace

from attnlens_model.families.distances import t5
from attnlens_model.family import Parameters, without

_BIAS = "encoder.block.{layer}.layer.0.SelfAttention.relative_attention_bias.weight"


def _read_config(content: Mapping[str, object]) -> dict[str, object]:
    return t5.read_config(content) | {"attention.relative_bias.per_layer": True}


def _with_layer_biases(weights: Mapping[Parameters, str]) -> dict[Parameters, str]:
    return without(weights, t5.SHARED_BIAS) | {"layers.{layer}.attention.relative_bias.weight": _BIAS}


FAMILY = replace(
    t5.FAMILY,
    name="umt5",
    model_types=("umt5",),
    architecture="UMT5EncoderModel",
    read_config=_read_config,
    weights=_with_layer_biases(t5.FAMILY.weights),
    other_layouts=tuple(
        replace(layout, weights=_with_layer_biases(layout.weights)) for layout in t5.FAMILY.other_layouts
    ),
)
