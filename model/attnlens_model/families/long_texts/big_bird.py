"""BigBird: BERT with block-sparse attention for texts of more than 5 + 2 * num_random_blocks blocks.

Zaheer et al. 2020, https://arxiv.org/abs/2007.14062. A checkpoint does not contain its random blocks. The
code that trained the published models draws them from fixed seeds, in training and inference. transformers
does so in training only; at inference it attends to the first block instead. `attnlens_random_blocks` in our
config.json selects one of the two: "original" (as in training, the default) or "first_block".
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from attnlens_model.errors import ConfigError
from attnlens_model.families.bert import bert
from attnlens_model.families.config_json.layers import vary_by_layer
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.family import COMMON_PREFIXES

_RANDOM_BLOCKS_KEY = "attnlens_random_blocks"
_DEFAULT_POSITIONS = 4096
_KINDS = ("block_sparse", "original_full")

_KEYS = {
    **bert.KEYS,
    "positions.max_position_embeddings": ("max_position_embeddings", _DEFAULT_POSITIONS),
}
_CONFIG = ConfigTable(
    keys=_KEYS,
    activation=("hidden_act", "gelu_new"),
    required_values={**bert.REQUIRED_VALUES, "use_bias": (True, None)},
)
_BLOCKS = ConfigTable(
    keys={
        **_KEYS,
        "attention.block_size": ("block_size", 64),
        "attention.num_random_blocks": ("num_random_blocks", 3),
        "attention.random_blocks": (_RANDOM_BLOCKS_KEY, "original"),
        "attention.table_tokens": ("max_position_embeddings", _DEFAULT_POSITIONS),
    },
    activation=_CONFIG.activation,
    implied={"attention.kind": "big_bird"},
    required_values=_CONFIG.required_values,
)


def _read_config(content: Mapping[str, object]) -> dict[str, object]:
    kind, is_scaled = content.get("attention_type", "block_sparse"), content.get("rescale_embeddings", False)
    if kind not in _KINDS:
        known = ", ".join(_KINDS)
        raise ConfigError(f"attention_type={kind!r} is not supported: choose one of {known}")
    values = (_BLOCKS if kind == "block_sparse" else _CONFIG).read(content)
    width, num_layers = values["hidden_size"], values["num_layers"]
    # An invalid size is rejected by EncoderConfig, which names it.
    if is_scaled and isinstance(width, int) and width > 0:
        values["embeddings.scale"] = math.sqrt(width)
    if kind == "original_full":
        return values
    seeds = range(num_layers) if isinstance(num_layers, int) and num_layers > 0 else (0,)
    return vary_by_layer(values, seeds, {seed: {"attention.seed": seed} for seed in seeds})


def _write_config(values: Mapping[str, Any]) -> dict[str, object]:
    is_full = values["attention.kind"] == "softmax"
    content = (_CONFIG if is_full else _BLOCKS).write(values)
    return content | {
        "attention_type": "original_full" if is_full else "block_sparse",
        "rescale_embeddings": values.get("embeddings.scale", 1.0) != 1.0,
        # attention.table_tokens has the same key. Files of this family cannot store different values.
        "max_position_embeddings": values["positions.max_position_embeddings"],
    }


FAMILY = replace(
    bert.FAMILY,
    name="big_bird",
    model_types=("big_bird",),
    architecture="BigBirdModel",
    read_config=_read_config,
    write_config=_write_config,
    prefixes=("bert.", *COMMON_PREFIXES),
)
