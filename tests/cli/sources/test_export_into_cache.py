"""A checkpoint is exported into the cache once. A script that copies a bundle replaces the export."""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from attnlens_cli.commands.serving.serve import serve
from attnlens_cli.frame.failures import FAILURE, REPORTED_COMMAND, report
from attnlens_cli.sources import source as source_module
from attnlens_cli.sources.cache import default_directory, entry_of
from attnlens_cli.sources.source import Checkpoint, find_source, resolve
from stored_bundle import STORED_BUNDLE

Exporter = Callable[[str], None]
COPY = f"""\
while [ "$1" != --output ]; do shift; done
rm -rf "$2"; cp -r {STORED_BUNDLE} "$2"
"""


@pytest.fixture
def exporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Exporter:
    """Replace the export by a shell script that records its arguments and environment."""
    script = tmp_path / "exporter"

    def write(commands: str) -> None:
        recording = f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nenv >> {tmp_path}/environment\n'
        script.write_text(recording + commands)
        script.chmod(0o755)

    write(COPY)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(source_module, "find_spec", lambda _name: True)
    return write


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "my model"
    (directory / "1_Pooling").mkdir(parents=True)
    (directory / "modules.json").write_text('[{"path": ""}, {"path": "1_Pooling"}]')
    for name in ("config.json", "model.safetensors", "1_Pooling/config.json"):
        (directory / name).write_text("{}")
    return directory


def resolved(source: Path, cache: Path, precision: str = "fp32") -> Path:
    with click.Context(serve):
        return resolve(source, cache, precision)


def calls(tmp_path: Path) -> list[str]:
    return (tmp_path / "calls").read_text().splitlines()


