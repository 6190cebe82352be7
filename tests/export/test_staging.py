"""Directories that appear complete or not at all, and those that they replace."""

import shutil
import sys
import threading
from pathlib import Path

import pytest

from attnlens.bundle import FORMAT_VERSION, read_manifest, write_manifest
from attnlens.v1.manifest_pb2 import Manifest
from attnlens_export import OutputError, staging
from attnlens_export.exchange import exchange
from attnlens_export.staging import staged

can_exchange = pytest.mark.skipif(sys.platform != "linux", reason="renameat2 is Linux's")


@pytest.fixture
def no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a system, or a file system, that can't exchange two directories in one step."""
    monkeypatch.setattr(staging, "exchange", lambda _first, _second: False)


def write_bundle(output: Path, name: str) -> None:
    with staged(output, force=True) as directory:
        write_manifest(directory, Manifest(format_version=FORMAT_VERSION, model_name=name))


def assert_alone(output: Path, name: str) -> None:
    assert read_manifest(output).model_name == name
    assert list(output.parent.iterdir()) == [output]


@can_exchange
def test_bundle_is_replaced_in_one_step(output: Path) -> None:
    """Another thread looks all the time, and never finds nothing there."""
    write_bundle(output, "0")
    done, missed = threading.Event(), []

    def look() -> None:
        while not done.is_set():
            if not output.is_dir():
                missed.append(output)

    looker = threading.Thread(target=look)
    looker.start()
    try:
        for number in range(1, 301):
            write_bundle(output, str(number))
    finally:
        done.set()
        looker.join()
    assert missed == []
    assert_alone(output, "300")


@can_exchange
def test_replacing_in_one_step_renames_nothing_twice(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bundle(output, "old")
    monkeypatch.delattr(Path, "rename")
    write_bundle(output, "new")
    assert_alone(output, "new")


@pytest.mark.usefixtures("no_exchange")
def test_two_step_replacement_has_the_same_result(output: Path) -> None:
    write_bundle(output, "old")
    write_bundle(output, "new")
    assert_alone(output, "new")


@pytest.mark.usefixtures("no_exchange")
@pytest.mark.parametrize("failure", [OSError("no"), KeyboardInterrupt()])
def test_old_bundle_comes_back_where_the_new_one_cannot_be_moved(
    failure: BaseException, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bundle(output, "old")
    rename = Path.rename

    def fail_for_the_new_one(path: Path, target: Path) -> Path:
        if path.suffix == ".partial":
            raise failure
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_for_the_new_one)
    with pytest.raises((OutputError, KeyboardInterrupt)):
        write_bundle(output, "new")
    assert_alone(output, "old")


@pytest.mark.usefixtures("no_exchange")
def test_of_two_exports_by_force_one_wins_and_nothing_else_stays(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bundle(output, "old")
    rename = Path.rename

    def another_is_faster(path: Path, target: Path) -> Path:
        if path.suffix == ".partial":
            shutil.copytree(path, target)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", another_is_faster)
    with pytest.raises(OutputError, match="can't be moved"):
        write_bundle(output, "new")
    assert_alone(output, "new")


@can_exchange
def test_directory_created_during_the_exchange_is_restored(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody's directory in the place of the bundle that was to be replaced."""
    write_bundle(output, "old")

    def somebody_is_faster(first: Path, second: Path) -> bool:
        if (second / "manifest.json").exists() and not (second / "thesis.tex").exists():
            shutil.rmtree(second)
            second.mkdir()
            (second / "thesis.tex").write_text("mine", encoding="utf-8")
        return exchange(first, second)

    monkeypatch.setattr(staging, "exchange", somebody_is_faster)
    with pytest.raises(OutputError, match=r"another process replaced .* by something that is not a bundle"):
        write_bundle(output, "new")
    assert (output / "thesis.tex").read_text("utf-8") == "mine"
    assert list(output.parent.iterdir()) == [output]


@can_exchange
def test_exchange_with_nothing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(FileNotFoundError):
        exchange(tmp_path / "there", tmp_path / "not there")


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_exchange_is_unsupported_on_other_systems(
    platform: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert not exchange(tmp_path, tmp_path)
