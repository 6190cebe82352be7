"""EuroBERT: bidirectional Llama.

Boizard et al. 2025, https://arxiv.org/abs/2503.05500.
"""

from dataclasses import replace
from functools import partial

from attnlens_model.families.config_json.table import ConfigTable
from attnlens_model.families.decoders import llama

_CONFIG = ConfigTable(
    keys={
        **llama.KEYS,
        **llama.BIASES,
        "positions.max_position_embeddings": ("max_position_embeddings", 8192),
        "norm.eps": ("rms_norm_eps", 1e-5),
    },
    pad_token_id=128001,
    activation=("hidden_act", "silu"),
    implied=llama.IMPLIED,
)

FAMILY = replace(
    llama.FAMILY,
    name="eurobert",
    model_types=("eurobert",),
    architecture="EuroBertModel",
    read_config=partial(llama.read_config, _CONFIG),
    write_config=partial(llama.write_config, _CONFIG),
    buffers={},
)
