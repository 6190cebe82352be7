"""Decoders as encoders: supported and rejected settings, and the frequencies of Llama 3."""

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from attnlens_model import ConfigError, EncoderConfig, SoftmaxAttentionConfig
from attnlens_model.attention.parts.rotary import FrequencyScalingConfig, RotaryConfig, RotaryTables

SIZES: dict[str, Any] = {"vocab_size": 300, "hidden_size": 96, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 160}
LLAMA = SIZES | {"model_type": "llama", "max_position_embeddings": 64}
MISTRAL = SIZES | {"model_type": "mistral", "max_position_embeddings": 64}
QWEN2 = SIZES | {"model_type": "qwen2", "max_position_embeddings": 64}
GEMMA = SIZES | {"model_type": "gemma3_text", "head_dim": 16, "max_position_embeddings": 64}
CUSTOM_CODE = {
    "auto_map": {"AutoModel": "modeling_own.OwnModel", "AutoConfig": "configuration_own.OwnConfig"}
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def layers(values: dict[str, Any]) -> tuple[SoftmaxAttentionConfig, ...]:
    found = EncoderConfig.from_dict(values).layer_attentions
    assert all(isinstance(each, SoftmaxAttentionConfig) for each in found)
    return found  # type: ignore[return-value]


def test_file_of_qwen3_embedding() -> None:
    published = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151669,
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "max_position_embeddings": 32768,
        "max_window_layers": 28,
        "sliding_window": None,
        "use_sliding_window": False,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "rms_norm_eps": 1e-06,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
    }
    config = EncoderConfig.from_dict(published)
    [attention] = set(layers(published))
    assert config.is_causal
    assert config.max_tokens == 32768
    assert (attention.head_size, attention.num_shared_heads, attention.head_norm) == (128, 8, True)
    assert (attention.bias, attention.window, attention.scale) == (False, None, None)
    assert attention.rotary == RotaryConfig(theta=1_000_000.0)


def test_file_of_embeddinggemma() -> None:
    published = {
        "model_type": "gemma3_text",
        "vocab_size": 262144,
        "hidden_size": 768,
        "num_hidden_layers": 24,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "intermediate_size": 1152,
        "max_position_embeddings": 2048,
        "sliding_window": 512,
        "use_bidirectional_attention": True,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "hidden_activation": "gelu_pytorch_tanh",
    }
    config = EncoderConfig.from_dict(published)
    assert not config.is_causal
    assert config.norm.placement == "both"
    assert config.embeddings.scale == math.sqrt(768)
    windows = [each.window for each in layers(published)]
    assert windows == ([256] * 5 + [None]) * 4
    thetas = [each.rotary.theta for each in layers(published) if each.rotary]
    assert thetas == ([10_000.0] * 5 + [1_000_000.0]) * 4


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "qwen3", "gemma3_text"])
def test_missing_number_of_shared_heads_defaults_to_that_of_the_class(model_type: str) -> None:
    sizes = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    sizes |= {"hidden_size": 512, "num_attention_heads": 64, "model_type": model_type}
    expected = {"mistral": 8, "gemma3_text": 4}.get(model_type, 32)
    assert {each.num_shared_heads for each in layers(sizes)} == {expected}


def test_window_over_the_longest_input_is_none() -> None:
    reaches = {size: layers(MISTRAL | {"sliding_window": size})[0].window for size in (62, 63, 64, 65)}
    assert reaches == {62: 61, 63: 62, 64: None, 65: None}
    assert layers(MISTRAL)[0].window is None
    assert layers(MISTRAL | {"max_position_embeddings": 32768})[0].window == 4095
    qwen = QWEN2 | {"use_sliding_window": True, "max_window_layers": 1}
    assert [each.window for each in layers(qwen | {"sliding_window": 63})] == [None, 62, 62]
    assert [each.window for each in layers(qwen | {"sliding_window": 64})] == [None] * 3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (LLAMA | CUSTOM_CODE, "auto_map in config.json refers to custom code.* add is_causal to config.json"),
        (GEMMA | CUSTOM_CODE, "add use_bidirectional_attention or is_causal to config.json"),
        (LLAMA | {"is_causal": "no"}, "is_causal='no' is str"),
        (LLAMA | {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type='yarn' is not supported"),
        (LLAMA | {"rope_scaling": LLAMA3 | {"factor": None}}, "factor=None must be a number"),
        (LLAMA | {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor=1.0: must be great"),
        (MISTRAL | {"sliding_window": 1}, "sliding_window=1 is not supported: .* at least 2"),
        (MISTRAL | {"sliding_window": "all"}, "sliding_window='all' is not supported"),
        (
            QWEN2 | {"layer_types": ["sliding_attention"] * 3},
            "use_sliding_window or sliding_window is not set",
        ),
        (QWEN2 | {"layer_types": ["full_attention"] * 2}, "for each of 3 layers"),
        (QWEN2 | {"layer_types": ["chunked_attention"] * 3}, "layer_types=.* is not supported"),
        (QWEN2 | {"max_window_layers": None}, "max_window_layers=None must be an integer"),
        (GEMMA | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported"),
        (GEMMA | {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' is not supp"),
        (GEMMA | {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0 must be a number greater than 0"),
        (GEMMA | {"sliding_window_pattern": 0}, "sliding_window_pattern=0 must be an integer"),
        (GEMMA | {"rope_parameters": {"rope_theta": 5.0}}, "it must have full_attention and sliding_atten"),
    ],
)
def test_rejected_value_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EncoderConfig.from_dict(values)


def test_custom_code_is_accepted_if_the_file_defines_causality() -> None:
    assert not EncoderConfig.from_dict(LLAMA | CUSTOM_CODE | {"is_causal": False}).is_causal
    assert EncoderConfig.from_dict(LLAMA | {"auto_map": {"AutoTokenizer": ["own.Own", None]}}).is_causal


@pytest.mark.parametrize("is_stated", [True, False])
def test_frequencies_of_llama3_match_transformers(is_stated: bool) -> None:
    stated = {"original_max_position_embeddings": 40} if is_stated else {}
    content = LLAMA | {"head_dim": 32, "rope_theta": 500.0, "rope_scaling": LLAMA3 | stated}
    theirs: Any = LlamaConfig(**content)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, torch.device("cpu"))
    rotary = layers(content)[0].rotary
    assert rotary is not None
    sines = RotaryTables(rotary, 32, 2).double()(2).sines[1, 16:]
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
