"""Overlapping, mixture and composed heads, end to end: checkpoint, bundle, server and client."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from attnlens.bundle import read_manifest
from attnlens.v1.manifest_pb2 import OutputLayout, OutputRole, RowSum
from attnlens_client import AttentionQuery, Client
from attnlens_export import ExportOptions, check_bundle, export_bundle
from attnlens_export.parity.grid import small_grid
from attnlens_model import Encoder, load_checkpoint, new_encoder
from attnlens_model.attention.composed import ATTENTION_COMPOSED
from attnlens_model.attention.mixture import HEAD_GATES
from mechanisms import mechanism_config
from served import ServerProcess

TOKEN_IDS = [2, 17, 5, 40, 3]
GRID = small_grid(16)
KINDS = ["overlapping", "mixture", "composed", "softmax"]
# Role, layer, layout and row sum.
OUTPUTS = [
    ("attentions.0", OutputRole.OUTPUT_ROLE_ATTENTION_WEIGHTS, "DENSE", "ONE"),
    ("attentions.1", OutputRole.OUTPUT_ROLE_ATTENTION_WEIGHTS, "DENSE", "ONE"),
    ("head_gates.1", OutputRole.OUTPUT_ROLE_HEAD_GATES, "PER_TOKEN", "UNBOUNDED"),
    ("attentions.2", OutputRole.OUTPUT_ROLE_ATTENTION_WEIGHTS, "DENSE", "ONE"),
    ("attention_composed.2", OutputRole.OUTPUT_ROLE_ATTENTION_COMPOSED, "DENSE", "UNBOUNDED"),
    ("attentions.3", OutputRole.OUTPUT_ROLE_ATTENTION_WEIGHTS, "DENSE", "ONE"),
]


@pytest.fixture
def encoder() -> Encoder:
    """Return an encoder with one layer of each kind and weights at the scale of a trained model."""
    encoder = new_encoder(mechanism_config("heads"), seed=3)
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            if ".before." in name or ".after." in name:
                parameter.mul_(5)
    return encoder


@pytest.fixture
def checkpoint(encoder: Encoder, tmp_path: Path) -> Path:
    directory = tmp_path / "trained"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(encoder.config.to_hugging_face()), encoding="utf-8")
    save_file(encoder.state_dict(), directory / "model.safetensors")
    return directory


def test_weights_from_checkpoint_to_client_match_pytorch(
    encoder: Encoder, checkpoint: Path, tmp_path: Path
) -> None:
    loaded = load_checkpoint(checkpoint)
    assert (loaded.config, loaded.unused_tensors) == (encoder.config, ())
    bundle = tmp_path / "bundle"
    export_bundle(checkpoint, bundle, ExportOptions(pooling="mean", grid=GRID))
    assert check_bundle(bundle, checkpoint, grid=GRID).verdict.passed
    manifest = read_manifest(bundle)
    assert [layer.attention for layer in manifest.architecture.layers] == KINDS
    assert [
        (output.value.name, output.role, OutputLayout.Name(output.layout), RowSum.Name(output.row_sum))
        for output in manifest.graphs[1].outputs[1:]
    ] == [
        (name, role, f"OUTPUT_LAYOUT_{layout}", f"ROW_SUM_{row_sum}")
        for name, role, layout, row_sum in OUTPUTS
    ]
    measured = {OutputRole.Name(figure.role) for figure in manifest.parity.figures}
    assert {"OUTPUT_ROLE_HEAD_GATES", "OUTPUT_ROLE_ATTENTION_COMPOSED"} < measured

    with torch.inference_mode():
        mask = torch.ones(1, len(TOKEN_IDS), dtype=torch.int64)
        expected = encoder(torch.tensor([TOKEN_IDS]), mask, output_attentions=True)
    queries = [
        AttentionQuery(layers=[0, 1, 2]),
        AttentionQuery(role="head_gates", heads=[3, 0]),
        AttentionQuery(role="attention_composed", heads=[2]),
    ]
    with ServerProcess(bundle) as server, Client(server.address) as client:
        [text] = client.encode([TOKEN_IDS], attention=queries)
        [streamed] = client.encode_stream([TOKEN_IDS], attention=queries)
    for result in (text, streamed):
        weights, gates, composed = result.attention
        for layer in range(3):
            np.testing.assert_allclose(weights.weights[layer], expected.attentions[layer][0], atol=1e-5)
        assert (gates.layout, gates.layers, gates.row_sum) == ("per_token", (1,), "unbounded")
        in_torch = expected.layers[1][HEAD_GATES][0][:, [3, 0]]
        np.testing.assert_allclose(gates.weights[0], in_torch, atol=1e-5)
        assert (composed.layout, composed.layers, composed.row_sum) == ("dense", (2,), "unbounded")
        in_torch = expected.layers[2][ATTENTION_COMPOSED][0][[2]]
        np.testing.assert_allclose(composed.weights[0], in_torch, atol=1e-5)
