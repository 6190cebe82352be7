"""Qwen3: a Qwen2 without biases, whose queries and keys are normalised in each head.

Yang et al. 2025, https://arxiv.org/abs/2505.09388; Qwen3-Embedding: https://arxiv.org/abs/2506.05176.
"""

from collections.abc import Mapping
from typing import Any

from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.families.decoders import llama, qwen2
from attnlens_model.family import Family

_DEFAULT_HEAD_SIZE = 128

_CONFIG = ConfigTable(
    keys={
        **llama.KEYS,
        **llama.CAUSAL,
        **qwen2.POSITIONS,
        "attention.bias": ("attention_bias", False),
    },
    activation=("hidden_act", "silu"),
    implied={
        **llama.IMPLIED,
        "feed_forward.up_bias": False,
        "feed_forward.down_bias": False,
        "attention.head_norm": True,
    },
)


def _read_config(content: Mapping[str, object]) -> dict[str, object]:
    return qwen2.read_layers(content, _CONFIG.read(content), _DEFAULT_HEAD_SIZE)


def _write_config(values: Mapping[str, Any]) -> dict[str, object]:
    return _CONFIG.write(values) | qwen2.write_layers(values)


FAMILY = Family(
    name="qwen3",
    model_types=("qwen3",),
    architecture="Qwen3Model",
    read_config=_read_config,
    write_config=_write_config,
    weights={**llama.WEIGHTS, **llama.HEAD_NORMS},
    prefixes=llama.PREFIXES,
    anchor=llama.ANCHOR,
    roots=llama.ROOTS,
)
