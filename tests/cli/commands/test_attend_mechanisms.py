"""`attnlens attend` with other mechanisms than softmax: bands, head gates, composed weights."""

import functools
import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from attnlens_client import AttentionQuery, Client
from attnlens_export import ExportOptions, export_bundle
from attnlens_export.parity.grid import small_grid
from mechanisms import mechanism_config
from served import ServerProcess
from small_bundles import TOKENIZERS

Run = Callable[..., subprocess.CompletedProcess[str]]

SENTENCE = "It rained, so the street was wet."
MIXTURE, COMPOSED = 1, 2


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], ServerProcess]]:
    """Return a function that serves the model with the given configuration of `mechanisms`."""
    with ExitStack() as servers:

        @functools.cache
        def start(name: str) -> ServerProcess:
            bundle = tmp_path_factory.mktemp(name) / "bundle"
            tokenizer = TOKENIZERS / "wordpiece" / "tokenizer.json"
            options = ExportOptions(grid=small_grid(16), tokenizer=tokenizer)
            export_bundle(mechanism_config(name), bundle, options)
            return servers.enter_context(ServerProcess(bundle))

        yield start


@pytest.fixture
def server(serve: Callable[[str], ServerProcess]) -> ServerProcess:
    return serve("heads")


@pytest.fixture
def attend(run: Run, server: ServerProcess) -> Run:
    def run_attend(*args: object) -> subprocess.CompletedProcess[str]:
        return run("attend", SENTENCE, "--address", server.address, *args)

    return run_attend


def test_gates_table_ends_with_the_load_of_each_head(attend: Run) -> None:
    result = attend("--gates", "--layer", str(MIXTURE))
    assert (result.returncode, result.stderr) == (0, "")
    lines = [line.split() for line in result.stdout.splitlines() if line.strip()]
    load = next(line for line in lines if line[0] == "load")
    assert load[1] == "1.00"  # the head that all tokens use
    assert sum(float(share) for share in load[2:]) == pytest.approx(2, abs=0.02)
    assert "head gates" in result.stdout
    assert "·" in result.stdout


def test_gates_as_json_match_the_server(attend: Run, server: ServerProcess) -> None:
    answer = json.loads(attend("--gates", "--layer", str(MIXTURE), "--json").stdout)
    with Client(server.address) as client:
        query = AttentionQuery(role="head_gates", layers=[MIXTURE])
        [text] = client.encode([SENTENCE], attention=query)
    np.testing.assert_allclose(answer["gates"], text.weights[0], atol=1e-6)
    assert answer["head_load"] == pytest.approx(text.attention[0].selected[0].mean(axis=0).tolist())
    with Client(server.address) as client:
        [plain] = client.encode([SENTENCE], attention=AttentionQuery(layers=[COMPOSED]))
    with pytest.raises(ValueError, match="request head_gates"):
        _ = plain.attention[0].selected


def test_composed_weights_keep_their_sign(attend: Run, server: ServerProcess) -> None:
    answer = json.loads(attend("--composed", "--layer", str(COMPOSED), "--head", "1", "--json").stdout)
    with Client(server.address) as client:
        query = AttentionQuery(role="attention_composed", layers=[COMPOSED], heads=[1])
        [text] = client.encode([SENTENCE], attention=query)
    np.testing.assert_allclose(answer["weights"], text.weights[0, 0], atol=1e-6)
    shown = attend("--composed", "--layer", str(COMPOSED), "--head", "1").stdout
    assert "rows may have any sum" in shown
    assert "head 1, composed, " in shown


def test_band_is_shown_as_dense_weights(
    run: Run, serve: Callable[[str], ServerProcess], tmp_path: Path
) -> None:
    command = ("attend", SENTENCE, "--address", serve("longformer").address, "--layer", "0")
    weights = np.array(json.loads(run(*command, "--json").stdout)["weights"])
    places = np.arange(len(weights))
    is_global = places < 2
    outside = (np.abs(places[:, None] - places) > 4) & ~is_global[:, None] & ~is_global
    assert outside.any()
    assert (weights[outside] == 0).all()
    np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-5)
    result = run(*command, "--image", tmp_path / "band.png")
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
    assert (answer["axes"], answer["layers"]) == (["layers"], [0, 1, 2, 3])
    assert np.array(answer["weights"]).shape == (4, answer["num_tokens"], answer["num_tokens"])
    gates = json.loads(attend("--gates", "--layer", "all", "--json").stdout)
    assert (gates["layers"], np.array(gates["gates"]).shape) == ([1], (1, gates["num_tokens"], 4))
    assert "Layer 1:" in attend("--gates", "--layer", "all").stdout
