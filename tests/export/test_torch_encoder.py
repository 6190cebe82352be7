"""Bundles of encoders written with `nn.TransformerEncoder`, compared with the user's module."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from attnlens_export import ExportOptions, check_bundle, export_bundle
from attnlens_export.parity.grid import small_grid
from torch_encoders import NUM_POSITIONS, inputs, own_encoder, write

ROOT = Path(__file__).parents[2]
CONFIGURATIONS = [
    pytest.param({"activation": "relu"}, {}, id="post-norm, relu"),
    pytest.param({"activation": "gelu", "norm_first": True}, {"final_norm": True}, id="pre-norm, gelu"),
    pytest.param({"norm_first": True}, {}, id="pre-norm, relu, no final norm"),
    pytest.param(
        {"activation": "gelu", "batch_first": False}, {"scale_embeddings": True}, id="sequence first"
    ),
]


@pytest.mark.parametrize(("options", "extra"), CONFIGURATIONS)
def test_bundle_matches_the_users_module(
    tmp_path: Path, options: dict[str, Any], extra: dict[str, Any]
) -> None:
    module, checkpoint, bundle = own_encoder(options, extra), tmp_path / "checkpoint", tmp_path / "bundle"
    checkpoint.mkdir()
    write(checkpoint, module.state_dict(), **options, **extra)
    grid = small_grid(NUM_POSITIONS)
    summary = export_bundle(checkpoint, bundle, ExportOptions(pooling="mean", grid=grid, faithfulness=False))
    assert summary.verdict.passed
    assert check_bundle(bundle, checkpoint, grid=grid).verdict.passed
    input_ids, mask = inputs()
    with torch.no_grad():
        states, weights = module(input_ids, mask)
    session = onnxruntime.InferenceSession(bundle / "onnx" / "model_attentions.onnx")
    feed = {"input_ids": input_ids.numpy(), "attention_mask": mask.numpy()}
    result = dict(zip((value.name for value in session.get_outputs()), session.run(None, feed), strict=True))
    live = mask.numpy().astype(bool)
    assert np.abs(result["last_hidden_state"] - states.numpy())[live].max() <= 1e-5
    for layer, expected in enumerate(weights):
        difference = (result[f"attentions.{layer}"] - expected.numpy()).transpose(0, 2, 1, 3)[live]
        assert np.abs(difference).max() <= 1e-5
        assert np.abs(difference.mean(axis=1)).max() <= 1e-5


@pytest.mark.extended
def test_example_trains_exports_and_explains(tmp_path: Path) -> None:
    command = [sys.executable, "examples/own_encoder.py", "--steps", "2", "--output", str(tmp_path)]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    assert "step 2: loss" in shown
    assert "left out because the encoder's outputs do not depend on them: task head (2 tensors" in shown
    assert "16 tokens; the largest contributions to the embedding:" in shown
    assert len(shown.partition("contributions to the embedding:\n")[2].splitlines()) == 5
