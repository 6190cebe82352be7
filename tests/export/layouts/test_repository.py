"""A model repository appears whole or not at all, and only of a bundle that is good."""

import errno
import os
import shutil
from pathlib import Path

import onnx
import pytest

from attnlens.bundle import BundleError, describe_file, read_manifest, write_manifest
from attnlens.v1.manifest_pb2 import Manifest
from attnlens_export import ExportOptions, OutputError, SourceError, export_bundle
from attnlens_export.layouts import write_layout
from attnlens_export.layouts.served_model import model_name


def test_files_that_cannot_be_linked_are_copied(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: str, target: Path) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), source, None, str(target))

    monkeypatch.setattr(os, "link", refuse)
    summary = write_layout(tiny_bundle, "ovms", tmp_path / "models", link=True)
    assert (summary.num_linked, summary.num_copied) == (0, 3)
    copied = summary.directory / "tiny" / "1" / "model.onnx"
    assert copied.read_bytes() == (tiny_bundle / "onnx" / "model.onnx").read_bytes()
    assert copied.stat().st_nlink == 1


def test_layout_leaves_the_bundle_readable_by_pythons_onnx(tiny_bundle: Path, tmp_path: Path) -> None:
    """It refuses weights that have a second hard link, those of the bundle included."""
    copied = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    attentions = copied / "onnx" / "model_attentions.onnx"
    summary = write_layout(copied, "ovms", tmp_path / "models")
    assert (summary.num_linked, summary.num_copied) == (0, 3)
    onnx.checker.check_model(attentions)
    onnx.load(attentions)
    onnx.load(summary.directory / "tiny_attentions" / "1" / "model.onnx")
    assert "hard links" not in (summary.directory / "README.md").read_text("utf-8")
    linked = write_layout(copied, "ovms", tmp_path / "linked", link=True)
    assert (linked.num_linked, linked.num_copied) == (3, 0)
    with pytest.raises(onnx.checker.ValidationError, match="hard link"):
        onnx.load(attentions)
    assert "Files may be hard links to\nfiles of the bundle" in (linked.directory / "README.md").read_text(
        "utf-8"
    )


def test_full_disk_is_an_error_of_the_output(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: str, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), source, None, str(target))

    monkeypatch.setattr(os, "link", full)
    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OutputError, match=r"models can't be written: No space left"):
        write_layout(tiny_bundle, "triton", tmp_path / "models")
    assert list(tmp_path.iterdir()) == []


def test_link_in_the_bundle_is_followed(tiny_bundle: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    shutil.copytree(tiny_bundle, linked)
    graph = linked / "onnx" / "model.onnx"
    graph.rename(tmp_path / "blob")
    graph.symlink_to("../../blob")
    repository = write_layout(linked, "ovms", tmp_path / "models", link=True).directory
    assert not (repository / "tiny" / "1" / "model.onnx").is_symlink()
    assert (repository / "tiny" / "1" / "model.onnx").samefile(tmp_path / "blob")


def test_interruption_leaves_nothing(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_source: str, target: Path) -> None:
        assert target.parent.is_dir()
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "link", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_layout(tiny_bundle, "triton", tmp_path / "models", link=True)
    assert list(tmp_path.iterdir()) == []


def test_only_a_model_repository_is_replaced_and_only_with_force(tiny_bundle: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    write_layout(tiny_bundle, "triton", models)
    with pytest.raises(OutputError, match=r"models exists: .* replace it with --force"):
        write_layout(tiny_bundle, "ovms", models)
    write_layout(tiny_bundle, "ovms", models, force=True)
    assert (models / "config.json").exists()
    assert not list(models.rglob("config.pbtxt"))

    other = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, other)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    for path in (other, tmp_path / "mine"):
        with pytest.raises(OutputError, match="exists and is not a model repository made by attnlens"):
            write_layout(tiny_bundle, "triton", path, force=True)
    assert read_manifest(other).model_name == "tiny"
    # Nor does an export take a model repository for a bundle.
    with pytest.raises(OutputError, match="exists and is not a bundle"):
        export_bundle("nothing", models, ExportOptions(force=True))


@pytest.mark.parametrize("place", [".", "models", ".."])
def test_repository_is_outside_the_bundle(place: str, tiny_bundle: Path) -> None:
    before = sorted(tiny_bundle.rglob("*"))
    with pytest.raises(OutputError, match="overlap: choose a directory next to the bundle"):
        write_layout(tiny_bundle, "triton", tiny_bundle / place, force=True)
    assert sorted(tiny_bundle.rglob("*")) == before


@pytest.fixture
def damaged(tiny_bundle: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "damaged"
    shutil.copytree(tiny_bundle, copy)
    return copy


def test_altered_bundle_is_rejected(damaged: Path, tmp_path: Path) -> None:
    with (damaged / "onnx" / "model.onnx").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        [last] = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    with pytest.raises(BundleError, match=r"model\.onnx was altered"):
        write_layout(damaged, "triton", tmp_path / "models")
    assert not (tmp_path / "models").exists()


def test_bundle_that_failed_parity_is_rejected(damaged: Path, tmp_path: Path) -> None:
    manifest = read_manifest(damaged)
    manifest.parity.passed = False
    write_manifest(damaged, manifest)
    with pytest.raises(SourceError, match="failed parity"):
        write_layout(damaged, "triton", tmp_path / "models")


def test_bundle_whose_pooling_is_unknown_is_rejected(damaged: Path, tmp_path: Path) -> None:
    """As in a later version, whose README would be useless for clients."""
    path = damaged / "manifest.json"
    text = path.read_text("utf-8")
    assert "POOLING_MEAN" in text
    path.write_text(text.replace("POOLING_MEAN", "POOLING_OF_LATER"), "utf-8")
    with pytest.raises(SourceError, match="the pooling is missing or unknown"):
        write_layout(damaged, "triton", tmp_path / "models")
    assert not (tmp_path / "models").exists()


def test_weights_that_the_manifest_does_not_list_are_rejected(damaged: Path, tmp_path: Path) -> None:
    """They have no hash; a path that leads out of the bundle is one of them."""
    graph = damaged / "onnx" / "model_attentions.onnx"
    proto = onnx.load(graph, load_external_data=False)
    for tensor in proto.graph.initializer:
        for pair in tensor.external_data:
            if pair.key == "location":
                pair.value = "weights"
    graph.write_bytes(proto.SerializeToString())
    (damaged / "onnx" / "weights").symlink_to("model.onnx")
    manifest = read_manifest(damaged)
    [entry] = [each for each in manifest.files if each.path == "onnx/model_attentions.onnx"]
    entry.CopyFrom(describe_file(damaged, graph))
    write_manifest(damaged, manifest)
    with pytest.raises(SourceError, match=r"not in one file of the manifest.*weights"):
        write_layout(damaged, "triton", tmp_path / "models")


@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("all-MiniLM-L6-v2", "all-MiniLM-L6-v2"),
        ("my[/v2]", "my_v2"),
        ("../up", "up"),
        (".hidden", "hidden"),
        ("Größe 2", "Gr_e_2"),
        ('a"b', "a_b"),
    ],
)
def test_name_becomes_one_that_servers_take(name: str, served: str) -> None:
    assert model_name(Manifest(model_name=name)) == served


def test_name_without_a_letter_is_rejected() -> None:
    with pytest.raises(SourceError, match="export it again with another --name"):
        model_name(Manifest(model_name="模型"))
