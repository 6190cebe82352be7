"""A bundle of NeoBERT, which is not among those of test_families.py: transformers has no such class."""

import json
from pathlib import Path

import numpy as np
import onnxruntime
import torch

from attnlens.bundle import read_manifest
from attnlens_export import ExportOptions, export_bundle
from attnlens_export.check import check_bundle
from attnlens_export.graph.names import CONTRIBUTIONS_PATH
from attnlens_export.parity.grid import Case, Padding, small_grid
from attnlens_model import EncoderConfig
from neobert_oracle import NeoBert
from odd_models import padded_masks
from runtimes.measured import found, measure


def test_graph_matches_the_other_implementation_in_every_runtime(tmp_path: Path) -> None:
    model = NeoBert.draw(num_hidden_layers=2)
    model.save(tmp_path / "source")
    bundle = tmp_path / "bundle"
    export_bundle(tmp_path / "source", bundle, ExportOptions(pooling="cls", grid=small_grid(64)))
    session = onnxruntime.InferenceSession(
        bundle / "onnx" / "model_attentions.onnx", providers=["CPUExecutionProvider"]
    )
    worst = 0.0
    for mask in padded_masks(4, 40):
        ids = torch.randint(1, 300, mask.shape, generator=torch.Generator().manual_seed(7)) * mask
        given = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
        live = mask.numpy() == 1
        for a, b in zip(given, model.run(ids, mask, torch.float32), strict=True):
            difference = np.abs(a - b.numpy())
            worst = max(worst, (difference if a.ndim == 3 else difference.transpose(0, 2, 1, 3))[live].max())
    print(f"NeoBERT: {worst:.2e}")  # noqa: T201 - shown by `pytest -rP`
    assert worst < 1e-5
    manifest = read_manifest(bundle)
    assert manifest.parity.passed
    assert (manifest.architecture.family, manifest.max_tokens) == ("neobert", 64)
    assert check_bundle(bundle, grid=[Case(2, 64, Padding.RIGHT)]).verdict.passed
    content = json.loads((bundle / "config.json").read_text("utf-8"))
    assert content["intermediate_size"] == model.content["intermediate_size"]
    assert EncoderConfig.from_dict(content) == EncoderConfig.from_dict(model.content)
    cases = [Case(1, 1, Padding.NONE), Case(2, 33, Padding.RIGHT)]
    for name in ("opencv", "openvino", "tract"):
        failures = measure(bundle, found(name), cases).failures()
        known = CONTRIBUTIONS_PATH if name == "opencv" else "-"  # docs/runtimes.md
        assert [line for line in failures if known not in line] == []
