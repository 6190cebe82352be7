"""`attnlens list` with valid and damaged bundles."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from attnlens_cli.commands.bundles.list_bundles import list_bundles
from stored_bundle import STORED_BUNDLE


def run_list(*arguments: object, columns: int = 100) -> Result:
    return CliRunner().invoke(list_bundles, list(map(str, arguments)), env={"COLUMNS": str(columns)})


@pytest.fixture
def bundles(tmp_path: Path) -> Path:
    """A directory with a valid bundle, a bundle with each kind of defect, and files that are not bundles."""
    directory = tmp_path / "bundles"
    for name in ("sound", "short", "altered", "failed"):
        shutil.copytree(STORED_BUNDLE, directory / name)
    (directory / "short" / "onnx" / "model.onnx").unlink()
    graph = directory / "altered" / "onnx" / "model.onnx"
    graph.write_bytes(graph.read_bytes()[:-1] + b"\x00")
    manifest = directory / "failed" / "manifest.json"
    content = json.loads(manifest.read_text())
    content["parity"]["passed"] = False
    manifest.write_text(json.dumps(content))
    for name in ("garbage", ".hidden", "no-bundle"):
        (directory / name).mkdir()
    for name in ("garbage", ".hidden"):
        (directory / name / "manifest.json").write_text("{")
    return directory


def listed(*arguments: object) -> dict[str, Any]:
    result = run_list(*arguments, "--json")
    return {Path(bundle["directory"]).name: bundle for bundle in json.loads(result.stdout)}


def test_json_contains_the_manifest_values_and_the_problems(bundles: Path) -> None:
    found = listed(bundles)
    assert list(found) == ["altered", "failed", "garbage", "short", "sound"]
    assert found["sound"]["problem"] == found["altered"]["problem"] == ""  # without --verify
    assert "it failed parity, see " in found["failed"]["problem"]
    assert "model.onnx is missing" in found["short"]["problem"]
    assert "is not a manifest" in found["garbage"]["problem"]
    assert found["garbage"]["facts"] is None
    facts = found["sound"]["facts"]
    manifest = json.loads((STORED_BUNDLE / "manifest.json").read_text())
    for name in ("family", "hidden_size", "num_layers", "num_heads"):
        assert facts[name] == manifest["architecture"][name]
    assert (facts["model"], facts["max_tokens"]) == (manifest["model_name"], manifest["max_tokens"])
    assert facts["precisions"] == ["fp32", "fp16"]
    assert facts["num_labels"] == 0
    files = [path for path in STORED_BUNDLE.rglob("*") if path.is_file()]
    assert facts["size_bytes"] == sum(path.stat().st_size for path in files if path.name != "manifest.json")


def test_verify_detects_damage_that_keeps_the_file_size(bundles: Path) -> None:
    result = run_list(bundles, "--verify", "--json")
    assert result.exit_code == 1
    assert "altered: its SHA-256 is" in listed(bundles, "--verify")["altered"]["problem"]
    assert run_list(bundles / "sound", "--verify").exit_code == 0


@pytest.mark.parametrize("columns", [60, 100])
def test_table_has_a_row_per_bundle_and_fits_the_terminal(bundles: Path, columns: int) -> None:
    result = run_list(bundles, columns=columns)
    assert result.exit_code == 0
    title, *lines = result.stdout.splitlines()
    assert title == str(bundles)
    assert all(len(line) <= columns for line in lines)
    names = [line.split()[0] for line in lines if line and not line.startswith((" ", "─"))]
    assert {"altered", "failed", "garbage", "short", "sound"} <= set(names)
    assert result.stdout.count("broken") == 3
    assert result.stdout.count("verified") == 2


def test_bundle_given_as_the_directory_is_listed(bundles: Path) -> None:
    assert list(listed(bundles / "sound")) == ["sound"]


def test_cache_and_bundles_directory_are_searched_by_default(
    bundles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bundles.parent)
    shutil.copytree(STORED_BUNDLE, tmp_path / "cache" / "org--model")
    assert {"sound", "org--model"} <= set(listed("--cache-dir", tmp_path / "cache"))
    monkeypatch.chdir(tmp_path / "cache")
    result = run_list("--cache-dir", tmp_path / "none")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"no bundles in {tmp_path}/none and bundles\n"


@pytest.mark.parametrize(
    ("labels", "line"), [(["relevance"], "reranker"), (["art", "law", "sea"], "classifier, 3 labels")]
)
def test_rerankers_and_classifiers_are_named(labels: list[str], line: str, tmp_path: Path) -> None:
    shutil.copytree(STORED_BUNDLE, tmp_path / "stored")
    manifest = tmp_path / "stored" / "manifest.json"
    head = {"labels": labels, "activation": "ACTIVATION_SIGMOID"}
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"classifier": head}))
    assert listed(tmp_path)["stored"]["facts"]["num_labels"] == len(labels)
    assert line in run_list(tmp_path).stdout
