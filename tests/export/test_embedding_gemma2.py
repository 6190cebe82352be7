"""A bundle of EmbeddingGemma 2, made from the model of images, sound and text around its text half."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import EmbeddingGemma2Config, EmbeddingGemma2Model

from attnlens.bundle import read_manifest
from attnlens_export import ExportOptions, export_bundle
from attnlens_export.parity.grid import small_grid
from attnlens_model import read_config
from family_cases.decoders import GEMMA2_SIZES
from odd_models import SIZES


def test_bundle_of_the_whole_model_has_the_sizes_of_its_token_vectors_and_the_file_of_its_text_half(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    text = SIZES | GEMMA2_SIZES | {"num_hidden_layers": 2}
    model: Any = EmbeddingGemma2Model(EmbeddingGemma2Config(text_config=text))
    model.save_pretrained(tmp_path / "source")
    options = ExportOptions(pooling="mean", grid=small_grid(9), faithfulness=False)
    summary = export_bundle(tmp_path / "source", tmp_path / "bundle", options)
    # The gates and the inputs of layers are products with the reciprocal of a norm.
    assert "contributions" in [graph.id for graph in summary.manifest.graphs]
    content = json.loads((tmp_path / "bundle" / "config.json").read_text())
    assert content["model_type"] == "embedding_gemma2_text"
    assert not {"text_config", "vision_config", "audio_config"} & set(content)
    assert (content["hidden_size"], content["embedding_dim"]) == (96, 72)
    assert read_config(tmp_path / "bundle" / "config.json").vector_size == 72
    assert read_manifest(tmp_path / "bundle").architecture.hidden_size == 72
    pooling = json.loads((tmp_path / "bundle" / "1_Pooling" / "config.json").read_text())
    assert pooling["word_embedding_dimension"] == 72
