"""Longformer: RoBERTa whose tokens see a window, and global tokens with projections of their own.

Beltagy et al. 2020, https://arxiv.org/abs/2004.05150. `attention_window` is both sides of the window.

Which tokens are global is no part of the published files; users choose, for instance the first token for
classification, or the question. Here it is the first `attnlens_global_tokens` that are no padding, a key of
our own in config.json. Where it is absent that is 1, as in `LongformerForSequenceClassification` of
transformers. Its `LongformerModel` has none unless it is called with a `global_attention_mask`.
"""

from collections.abc import Mapping
from typing import Any

from attnlens_model.config_part import nested
from attnlens_model.errors import ConfigError
from attnlens_model.families.bert import bert
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.family import Family, linear_and_norm_names

_DEFAULT_WINDOW = 512
_SIDES = 2
# No publisher writes these.
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
            f"attention_window={stated!r} is not supported: it must be an even integer of at least 2, both "
            "sides of the window together, or a list of them"
        )
    if isinstance(stated, list | tuple) and len(windows) != values["num_layers"]:
        raise ConfigError(
            f"attention_window={stated!r} has {len(windows)} windows: it must have one for each of "
            f"{values['num_layers']} layers, or be an integer"
        )
    common = {path: value for path, value in values.items() if path.startswith("attention.")}
    layers = [nested(common | {"attention.window": window})["attention"] for window in sides]
    return {path: value for path, value in values.items() if path not in common} | {"attention": layers}


def _write_config(values: Mapping[str, Any]) -> dict[str, object]:
    pattern = values["attention"]
    # An attention that has no window is another's: reading the file shows what it can't say.
    windows = [
        _SIDES * (pattern[layer % len(pattern)].get("window") or 1) for layer in range(values["num_layers"])
    ]
    return _CONFIG.write(values) | {"attention_window": windows}


FAMILY = Family(
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
    prefixes=("", "longformer.", "model.", "0.auto_model."),
    anchor=bert.ANCHOR,
    roots=("embeddings.", "encoder."),
    buffers=bert.BUFFERS,
    legacy_suffixes=bert.LEGACY_SUFFIXES,
    # Without global tokens an encoder has no use for them.
    spare=("attention.global_",),
)
