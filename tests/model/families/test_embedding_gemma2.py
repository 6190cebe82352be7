"""EmbeddingGemma 2: multimodal checkpoints and their text model, and supported settings."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import EmbeddingGemma2Config, EmbeddingGemma2Model, EmbeddingGemma2TextConfig

from attnlens_model import ConfigError, EncoderConfig, load_checkpoint

TEXT: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 160,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "global_head_dim": 12,
    "hidden_size_per_layer_input": 20,
    "embedding_dim": 72,
    "sliding_window": 5,
}
VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "position_embedding_size": 10,
}
AUDIO = {
    "model_type": "gemma4_audio",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [8, 4],
    "output_proj_dims": 40,
}
FILE = EmbeddingGemma2TextConfig(**TEXT).to_dict()


def test_text_half_of_the_whole_model_is_read_and_the_towers_are_reported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = EmbeddingGemma2Config(text_config=TEXT, vision_config=VISION, audio_config=AUDIO)
    config._attn_implementation = "eager"
    model: Any = EmbeddingGemma2Model(config)
    model.eval().save_pretrained(tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    towers = {name.partition(".")[0] for name in checkpoint.unused_tensors}
    assert towers == {"vision_tower", "embed_vision", "audio_tower", "embed_audio"}
    ids = torch.randint(3, 300, (2, 17), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    with torch.no_grad():
        found = checkpoint.encoder(ids, mask).last_hidden_state
        expected = model(input_ids=ids, attention_mask=mask).last_hidden_state
    assert found.shape == (2, 17, 72)
    assert (found - expected).abs().max() < 1e-5


def test_last_layer_always_has_full_attention() -> None:
    config = EncoderConfig.from_dict(FILE | {"layer_types": ["sliding_attention"] * 3})
    assert [attention.reach for attention in config.layer_attentions] == [5, 5, None]


def test_index_of_a_layer_may_have_leading_zeros() -> None:
    heads = {"head_dim": 12, "num_key_value_heads": 1}
    expected = EncoderConfig.from_dict(FILE | {"per_layer_config": {"2": heads}})
    assert EncoderConfig.from_dict(FILE | {"per_layer_config": {"02": heads}}) == expected
    assert [attention.head_dim(96) for attention in expected.layer_attentions] == [8, 8, 12]
    assert [attention.num_shared_heads for attention in expected.layer_attentions] == [2, 2, 1]


def test_per_layer_config_of_null_means_that_layers_do_not_differ() -> None:
    config = EncoderConfig.from_dict(FILE | {"per_layer_config": None})
    assert {attention.head_dim(96) for attention in config.layer_attentions} == {8}


def test_file_without_per_layer_config_has_wider_heads_in_global_layers() -> None:
    content = {key: value for key, value in FILE.items() if key != "per_layer_config"}
    for changes in ({}, {"global_head_dim": 12, "num_global_key_value_heads": 2}):
        written = EmbeddingGemma2TextConfig(**content | changes).to_dict()
        assert EncoderConfig.from_dict(content | changes) == EncoderConfig.from_dict(written)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"per_layer_config": {"3": {}}},
            r"per_layer_config.3 is not supported: the model has 3 layers",
        ),
        ({"per_layer_config": {"": {}}}, "the model has 3 layers"),
        ({"per_layer_config": {"9" * 5000: {}}}, "the model has 3 layers"),
        ({"per_layer_config": {"-1": {}}}, r"per_layer_config.-1 is not supported: the model has 3 layers"),
        (
            {"per_layer_config": {"0": {"intermediate_size": 8}}},
            r"per_layer_config.0.intermediate_size=8 is not supported: layers may only differ in head_dim",
        ),
        ({"per_layer_config": {"0": 8}}, "per_layer_config.0=8 must be an object"),
        ({"sliding_window": 0}, "sliding_window=0 is not supported: it must be an integer of at least 1"),
        ({"sliding_window_pattern": 0, "layer_types": None}, "sliding_window_pattern=0 must be an integer"),
        ({"rope_parameters": {"rope_theta": 5.0}}, "it must have full_attention and sliding_attention"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "proportional"}}},
            "rope_type='proportional' is not supported",
        ),
        ({"model_type": "embedding_gemma2"}, "config.json does not specify vocab_size, hidden_size"),
        ({"model_type": "embedding_gemma2", "text_config": 3}, "text_config=3 must be an object"),
    ],
)
def test_unsupported_values_are_rejected_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EncoderConfig.from_dict(FILE | changes)
