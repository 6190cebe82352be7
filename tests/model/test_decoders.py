"""Decoders as encoders: custom code that may change causality, and the frequencies of Llama 3."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from attnlens_model import ConfigError, load_checkpoint
from attnlens_model.attention.parts.rotary import FrequencyScalingConfig, RotaryConfig, RotaryTables
from odd_models import OddModel

LLAMA = OddModel("Llama", {"num_hidden_layers": 1, "pad_token_id": 0})
CUSTOM_CODE = {
    "auto_map": {"AutoModel": "modeling_own.OwnModel", "AutoConfig": "configuration_own.OwnConfig"}
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_decoder_with_custom_code_must_state_whether_it_is_causal(tmp_path: Path) -> None:
    LLAMA.make().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text("utf-8")) | CUSTOM_CODE
    path.write_text(json.dumps(content), "utf-8")
    with pytest.raises(
        ConfigError, match=r"auto_map in config\.json refers to custom code.* add is_causal or"
    ):
        load_checkpoint(tmp_path)
    for is_causal in (True, False):
        path.write_text(json.dumps(content | {"is_causal": is_causal}), "utf-8")
        checkpoint = load_checkpoint(tmp_path)
        assert (checkpoint.config.is_causal, checkpoint.has_own_code) == (is_causal, True)
    path.write_text(json.dumps(content | {"auto_map": {"AutoTokenizer": ["own.Own", None]}}), "utf-8")
    assert load_checkpoint(tmp_path).config.is_causal


@pytest.mark.parametrize("limit", [40, 64])
def test_frequencies_of_llama3_match_transformers(limit: int) -> None:
    scaling = {"rope_type": "llama3", "rope_theta": 500.0, "original_max_position_embeddings": limit}
    theirs = LlamaConfig(hidden_size=96, num_attention_heads=3, rope_parameters=scaling | LLAMA3)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, torch.device("cpu"))
    own = FrequencyScalingConfig(**LLAMA3, original_max_position_embeddings=limit)
    sines = RotaryTables(RotaryConfig(theta=500.0, scaling=own), 32, 2).double()(2).sines[1, 16:]
    assert torch.allclose(sines, expected.double().sin(), rtol=1e-6, atol=0)
    plain = RotaryTables(RotaryConfig(theta=500.0), 32, 2).double()(2).sines[1, 16:]
    changed = (sines - plain).abs() > 1e-9
    assert changed.any()
    assert not changed[:2].any()


def test_pair_between_the_two_limits_is_between_the_two_frequencies() -> None:
    scaling = FrequencyScalingConfig(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=100
    )
    turns = torch.tensor([0.5, 1.0, 2.5, 4.0, 9.0], dtype=torch.float64)
    frequencies = turns * (2 * math.pi / 100)
    shares = (scaling.scaled(frequencies) / frequencies).tolist()
    assert shares == pytest.approx([1 / 8, 1 / 8, (1 + 1 / 8) / 2, 1.0, 1.0])
