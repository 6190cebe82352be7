"""Output directory: complete or missing, and what it may replace."""

import dataclasses
import errno
import os
from pathlib import Path

import pytest

from attnlens.bundle import read_manifest, verify_files
from attnlens_export import (
    ExportOptions,
    OutputError,
    ParityError,
    bundle,
    export_bundle,
)
from attnlens_export.graph.trace import TracedGraph
from attnlens_model import EncoderConfig


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("stage", ["Initializing", "Tracing", "Writing", "Parity", "Hashing"])
def test_interrupted_export_leaves_nothing(
    quick: ExportOptions,
    stage: str,
    interruption: type[BaseException],
    tiny_config: EncoderConfig,
    output: Path,
) -> None:
    def interrupt(current: str, _detail: str, _done: int, _total: int) -> None:
        if current.startswith(stage):
            raise interruption

    with pytest.raises(interruption):
        export_bundle(tiny_config, output, quick, interrupt)
    assert list(output.parent.iterdir()) == []


def test_unfinished_export_has_no_manifest(
    quick: ExportOptions, tiny_config: EncoderConfig, output: Path
) -> None:
    """Even where a process is killed and can't clean up."""
    seen: list[Path] = []

    def look(_stage: str, _detail: str, _done: int, _total: int) -> None:
        assert not output.exists()
        seen.extend(output.parent.rglob("manifest.json"))

    export_bundle(tiny_config, output, quick, look)
    assert seen == []
    assert (output / "manifest.json").exists()


def test_existing_bundle_is_replaced_only_with_force(
    quick: ExportOptions, tiny_config: EncoderConfig, output: Path
) -> None:
    export_bundle(tiny_config, output, dataclasses.replace(quick, name="old"))
    (output / "note.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(OutputError, match="--force"):
        export_bundle(tiny_config, output, quick)
    assert read_manifest(output).model_name == "old"
    export_bundle(tiny_config, output, dataclasses.replace(quick, name="new", force=True))
    assert read_manifest(output).model_name == "new"
    assert not (output / "note.txt").exists()
    assert [path.name for path in output.parent.iterdir()] == ["tiny"]


def test_failed_export_by_force_leaves_the_old_bundle(
    broken: ExportOptions, tiny_config: EncoderConfig, output: Path, tiny_trace: TracedGraph
) -> None:
    export_bundle(tiny_config, output, dataclasses.replace(broken, name="old", tracer=lambda *_: tiny_trace))
    with pytest.raises(ParityError):
        export_bundle(tiny_config, output, dataclasses.replace(broken, force=True))
    verify_files(output, read_manifest(output))
    assert read_manifest(output).model_name == "old"
    assert [path.name for path in output.parent.iterdir()] == ["tiny"]


def test_link_to_a_bundle_stays_a_link(
    quick: ExportOptions, tiny_config: EncoderConfig, output: Path, tmp_path: Path
) -> None:
    export_bundle(tiny_config, output, quick)
    link = tmp_path / "current"
    link.symlink_to(output)
    export_bundle(tiny_config, link, dataclasses.replace(quick, name="new", force=True))
    assert link.is_symlink()
    assert read_manifest(output).model_name == "new"


def test_force_does_not_delete_other_directories(
    quick: ExportOptions, tiny_config: EncoderConfig, output: Path
) -> None:
    output.mkdir()
    (output / "thesis.tex").write_text("mine", encoding="utf-8")
    with pytest.raises(OutputError, match="is not a bundle"):
        export_bundle(tiny_config, output, dataclasses.replace(quick, force=True))
    assert (output / "thesis.tex").exists()


@pytest.mark.parametrize("manifest", ['{"name": "My web app", "icons": []}', "[]", "", "{"])
def test_force_does_not_delete_a_directory_with_a_manifest_of_another_kind(
    quick: ExportOptions, manifest: str, tiny_config: EncoderConfig, output: Path
) -> None:
    output.mkdir()
    (output / "manifest.json").write_text(manifest, encoding="utf-8")
    (output / "index.html").write_text("mine", encoding="utf-8")
    with pytest.raises(OutputError, match="is not a bundle"):
        export_bundle(tiny_config, output, dataclasses.replace(quick, force=True))
    assert {path.name for path in output.iterdir()} == {"manifest.json", "index.html"}


def test_target_created_during_an_export_is_not_replaced(
    quick: ExportOptions, tiny_config: EncoderConfig, output: Path
) -> None:
    def appear(stage: str, _detail: str, _done: int, _total: int) -> None:
        if stage.startswith("Hashing"):
            output.mkdir()
            (output / "thesis.tex").write_text("mine", encoding="utf-8")

    with pytest.raises(OutputError, match="is not a bundle"):
        export_bundle(tiny_config, output, dataclasses.replace(quick, force=True), appear)
    assert [path.name for path in output.iterdir()] == ["thesis.tex"]
    assert [path.name for path in output.parent.iterdir()] == ["tiny"]


def test_failed_export_removes_the_parents_that_it_made(
    broken: ExportOptions, tiny_config: EncoderConfig, output: Path
) -> None:
    with pytest.raises(ParityError):
        export_bundle(tiny_config, output / "a" / "b", broken)
    assert list(output.parent.iterdir()) == []


def test_full_disk_is_reported_with_the_target(
    quick: ExportOptions, tiny_config: EncoderConfig, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(bundle, "write_embedded", fill)
    with pytest.raises(OutputError, match=r"bundles/tiny can't be written: No space left on device"):
        export_bundle(tiny_config, output, quick)
    assert list(output.parent.iterdir()) == []


def test_unreadable_source_is_not_reported_as_a_target_error(
    quick: ExportOptions, tiny_config: EncoderConfig, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/checkpoint/LICENSE")

    monkeypatch.setattr(bundle, "copy_described", refuse)
    with pytest.raises(PermissionError, match="/checkpoint/LICENSE"):
        export_bundle(tiny_config, output, quick)


def test_loop_of_links_is_rejected(quick: ExportOptions, tiny_config: EncoderConfig, output: Path) -> None:
    output.symlink_to(output)
    with pytest.raises(OutputError, match="is not a bundle"):
        export_bundle(tiny_config, output, quick)


def test_target_that_is_not_utf_8_is_rejected(tiny_config: EncoderConfig, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="is not UTF-8"):
        export_bundle(tiny_config, tmp_path / os.fsdecode(b"\xff"))
    assert list(tmp_path.iterdir()) == []


def test_empty_directory_is_taken(quick: ExportOptions, tiny_config: EncoderConfig, output: Path) -> None:
    output.mkdir()
    export_bundle(tiny_config, output, quick)
    assert (output / "manifest.json").exists()


def test_target_below_a_file_is_rejected(
    quick: ExportOptions, tiny_config: EncoderConfig, output: Path
) -> None:
    output.write_text("a file", encoding="utf-8")
    with pytest.raises(OutputError):
        export_bundle(tiny_config, output / "bundle", quick)
