"""GPT-2: published files, rejected settings and stored masks."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from attnlens_model import CheckpointError, ConfigError, EncoderConfig, load_checkpoint
from odd_models import OddModel

# As in the file of openai-community/gpt2.
PUBLISHED: dict[str, Any] = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "vocab_size": 50257,
}
ODD = OddModel("GPT2", {"n_inner": 160, "num_hidden_layers": 2, "pad_token_id": 0}, std=0.08)
CAUSAL_MASK = torch.ones(64, 64).tril()[None, None]
MASK, SCORE = "h.1.attn.bias", "h.1.attn.masked_bias"


def load(directory: Path, changes: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of an encoder whose checkpoint stores these tensors too, or instead."""
    ODD.make().save_pretrained(directory)
    path = directory / "model.safetensors"
    safetensors.torch.save_file(safetensors.torch.load_file(path) | changes, path)
    parameters: dict[str, Tensor] = load_checkpoint(directory).encoder.state_dict()
    return parameters


def test_published_file_is_read() -> None:
    config = EncoderConfig.from_dict(PUBLISHED)
    assert (config.family, config.is_causal, config.max_tokens) == ("gpt2", True, 1024)
    assert (config.intermediate_size, config.norm.placement, config.norm.eps) == (3072, "pre", 1e-5)
    assert config.layer_feed_forwards[0].activation == "gelu_tanh"
    assert config.positions.scheme == "absolute"
    assert config.embeddings.pad_token_id == 50256


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"eos_token_id": 7}, 7),
        ({"eos_token_id": 7, "pad_token_id": 5}, 5),
        ({"pad_token_id": None}, 50256),
        ({"vocab_size": 300}, 0),
        ({"eos_token_id": [7, 8]}, 0),
        ({"eos_token_id": None}, 0),
    ],
)
def test_padding_id_defaults_to_the_end_token(changes: dict[str, Any], expected: int) -> None:
    config = EncoderConfig.from_dict(PUBLISHED | changes)
    assert config.embeddings.pad_token_id == expected
    assert EncoderConfig.from_dict(config.to_hugging_face()) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale_attn_weights": False}, "scale_attn_weights=False is not supported: only True is"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True is not supported"),
        ({"add_cross_attention": True}, "add_cross_attention=True is not supported: only False is"),
        ({"activation_function": "tanh"}, "activation_function='tanh' is not supported"),
        ({"auto_map": {"AutoModel": "own.Own"}}, "add is_causal to config.json"),
        ({"n_inner": "wide"}, "feed_forward.intermediate_size='wide' is str"),
    ],
    ids=str,
)
def test_unsupported_value_is_rejected_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EncoderConfig.from_dict(PUBLISHED | changes)


def test_missing_size_is_named() -> None:
    with pytest.raises(ConfigError, match="does not specify n_embd: add the value"):
        EncoderConfig.from_dict({key: value for key, value in PUBLISHED.items() if key != "n_embd"})


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32])
def test_stored_mask_must_be_causal(dtype: torch.dtype, tmp_path: Path) -> None:
    mask = CAUSAL_MASK.to(dtype)
    load(tmp_path, {MASK: mask})
    for other in (torch.ones_like(mask), mask.mT.contiguous(), torch.ones(5, dtype=dtype)):
        with pytest.raises(CheckpointError, match=r"h\.1\.attn\.bias differs from the values computed"):
            load(tmp_path, {MASK: other})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_stored_score_of_masked_keys_must_mask(dtype: torch.dtype, tmp_path: Path) -> None:
    for score in (-1e4, -1e9):
        load(tmp_path, {SCORE: torch.tensor(score).to(dtype)})
    for other in (torch.tensor(0.0), torch.full((2,), -1e4), torch.tensor(float("nan"))):
        with pytest.raises(CheckpointError, match=r"masked_bias differs from the values computed"):
            load(tmp_path, {SCORE: other.to(dtype)})


def test_matrix_stored_like_that_of_a_linear_layer_is_rejected_with_its_shape(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"c_attn\.weight \(288, 96\) instead of \(96, 288\)"):
        load(tmp_path, {"h.0.attn.c_attn.weight": torch.zeros(288, 96)})


def test_output_matrix_tied_to_the_embeddings_is_reported(tmp_path: Path) -> None:
    model = ODD.make("LMHeadModel")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    tensors = model.state_dict()
    assert tensors["lm_head.weight"].data_ptr() == tensors["transformer.wte.weight"].data_ptr()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert load_checkpoint(tmp_path).unused_tensors == ("lm_head.weight",)
