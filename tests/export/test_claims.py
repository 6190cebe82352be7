"""Consistency of manifests and files, including bundles of older versions."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from google.protobuf import json_format

from attnlens.bundle import BundleError, read_manifest
from attnlens_cli.commands.bundles.check import check
from attnlens_export import ExportOptions, check_bundle, export_bundle
from attnlens_export.graph.trace import TracedGraph
from attnlens_export.parity.grid import small_grid
from attnlens_model import EncoderConfig
from small_files import read, sign, write

GRID = small_grid(2)


@pytest.fixture(scope="module")
def cut_bundle(
    tiny_config: EncoderConfig, tiny_trace: TracedGraph, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A bundle whose publisher keeps 8 of 48 components, scaled to length 1."""
    directory = tmp_path_factory.mktemp("claims") / "cut"
    options = ExportOptions(grid=GRID, tracer=lambda *_: tiny_trace, normalize=True)
    export_bundle(tiny_config, directory, options)
    write(directory / "config_sentence_transformers.json", {"truncate_dim": 8})
    sign(directory)
    manifest = read(directory / "manifest.json")
    manifest["pooling"]["truncate_dim"] = 8
    write(directory / "manifest.json", manifest)
    return directory


@pytest.fixture
def copied(cut_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(cut_bundle, tmp_path / "copy"))


def test_manifest_states_every_field_also_an_empty_one(copied: Path) -> None:
    stated = read(copied / "manifest.json")
    assert stated["source_revision"] == stated["default_prompt_name"] == ""
    assert (stated["prompts"], stated["pooling"]["exclude_prompt"]) == ({}, False)
    assert check_bundle(copied, grid=GRID).not_stated == ()


def without(manifest: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return the manifest as written by a version without these fields."""
    for name in names:
        *parents, last = name.split(".")
        parent: Any = manifest
        for key in parents:
            parent = parent[int(key) if key.isdigit() else key]
        del parent[last]
    return manifest


def test_field_that_an_older_version_did_not_know_is_skipped_and_named(copied: Path) -> None:
    names = ("source_revision", "pooling.truncate_dim", "graphs.1.ir_version", "architecture.num_heads")
    write(copied / "manifest.json", without(read(copied / "manifest.json"), *names))
    summary = check_bundle(copied, grid=GRID)
    assert summary.verdict.passed
    # `source_revision` does not follow from the files.
    assert sorted(summary.not_stated) == sorted(names[1:])
    shown = CliRunner().invoke(check, [str(copied), "--parity-tokens", "2"])
    assert shown.exit_code == 0, shown.output
    assert "not compared, because the manifest lacks it" in shown.stdout
    assert "pooling.truncate_dim" in shown.stdout


def test_manifest_without_empty_fields_passes(copied: Path) -> None:
    """As manifests were written at first."""
    text = json_format.MessageToJson(read_manifest(copied), preserving_proto_field_name=True)
    assert "source_revision" not in text
    (copied / "manifest.json").write_text(text, encoding="utf-8")
    assert check_bundle(copied, grid=GRID).not_stated == ()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("normalize", False, "pooling.normalize is False, but True according to the files"),
        ("truncate_dim", 0, "pooling.truncate_dim is 0, but 8 according to the files"),
        ("dense", [{"path": "2_Dense"}], "pooling.dense has 1 entries, but 0 according to the files"),
    ],
)
def test_stated_fields_are_compared_even_if_empty(
    field: str, value: object, message: str, copied: Path
) -> None:
    manifest = json.loads((copied / "manifest.json").read_text("utf-8"))
    manifest["pooling"][field] = value
    write(copied / "manifest.json", manifest)
    with pytest.raises(BundleError, match=message):
        check_bundle(copied, grid=GRID)


def test_prompt_that_is_not_stated_is_not_skipped(copied: Path) -> None:
    """Their names are no fields: one that is missing was not unknown to an older version."""
    settings = read(copied / "config_sentence_transformers.json")
    write(copied / "config_sentence_transformers.json", settings | {"prompts": {"query": "query: "}})
    sign(copied)
    with pytest.raises(BundleError, match=r"prompts\.query is None, but 'query: ' according to the files"):
        check_bundle(copied, grid=GRID)
