"""`attnlens attend` with other mechanisms than softmax: bands, head gates, composed weights."""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from attnlens_client import AttentionQuery, Client
from attnlens_export import ExportOptions, export_bundle
from attnlens_export.parity.grid import small_grid
from attnlens_model import EncoderConfig
from served import ServerProcess
from small_bundles import TOKENIZERS

Run = Callable[..., subprocess.CompletedProcess[str]]

SENTENCE = "It rained, so the street was wet."
LAYERS = [
    {"kind": "longformer", "num_heads": 4, "window": 2},
    {"kind": "mixture", "num_heads": 4, "shared_heads": 1, "active_heads": 2},
    {"kind": "composed", "num_heads": 4},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Serve a model with a Longformer, a mixture and a composed layer."""
    bundle = tmp_path_factory.mktemp("mechanisms") / "bundle"
    config = EncoderConfig.from_dict(
        {
            "family": "attnlens",
            "hidden_size": 24,
            "num_layers": 3,
            "embeddings": {"vocab_size": 400},
            "positions": {"max_position_embeddings": 32},
            "attention": LAYERS,
            "feed_forward": {"intermediate_size": 20},
        }
    )
    tokenizer = TOKENIZERS / "wordpiece" / "tokenizer.json"
    export_bundle(config, bundle, ExportOptions(grid=small_grid(16), tokenizer=tokenizer))
    with ServerProcess(bundle) as server:
        yield server


@pytest.fixture
def attend(run: Run, server: ServerProcess) -> Run:
    def run_attend(*args: object) -> subprocess.CompletedProcess[str]:
        return run("attend", SENTENCE, "--address", server.address, *args)

    return run_attend


def test_gates_table_ends_with_the_load_of_each_head(attend: Run) -> None:
    result = attend("--gates", "--layer", "1")
    assert (result.returncode, result.stderr) == (0, "")
    lines = [line.split() for line in result.stdout.splitlines() if line.strip()]
    load = next(line for line in lines if line[0] == "load")
    assert load[1] == "1.00"  # the head that all tokens use
    assert sum(float(share) for share in load[2:]) == pytest.approx(2, abs=0.02)
    assert "head gates" in result.stdout
    assert "·" in result.stdout


def test_gates_as_json_match_the_server(attend: Run, server: ServerProcess) -> None:
    answer = json.loads(attend("--gates", "--layer", "1", "--json").stdout)
    with Client(server.address) as client:
        query = AttentionQuery(role="head_gates", layers=[1])
        [text] = client.encode([SENTENCE], attention=query)
    np.testing.assert_allclose(answer["gates"], text.weights[0], atol=1e-6)
    assert answer["head_load"] == pytest.approx(text.attention[0].selected[0].mean(axis=0).tolist())
    with Client(server.address) as client:
        [plain] = client.encode([SENTENCE], attention=AttentionQuery(layers=[2]))
    with pytest.raises(ValueError, match="request head_gates"):
        _ = plain.attention[0].selected


def test_composed_weights_keep_their_sign(attend: Run, server: ServerProcess) -> None:
    answer = json.loads(attend("--composed", "--layer", "2", "--head", "1", "--json").stdout)
    with Client(server.address) as client:
        query = AttentionQuery(role="attention_composed", layers=[2], heads=[1])
        [text] = client.encode([SENTENCE], attention=query)
    np.testing.assert_allclose(answer["weights"], text.weights[0, 0], atol=1e-6)
    shown = attend("--composed", "--layer", "2", "--head", "1").stdout
    assert "rows may have any sum" in shown
    assert "head 1, composed, " in shown


def test_band_is_shown_as_dense_weights(attend: Run, tmp_path: Path) -> None:
    weights = np.array(json.loads(attend("--layer", "0", "--json").stdout)["weights"])
    places = np.arange(len(weights))
    outside = (np.abs(places[:, None] - places) > 2) & (places[:, None] > 0) & (places > 0)
    assert outside.any()
    assert (weights[outside] == 0).all()
    np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-5)
    result = attend("--layer", "0", "--image", tmp_path / "band.png")
    assert result.returncode == 0
    assert (tmp_path / "band.png").read_bytes().startswith(b"\x89PNG")


def test_output_that_a_model_or_layer_lacks_is_rejected(attend: Run) -> None:
    result = attend("--gates", "--layer", "0")
    assert result.returncode != 0
    assert "a layer without this output: use 1" in result.stderr
    both = attend("--gates", "--composed")
    assert (both.returncode, "--gates excludes" in both.stderr) == (2, True)


def test_layers_of_different_kinds_are_shown_together(attend: Run, tmp_path: Path) -> None:
    picture = tmp_path / "all.svg"
    result = attend("--layer", "all", "--image", picture, "--json")
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert (answer["axes"], answer["layers"]) == (["layers"], [0, 1, 2])
    assert np.array(answer["weights"]).shape == (3, answer["num_tokens"], answer["num_tokens"])
    gates = json.loads(attend("--gates", "--layer", "all", "--json").stdout)
    assert (gates["layers"], np.array(gates["gates"]).shape) == ([1], (1, gates["num_tokens"], 4))
    assert "Layer 1:" in attend("--gates", "--layer", "all").stdout
