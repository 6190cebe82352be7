"""Mistral: a Llama in which each token may see a window of those before it alone.

Jiang et al. 2023, https://arxiv.org/abs/2310.06825; E5-Mistral and others embed with it.
"""

from collections.abc import Mapping

from attnlens_model.families.config_json.rotary import read_rotary, write_rotary_parameters
from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.families.decoders import llama
from attnlens_model.families.decoders.layers import check_own_code, read_reach, write_window
from attnlens_model.family import Family

_DEFAULT_SHARED_HEADS = 8
_DEFAULT_WINDOW = 4096

_CONFIG = ConfigTable(
    keys={
        **llama.KEYS,
        **llama.CAUSAL,
        "positions.max_position_embeddings": ("max_position_embeddings", 131_072),
    },
    activation=("hidden_act", "silu"),
    implied={**llama.IMPLIED, **llama.BIASES},
)


def _read_config(content: Mapping[str, object]) -> dict[str, object]:
    check_own_code(content, "is_causal")
    fields = _CONFIG.read(content)
    size = content.get("sliding_window", _DEFAULT_WINDOW)
    longest = fields["positions.max_position_embeddings"]
    is_causal = fields["is_causal"] is not False
    reach = None if size is None else read_reach("sliding_window", size, is_causal=is_causal)
    if reach is not None and isinstance(longest, int) and reach >= longest - 1:
        reach = None  # Every token of the longest input is within it.
    return {
        **fields,
        **llama.read_heads(content, fields, None, _DEFAULT_SHARED_HEADS),
        "attention.window": reach,
        "attention.rotary": read_rotary(content, llama.DEFAULT_THETA),
    }


def _write_config(fields: Mapping[str, object]) -> dict[str, object]:
    reach, is_causal = fields.get("attention.window"), bool(fields["is_causal"])
    return {
        **_CONFIG.write(fields),
        **llama.write_heads(fields),
        "sliding_window": write_window(reach if isinstance(reach, int) else None, is_causal=is_causal),
        "rope_parameters": write_rotary_parameters(fields),
    }


FAMILY = Family(
    name="mistral",
    model_types=("mistral",),
    architecture="MistralModel",
    read_config=_read_config,
    write_config=_write_config,
    weights=llama.WEIGHTS,
    prefixes=llama.PREFIXES,
    anchor=llama.ANCHOR,
    roots=llama.ROOTS,
    buffers=llama.BUFFERS,
)
