"""Qwen3: Qwen2 without biases, with normalized queries and keys.

Yang et al. 2025, https://arxiv.org/abs/2505.09388; Qwen3-Embedding: https://arxiv.org/abs/2506.05176.
"""

from dataclasses import replace
from functools import partial

from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.families.decoders import llama, qwen2

_DEFAULT_HEAD_SIZE = 128

_CONFIG = ConfigTable(
    keys={**llama.KEYS, **llama.CAUSAL, **llama.ATTENTION_BIAS, **qwen2.POSITIONS},
    activation=("hidden_act", "silu"),
    implied={**llama.IMPLIED, **llama.NO_FEED_FORWARD_BIAS, "attention.head_norm": True},
)

FAMILY = replace(
    llama.FAMILY,
    name="qwen3",
    model_types=("qwen3",),
    architecture="Qwen3Model",
    read_config=partial(qwen2.read_config, _CONFIG, head_dim=_DEFAULT_HEAD_SIZE),
    write_config=partial(qwen2.write_config, _CONFIG),
    weights={**llama.WEIGHTS, **llama.HEAD_NORMS},
    buffers={},
)
