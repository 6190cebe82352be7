"""Longformer: RoBERTa with sliding-window attention and global tokens, which have separate projections.

Beltagy et al. 2020, https://arxiv.org/abs/2004.05150. `attention_window` counts both sides of the window.

Published files do not specify which tokens are global. Users choose them, for example the first token for
classification, or the tokens of a question. Here, the first `attnlens_global_tokens` non-padding tokens are
global, a key that we add to config.json. It defaults to 1, as in `LongformerForSequenceClassification` of
transformers; `LongformerModel` has no global tokens unless it is called with a `global_attention_mask`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from attnlens_model.errors import ConfigError
from attnlens_model.families.bert import bert
from attnlens_model.families.config_json.layers import vary_by_layer
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.family import COMMON_PREFIXES, linear_and_norm_names

_DEFAULT_WINDOW = 512
_SIDES = 2
# Written by attnlens only.
GLOBAL_TOKENS_KEY, FORM_KEY = "attnlens_global_tokens", "attnlens_form"

_CONFIG = ConfigTable(
    keys={
        **bert.KEYS,
        "attention.num_global_tokens": (GLOBAL_TOKENS_KEY, 1),
        "attention.form": (FORM_KEY, "blocks"),
    },
    pad_token_id=1,
    implied={"attention.kind": "longformer", "positions.scheme": "padding_offset"},
    required_values=bert.REQUIRED_VALUES,
)


def _read_config(content: Mapping[str, object]) -> dict[str, object]:
    values = _CONFIG.read(content)
    stated = content.get("attention_window", _DEFAULT_WINDOW)
    windows = list(stated) if isinstance(stated, list | tuple) else [stated]
    sides = [
        both // _SIDES for both in windows if isinstance(both, int) and both >= _SIDES and both % _SIDES == 0
    ]
    if not sides or len(sides) < len(windows):
        raise ConfigError(
            f"attention_window={stated!r} is not supported: it must be an even integer of at least 2 (both "
            "sides of the window), or a list of such integers"
        )
    if isinstance(stated, list | tuple) and len(windows) != values["num_layers"]:
        raise ConfigError(
            f"attention_window={stated!r} has {len(windows)} windows: it must have one for each of "
            f"{values['num_layers']} layers, or be an integer"
        )
    return vary_by_layer(values, sides, {window: {"attention.window": window} for window in sides})


def _write_config(values: Mapping[str, Any]) -> dict[str, object]:
    pattern = values["attention"]
    # Attention without a window belongs to another family. Reading the file back detects the difference.
    windows = [
        _SIDES * (pattern[layer % len(pattern)].get("window") or 1) for layer in range(values["num_layers"])
    ]
    return _CONFIG.write(values) | {"attention_window": windows}


FAMILY = replace(
    bert.FAMILY,
    name="longformer",
    model_types=("longformer",),
    architecture="LongformerModel",
    read_config=_read_config,
    write_config=_write_config,
    weights={
        **bert.WEIGHTS,
        **linear_and_norm_names(
            {
                "layers.{layer}.attention.global_query": "encoder.layer.{layer}.attention.self.query_global",
                "layers.{layer}.attention.global_key": "encoder.layer.{layer}.attention.self.key_global",
                "layers.{layer}.attention.global_value": "encoder.layer.{layer}.attention.self.value_global",
            }
        ),
    },
    prefixes=("longformer.", *COMMON_PREFIXES),
    # Unused in an encoder without global tokens.
    spare=("attention.global_",),
)
