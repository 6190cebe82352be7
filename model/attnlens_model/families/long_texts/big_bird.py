"""BigBird: BERT with attention between blocks, in texts of more than 5 + 2 * num_random_blocks of them.

Zaheer et al. 2020, https://arxiv.org/abs/2007.14062. A checkpoint does not hold its random blocks. The code
that trained the published ones draws them from fixed seeds, in training and afterwards; transformers does so
in training alone, and attends to the first block in their place afterwards. `attnlens_random_blocks` in our
config.json says which: "original" (what the weights were trained with) or "first_block". Absent it is the
former.
"""

import math
from collections.abc import Mapping
from typing import Any

from attnlens_model.config_part import nested
from attnlens_model.errors import ConfigError
from attnlens_model.families.bert import bert
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.family import Family

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
        raise ConfigError(f"attention_type={kind!r} is not supported: this version knows {known}")
    values = (_BLOCKS if kind == "block_sparse" else _CONFIG).read(content)
    width, num_layers = values["hidden_size"], values["num_layers"]
    # A number that is none is refused, with its name, when the configuration is made.
    if is_scaled and isinstance(width, int) and width > 0:
        values["embeddings.scale"] = math.sqrt(width)
    if kind == "original_full":
        return values
    common = {path: value for path, value in values.items() if path.startswith("attention.")}
    rest = {path: value for path, value in values.items() if path not in common}
    seeds = range(num_layers) if isinstance(num_layers, int) and num_layers > 0 else (0,)
    return rest | {"attention": [nested(common | {"attention.seed": seed})["attention"] for seed in seeds]}


def _write_config(values: Mapping[str, Any]) -> dict[str, object]:
    is_full = values["attention.kind"] == "softmax"
    content = (_CONFIG if is_full else _BLOCKS).write(values)
    return content | {
        "attention_type": "original_full" if is_full else "block_sparse",
        "rescale_embeddings": values.get("embeddings.scale", 1.0) != 1.0,
        # Two of ours have this key: the table may be longer, which this family's files can't say.
        "max_position_embeddings": values["positions.max_position_embeddings"],
    }


FAMILY = Family(
    name="big_bird",
    model_types=("big_bird",),
    architecture="BigBirdModel",
    read_config=_read_config,
    write_config=_write_config,
    weights=bert.WEIGHTS,
    prefixes=("", "bert.", "model.", "0.auto_model."),
    anchor=bert.ANCHOR,
    roots=("embeddings.", "encoder."),
    buffers=bert.BUFFERS,
    legacy_suffixes=bert.LEGACY_SUFFIXES,
)
