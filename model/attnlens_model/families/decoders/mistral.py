"""Mistral: Llama with sliding-window attention.

Jiang et al. 2023, https://arxiv.org/abs/2310.06825. Embedding models such as E5-Mistral use it.
"""

from collections.abc import Mapping
from dataclasses import replace

from attnlens_model.families.config_json.layers import check_custom_code, read_reach, write_window
from attnlens_model.families.config_json.rotary import read_rotary
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.families.decoders import llama

_DEFAULT_KEY_VALUE_HEADS = 8
_DEFAULT_WINDOW = 4096

_CONFIG = ConfigTable(
    keys={
        **llama.KEYS,
        **llama.CAUSAL,
        "positions.max_position_embeddings": ("max_position_embeddings", 131_072),
    },
    activation=("hidden_act", "silu"),
    implied={**llama.IMPLIED, **llama.NO_FEED_FORWARD_BIAS, "attention.bias": False},
)


def _read_config(content: Mapping[str, object]) -> dict[str, object]:
    check_custom_code(content, "is_causal")
    fields = _CONFIG.read(content)
    size = content.get("sliding_window", _DEFAULT_WINDOW)
    max_tokens = fields["positions.max_position_embeddings"]
    is_causal = fields["is_causal"] is not False
    reach = None if size is None else read_reach("sliding_window", size, is_causal=is_causal)
    if reach is not None and isinstance(max_tokens, int) and reach >= max_tokens - 1:
        reach = None  # The window covers the longest input.
    return {
        **fields,
        **llama.read_heads(content, fields, None, _DEFAULT_KEY_VALUE_HEADS),
        "attention.window": reach,
        "attention.rotary": read_rotary(content, llama.DEFAULT_THETA),
    }


def _write_config(fields: Mapping[str, object]) -> dict[str, object]:
    reach, is_causal = fields.get("attention.window"), bool(fields["is_causal"])
    window = write_window(reach if isinstance(reach, int) else None, is_causal=is_causal)
    return llama.write_config(_CONFIG, fields) | {"sliding_window": window}


FAMILY = replace(
    llama.FAMILY,
    name="mistral",
    model_types=("mistral",),
    architecture="MistralModel",
    read_config=_read_config,
    write_config=_write_config,
)
