"""The text encoder of a multimodal checkpoint."""

from pathlib import Path
from typing import Any

import torch
from transformers import EmbeddingGemma2Config, EmbeddingGemma2Model

from attnlens_model import load_checkpoint

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


def test_text_half_of_the_whole_model_is_read_and_the_towers_are_reported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = EmbeddingGemma2Config(text_config=TEXT, vision_config=VISION, audio_config=AUDIO)
    config._attn_implementation = "eager"
    model: Any = EmbeddingGemma2Model(config)
    model.eval().save_pretrained(tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    towers = {name.partition(".")[0] for name in checkpoint.unused_tensors}
    assert checkpoint.config.family == "embedding_gemma2_text"
    assert towers == {"vision_tower", "embed_vision", "audio_tower", "embed_audio"}
    ids = torch.randint(3, 300, (2, 17), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    with torch.no_grad():
        found = checkpoint.encoder(ids, mask).last_hidden_state
        expected = model(input_ids=ids, attention_mask=mask).last_hidden_state
    assert found.shape == (2, 17, 72)
    assert (found - expected).abs().max() < 1e-5
