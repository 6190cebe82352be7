"""A custom attention mechanism, end to end: checkpoint, bundle, server and client.

It requires only tests/toy_attention.py and one entry in the table of kinds.
"""

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
from attnlens_model import Encoder, EncoderConfig, load_checkpoint, new_encoder
from attnlens_model.attention.kinds import ATTENTION_KINDS
from served import ServerProcess
from toy_attention import TOY_GATES, ToyAttentionConfig

TOKEN_IDS = [2, 17, 5, 40, 3]
GRID = small_grid(16)


@pytest.fixture
def encoder(monkeypatch: pytest.MonkeyPatch) -> Encoder:
    """Return an encoder with three layers: toy, softmax, toy."""
    monkeypatch.setitem(ATTENTION_KINDS, "toy", ToyAttentionConfig)
    config = EncoderConfig.from_dict(
        {
            "family": "attnlens",
            "hidden_size": 24,
            "num_layers": 3,
            "embeddings": {"vocab_size": 50},
            "positions": {"max_position_embeddings": 16},
            "attention": [{"kind": "toy", "num_heads": 3}, {"kind": "softmax", "num_heads": 4}],
            "feed_forward": {"intermediate_size": 20},
        }
    )
    return new_encoder(config, seed=3)


@pytest.fixture
def checkpoint(encoder: Encoder, tmp_path: Path) -> Path:
    """Checkpoint as saved after training."""
    directory = tmp_path / "trained"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(encoder.config.to_hugging_face()), encoding="utf-8")
    save_file(encoder.state_dict(), directory / "model.safetensors")
    return directory


def test_custom_checkpoint_is_loaded_as_saved(encoder: Encoder, checkpoint: Path) -> None:
    loaded = load_checkpoint(checkpoint)
    assert loaded.config == encoder.config
    assert loaded.unused_tensors == ()
    for name, tensor in loaded.encoder.state_dict().items():
        assert tensor.equal(encoder.state_dict()[name])


def test_custom_layer_outputs_reach_the_client(encoder: Encoder, checkpoint: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    export_bundle(checkpoint, bundle, ExportOptions(pooling="mean", grid=GRID))
    assert check_bundle(bundle, checkpoint, grid=GRID).verdict.passed
    manifest = read_manifest(bundle)
    gates = [
        output for output in manifest.graphs[1].outputs if output.role == OutputRole.OUTPUT_ROLE_HEAD_GATES
    ]
    assert [(output.value.name, output.layer, output.num_heads) for output in gates] == [
        ("head_gates.0", 0, 3),
        ("head_gates.2", 2, 3),
    ]
    assert {output.layout for output in gates} == {OutputLayout.OUTPUT_LAYOUT_PER_TOKEN}
    assert {output.row_sum for output in gates} == {RowSum.ROW_SUM_UNBOUNDED}
    assert [layer.attention for layer in manifest.architecture.layers] == ["toy", "softmax", "toy"]
    measured = {OutputRole.Name(figure.role) for figure in manifest.parity.figures}
    assert "OUTPUT_ROLE_HEAD_GATES" in measured

    with torch.inference_mode():
        mask = torch.ones(1, len(TOKEN_IDS), dtype=torch.int64)
        expected = encoder(torch.tensor([TOKEN_IDS]), mask, output_attentions=True)
    queries = [AttentionQuery(layers=[0, 2]), AttentionQuery(role="head_gates", heads=[2, 0])]
    with ServerProcess(bundle) as server, Client(server.address) as client:
        [text] = client.encode([TOKEN_IDS], attention=queries)
        [streamed] = client.encode_stream([TOKEN_IDS], attention=queries)
        assert [(output.role, output.layer) for output in client.get_model().outputs][-1] == ("head_gates", 2)
    for result in (text, streamed):
        weights, found = result.attention
        assert (found.layout, found.layers, found.heads, found.row_sum) == (
            "per_token",
            (0, 2),
            (2, 0),
            "unbounded",
        )
        for place, layer in enumerate((0, 2)):
            outputs = expected.layers[layer]
            np.testing.assert_allclose(weights.weights[place], expected.attentions[layer][0], atol=1e-5)
            np.testing.assert_allclose(found.weights[place], outputs[TOY_GATES][0][:, [2, 0]], atol=1e-5)