@pytest.mark.usefixtures("exporter")
def test_second_start_uses_the_cached_bundle(
    checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "deep" / "cache"
    bundle = resolved(checkpoint, cache)
    output = capfd.readouterr()
    assert output.err.startswith(f"exporting {checkpoint} to {bundle} because it is not in the cache yet; ")
    assert output.out == ""  # reserved for the ready line
    assert bundle.parent == cache
    assert bundle.name.startswith("my-model--")
    assert (bundle / "manifest.json").read_bytes() == (STORED_BUNDLE / "manifest.json").read_bytes()
    assert resolved(checkpoint, cache) == bundle
    assert capfd.readouterr().err == f"{checkpoint} is in the cache: {bundle}\n"
    [call] = calls(tmp_path)
    assert call.endswith(f"export --output {bundle} --precision fp32 --force -- {checkpoint}")


@pytest.mark.usefixtures("exporter")
def test_each_revision_and_precision_has_its_own_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cache = tmp_path / "cache"
    names = [
        resolved(Path(source), cache, precision).name
        for source, precision in (
            ("org/model", "fp32"),
            ("org/model@refs/pr/1", "fp32"),
            ("org/model", "int8"),
            ("org/model@int8", "fp32"),
        )
    ]
    assert len(set(names)) == len(names)
    del names[-1]
    assert [name[:-10] for name in names] == ["org--model", "org--model--refs-pr-1", "org--model--int8"]
    assert [call.partition(" --precision ")[2] for call in calls(tmp_path)] == [
        "fp32 --force -- org/model",
        "fp32 --force --revision refs/pr/1 -- org/model",
        "int8 --force -- org/model",
        "fp32 --force --revision int8 -- org/model",
    ]


@pytest.mark.parametrize(
    ("name", "start"),
    [(".hidden", "hidden--"), ("東京", "model--"), ("\udcff x", "x--"), ("a" * 250, f"{'a' * 80}--")],
)
def test_cache_name_of_any_directory_is_a_valid_file_name(name: str, start: str, tmp_path: Path) -> None:
    directory = tmp_path / name
    directory.mkdir()
    entry = entry_of(tmp_path, Checkpoint("", directory).exported_from("fp32"))
    assert re.fullmatch(f"{start}[0-9a-f]{{8}}", entry.directory.name)
    with entry.locked():
        assert entry.reason_to_export() == "it is not in the cache yet"


DEEP = "[" * 200_000  # exceeds the recursion limit of a JSON parser


def record_of(bundle: Path) -> Path:
    return bundle.with_name(f".{bundle.name}.json")


def replace_by_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def _append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


def _damage_a_file(bundle: Path) -> None:
    path = bundle / "onnx" / "model.onnx"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda checkpoint, _: (checkpoint / "model.safetensors").write_text("[]"), "the files of the check"),
        (lambda checkpoint, _: (checkpoint / "1_Pooling" / "config.json").write_text("[]"), "the files of"),
        (
            lambda checkpoint, _: (checkpoint / "vocab.txt").touch(),
            "the files of the checkpoint have changed",
        ),
        (lambda _, bundle: _damage_a_file(bundle), "model.onnx was altered: its SHA-256 is "),
        (lambda _, bundle: (bundle / "manifest.json").write_text("{"), "manifest.json is not a manifest"),
        (lambda _, bundle: _append(bundle / "manifest.json", "\n"), "was replaced after"),
        (lambda _, bundle: record_of(bundle).write_text("[]"), "the origin of "),
        (lambda _, bundle: record_of(bundle).write_text(DEEP), "the origin of "),
        (lambda _, bundle: replace_by_pipe(record_of(bundle)), "the origin of "),
        (lambda _, bundle: shutil.rmtree(bundle), "it is not in the cache yet"),
    ],
)
@pytest.mark.usefixtures("exporter")
def test_outdated_or_damaged_bundle_is_exported_again_with_the_reason(
    change: Callable[[Path, Path], object],
    reason: str,
    checkpoint: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    bundle = resolved(checkpoint, tmp_path / "cache")
    change(checkpoint, bundle)
    capfd.readouterr()
    assert resolved(checkpoint, tmp_path / "cache") == bundle
    assert reason in capfd.readouterr().err
    assert len(calls(tmp_path)) == 2
    assert not entry_of(bundle.parent, Checkpoint("", checkpoint).exported_from("fp32")).reason_to_export()


@pytest.mark.usefixtures("exporter")
def test_bundle_of_another_version_of_attnlens_is_exported_again(checkpoint: Path, tmp_path: Path) -> None:
    bundle = resolved(checkpoint, tmp_path)
    entry = entry_of(tmp_path, Checkpoint("", checkpoint).exported_from("fp32"))
    assert entry.directory == bundle
    newer = replace(entry, expected=replace(entry.expected, attnlens="99.0"))
    assert newer.reason_to_export().endswith(", and this is 99.0")


@pytest.mark.usefixtures("exporter")
def test_change_in_a_module_of_any_name_is_noticed(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "pooling").mkdir()
    (checkpoint / "modules.json").write_text('[{"path": ""}, {"path": "pooling"}]')
    for mode in ("mean", "cls"):
        (checkpoint / "pooling" / "config.json").write_text(mode)
        resolved(checkpoint, tmp_path / "cache")
    assert len(calls(tmp_path)) == 2


@pytest.mark.usefixtures("exporter")
def test_failures_of_the_export_name_the_command_of_the_user(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with click.Context(serve, info_name="attnlens serve"):
        resolve(checkpoint, tmp_path / "cache", "fp32")
    assert f"{REPORTED_COMMAND}=attnlens serve\n" in (tmp_path / "environment").read_text()
    monkeypatch.setenv(REPORTED_COMMAND, "attnlens serve")
    assert report(click.ClickException("no such model"), "attnlens export", debug=False) == FAILURE
    assert capsys.readouterr().err.endswith("\nattnlens serve: no such model\n")


@pytest.mark.usefixtures("exporter")
def test_files_that_no_export_reads_do_not_cause_an_export(checkpoint: Path, tmp_path: Path) -> None:
    resolved(checkpoint, tmp_path / "cache")
    (checkpoint / "model.onnx").touch()
    (checkpoint / ".DS_Store").touch()
    (checkpoint / "checkpoint-500").mkdir()
    (checkpoint / "checkpoint-500" / "optimizer.bin").touch()
    resolved(checkpoint, tmp_path / "cache")
    assert len(calls(tmp_path)) == 1


@pytest.mark.usefixtures("exporter")
def test_directory_without_a_record_is_moved_and_not_deleted(
    checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    directory = entry_of(cache, Checkpoint("", checkpoint).exported_from("fp32")).directory
    directory.mkdir(parents=True)
    (directory / "thesis.tex").write_text("years of work")
    assert resolved(checkpoint, cache) == directory
    [kept] = cache.glob(f"{directory.name}.kept-*")
    assert (kept / "thesis.tex").read_text() == "years of work"
    assert f"the previous directory was moved to {kept}\n" in capfd.readouterr().err
    assert resolved(checkpoint, cache) == directory
    assert len(calls(tmp_path)) == 1


@pytest.mark.usefixtures("exporter")
def test_invalid_list_of_modules_is_reported_by_the_export(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "modules.json").write_text(DEEP)
    resolved(checkpoint, tmp_path / "cache")
    assert len(calls(tmp_path)) == 1


@pytest.mark.parametrize("name", ["modules.json", "config.json", "1_Pooling/config.json"])
def test_pipe_in_a_checkpoint_is_rejected_without_reading_it(
    name: str, checkpoint: Path, tmp_path: Path
) -> None:
    replace_by_pipe(checkpoint / name)
    with pytest.raises(click.ClickException, match=f"{name} is not a regular file: replace it"):
        resolved(checkpoint, tmp_path / "cache")


@pytest.mark.usefixtures("exporter")
@pytest.mark.parametrize("path", ["../outside", "1_Pooling/../../outside"])
def test_files_outside_of_a_checkpoint_are_not_read(path: str, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (checkpoint / "modules.json").write_text(json.dumps([{"path": ""}, {"path": path}]))
    before = Checkpoint("", checkpoint).exported_from("fp32")
    (tmp_path / "outside" / "secrets.txt").touch()
    assert Checkpoint("", checkpoint).exported_from("fp32") == before


def test_variables_for_the_export_command_do_not_affect_the_cache(
    exporter: Exporter, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del exporter
    monkeypatch.setenv("ATTNLENS_EXPORT_POOLING", "cls")
    monkeypatch.setenv("ATTNLENS_CONFIG_FILE", "attnlens.toml")
    resolved(checkpoint, tmp_path / "cache")
    names = (line.partition("=")[0] for line in (tmp_path / "environment").read_text().splitlines())
    assert [name for name in names if name.startswith("ATTNLENS")] == []


def test_failed_export_leaves_nothing_and_its_exit_code_is_kept(
    exporter: Exporter, checkpoint: Path, tmp_path: Path
) -> None:
    exporter("exit 3")
    with pytest.raises(click.exceptions.Exit) as caught:
        resolved(checkpoint, tmp_path / "cache")
    assert caught.value.exit_code == 3
    exporter("kill -9 $$")
    with pytest.raises(
        click.ClickException, match="was killed by signal 9; 9 often means that memory ran out"
    ):
        resolved(checkpoint, tmp_path / "cache")
    exporter(COPY)
    [left] = {path.name for path in (tmp_path / "cache").iterdir()}
    assert left.endswith(".lock")
    assert resolved(checkpoint, tmp_path / "cache").is_dir()


@pytest.mark.usefixtures("exporter")
def test_leftovers_of_a_killed_export_are_deleted(checkpoint: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    directory = entry_of(cache, Checkpoint("", checkpoint).exported_from("fp32")).directory
    left, others = (cache / f".{name}.0123abcd.partial" for name in (directory.name, "another"))
    for path in (left, others):
        path.mkdir(parents=True)
    resolved(checkpoint, cache)
    assert not left.exists()
    assert others.exists()


@pytest.mark.usefixtures("exporter")
def test_concurrent_process_waits_for_the_export(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = entry_of(tmp_path, find_checkpoint(checkpoint).exported_from("fp32"))
    is_held, is_waiting, messages = threading.Event(), threading.Event(), []

    def export_elsewhere() -> None:
        # Like another process, this thread locks its own open file.
        with (tmp_path / f".{entry.directory.name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            is_held.set()
            assert is_waiting.wait(60)
            shutil.copytree(STORED_BUNDLE, entry.directory)
            entry.record()

    def record_message(message: str, *, err: bool) -> None:
        assert err
        messages.append(message)
        is_waiting.set()

    other = threading.Thread(target=export_elsewhere)
    other.start()
    assert is_held.wait(60)
    monkeypatch.setattr(click, "echo", record_message)
    assert resolved(checkpoint, tmp_path) == entry.directory
    other.join()
    assert messages == [f"waiting for another process that exports {entry.directory}"]
    assert not (tmp_path / "calls").exists()


def find_checkpoint(directory: Path) -> Checkpoint:
    found = find_source(directory)
    assert isinstance(found, Checkpoint)
    return found


def test_sigterm_ends_the_export_and_the_command(
    exporter: Exporter, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter("exec sleep 600")
    is_waiting, pids = threading.Event(), []

    class Watched(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            pids.append(self.pid)
            is_waiting.set()
            return super().wait(timeout)

    def stop_once_it_waits() -> None:
        assert is_waiting.wait(60)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", Watched)
    stopper = threading.Thread(target=stop_once_it_waits)
    stopper.start()
    result = CliRunner().invoke(serve, [str(checkpoint), "--cache-dir", str(tmp_path / "cache")])
    stopper.join()
    assert result.exit_code == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


PROGRAM = """
import sys
from pathlib import Path
import click
from attnlens_cli.commands.serving.serve import serve
from attnlens_cli.sources import source
sys.executable, checkpoint, cache = sys.argv[1:]
source.find_spec = lambda _: True
with click.Context(serve):
    source.resolve(Path(checkpoint), Path(cache), "fp32")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a feature of Linux")
def test_export_ends_when_its_parent_is_killed(checkpoint: Path, tmp_path: Path) -> None:
    script = tmp_path / "slow_exporter"
    program = (
        "import signal, sys; from attnlens_cli.frame.signals import end_with_parent; end_with_parent(); "
        "print('started', file=sys.stderr, flush=True); signal.pause()"
    )
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{program}"\n')
    script.chmod(0o755)
    command = [sys.executable, "-c", PROGRAM, str(script), str(checkpoint), str(tmp_path / "cache")]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as parent:
        assert parent.stderr is not None
        assert b"started\n" in iter(parent.stderr.readline, b"")
        parent.kill()
        parent.communicate(timeout=30)  # waits for the child, which has inherited the pipe
    entry = entry_of(tmp_path / "cache", find_checkpoint(checkpoint).exported_from("fp32"))
    with entry.locked():
        assert entry.reason_to_export() == "it is not in the cache yet"


def test_missing_extra_is_reported_with_the_command_that_installs_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "find_spec", lambda name: None if name == "torch" else True)
    with pytest.raises(click.UsageError, match=r"a checkpoint, and .* needs torch, which .*export,server"):
        resolved(checkpoint, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_cache_that_is_not_writable_is_reported_with_the_option(
    exporter: Exporter, checkpoint: Path, tmp_path: Path
) -> None:
    del exporter
    (tmp_path / "file").touch()
    with pytest.raises(click.ClickException, match=r"is not writable \(.*\): use another --cache-dir DIR"):
        resolved(checkpoint, tmp_path / "file" / "cache")


def test_default_cache_follows_the_xdg_specification(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/caches")
    assert default_directory() == Path("/var/caches/attnlens")
    monkeypatch.setenv("HOME", "/home/user")
    for unset in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert default_directory() == Path("/home/user/.cache/attnlens")
