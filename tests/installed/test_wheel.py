"""The built wheel in a new environment, with each extra."""

import re
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest

from installed.environment import ROOT, Environment, serving, without_project

pytestmark = pytest.mark.timeout(1200)


def test_client_needs_three_packages(bare_environment: Environment) -> None:
    needed = bare_environment.packages() - {"pip", "setuptools", "attnlens"}
    assert needed == {
        "grpcio",
        "numpy",
        "protobuf",
        "typing-extensions",
    }  # typing_extensions is required by grpcio
    bare_environment.run("python", "-W", "error", "-c", "from attnlens_client import Client, AsyncClient")
    assert "pip install '.[cli]'" in bare_environment.run("attnlens", "--version", code=2).stderr


def test_wheel_serves_and_exports(
    server_environment: Environment, minilm_dir: Path, minilm_bundle: Path
) -> None:
    environment = server_environment
    assert environment.packages().isdisjoint({"torch", "transformers", "onnx", "sentence-transformers"})
    assert re.fullmatch(r"attnlens \d+\.\d+\.\d+\n", environment.run("attnlens", "--version").stdout)
    for name in ("attnlens@.service", "credentials.conf", "kubernetes/deployment.yaml"):
        printed = environment.run("attnlens", "deploy", name).stdout
        assert printed == (ROOT / "deploy" / name).read_text("utf-8")
    first = embed(environment, minilm_bundle)

    # `test_extras` checks what [export] lists, and `make release-check` installs it.
    environment.add(Path(onnx.__file__).parents[1])
    exported = environment.directory / "exported"
    # Compare a few shapes only: `minilm_bundle` was checked at every length.
    environment.run("attnlens", "export", minilm_dir, "--output", exported, "--parity-tokens", 16)
    np.testing.assert_allclose(embed(environment, exported), first, atol=1e-6)


def test_wheel_contains_the_data_files(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
    heads = "attnlens_analysis/heads"
    assert {
        "attnlens/oip/open_inference_pb2.py",
        "attnlens/oip/open_inference_pb2.pyi",
        "attnlens_runtimes/node/worker.mjs",
        f"{heads}/page.html",
        f"{heads}/data/ud_en_ewt_dev_500.tsv.gz",
        f"{heads}/data/coreference.tsv",
        f"{heads}/data/related_words.tsv",
        f"{heads}/data/LICENSE.md",
    } <= names
    deployed = (ROOT / "deploy").rglob("*")
    assert {f"attnlens_cli/{path.relative_to(ROOT)}" for path in deployed if path.is_file()} <= names
    assert not any("typescript" in name or name.endswith(".ts") for name in names)
    assets = {name for name in names if name.startswith("attnlens_viewer/assets/")}
    files = ("live.js", "page.css", "page.js", "walkthrough.css", "walkthrough.js", "widget.js")
    assert assets == {f"attnlens_viewer/assets/{name}" for name in files}


def embed(environment: Environment, bundle: Path) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Serve a bundle and embed two lines, using only the installed command."""
    texts = environment.directory / "texts.txt"
    texts.write_text("A cat.\nA dog.\n")
    command = [environment.program("attnlens"), "serve", str(bundle), "--port", "0"]
    with serving(command, environment.directory, without_project()) as address:
        environment.run("attnlens", "embed", texts, "--address", address, "--output", "vectors.npy")
    vectors: np.ndarray[tuple[int, int], np.dtype[np.float32]] = np.load(
        environment.directory / "vectors.npy"
    )
    assert vectors.shape == (2, 384)
    return vectors
