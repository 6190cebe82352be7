"""`attnlens try`: tokens, embedding, contributions, attention and similarities from a temporary server."""

import shlex
import shutil
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result

from attnlens_cli.commands.serving import try_source as try_module
from attnlens_cli.commands.serving.try_source import try_source
from attnlens_cli.sources import source
from attnlens_cli.sources.child import child_server
from attnlens_client import Client
from served import ServerProcess
from small_files import sign
from stored_bundle import STORED_BUNDLE

FIRST, SECOND = "The animal didn't cross the street because it was too tired.", "\x1b[31mAn animal."


def run_try(*arguments: object, columns: int = 100) -> Result:
    return CliRunner().invoke(try_source, list(map(str, arguments)), env={"COLUMNS": str(columns)})


def test_output_has_the_numbers_of_a_server(minilm_bundle: Path, minilm_server: ServerProcess) -> None:
    result = run_try(minilm_bundle, FIRST, SECOND)
    assert (result.exit_code, result.stderr) == (0, "")
    with Client(minilm_server.address) as client:
        vectors = client.embed([FIRST, SECOND])
        [explanation] = client.explain([FIRST], level="words")
    lines = result.stdout.splitlines()
    assert lines[0] == "all-MiniLM-L6-v2: bert, 6 layers, 12 heads, up to 256 tokens, fp32"
    shown = " ".join(f"{value:+.4f}" for value in vectors[0, :5])
    assert f"embedding  384 components, length 1.0000: {shown} …" in [line.rstrip() for line in lines]
    word, score = explanation.top(1)[0]
    assert any(line.startswith(word) and f"{score:+.4f}" in line for line in lines)
    [attention] = [line for line in lines if line.startswith("it ") and "→" in line]
    assert attention.split()[:3] == ["it", "→", "tired"]
    similarity = float(vectors[0] @ vectors[1])
    assert any(line.split()[:2] == [f"{similarity:.4f}", "1.0000"] for line in lines)
    assert f"  attnlens serve {minilm_bundle}" in lines
    assert f"  attnlens view {shlex.quote(FIRST)} --output page.html" in lines
    assert "\x1b" not in result.stdout


def test_the_best_label_of_a_classifier_is_explained(classifier_bundle: Callable[[str], Path]) -> None:
    result = run_try(classifier_bundle("topics"), "the man and the sea", "it rained")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    best = [line.split()[1] for line in lines if line.startswith("labels ")]
    headings = [line.rpartition(" to ")[2] for line in lines if line.startswith("Contributions of words")]
    assert headings == [f"the logit of {label}:" for label in best]
    assert len(best) == 2


def test_bundle_without_contributions_and_texts_without_words_are_shown_in_60_columns() -> None:
    long = "the cat sat on the mat. " * 40
    result = run_try(STORED_BUNDLE, "", "cat", long, columns=60)
    assert (result.exit_code, result.stderr) == (0, "")
    shown = result.stdout.partition("\nnext\n")[0]
    assert all(len(line) <= 60 for line in shown.splitlines() if not line.startswith("the cat sat"))
    assert shown.count("This bundle has no contribution graph.") == 3
    assert "the first " in shown
    assert "cosine similarity" in shown


def test_suggested_commands_have_the_cache_and_the_start_of_a_long_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "resolve", lambda *_: STORED_BUNDLE)  # the cached bundle
    cache = tmp_path / "a cache"
    result = run_try("--cache-dir", cache, "org/name", "the cat's mat. " * 40)
    assert (result.exit_code, result.stderr) == (0, "")
    serve, view, python = result.stdout.partition("\nnext\n")[2].splitlines()
    assert serve == f"  attnlens serve org/name --cache-dir {shlex.quote(str(cache))}"
    assert shlex.split(view)[2] == ("the cat's mat. " * 40)[:69] + "…"
    assert python.count("the cat's mat.") < 10


def test_bundle_without_a_tokenizer_is_rejected_before_a_server_starts(tmp_path: Path) -> None:
    bundle = shutil.copytree(STORED_BUNDLE, tmp_path / "bundle")
    (bundle / "tokenizer.json").unlink()
    sign(bundle)
    result = run_try(bundle, "It rained.")
    assert result.exit_code == 1
    message = "has no tokenizer, which this command needs: export a bundle with `attnlens export"
    assert message in result.stderr
    assert "token_ids" not in result.stderr


def test_invalid_source_is_rejected_before_a_server_starts(tmp_path: Path) -> None:
    result = run_try(tmp_path, "It rained.")
    assert result.exit_code == 1
    assert "is not a bundle" in result.stderr


def test_missing_extra_is_reported_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(try_module, "find_spec", lambda name: None if name == "onnxruntime" else name)
    result = run_try(STORED_BUNDLE, "It rained.")
    assert result.exit_code == 2
    assert "onnxruntime is not installed: in a checkout of attnlens, pip install '.[server]'" in result.stderr


def _interrupted() -> str:
    """Raise KeyboardInterrupt while a server runs, and return its address."""
    with suppress(KeyboardInterrupt), child_server(STORED_BUNDLE, ["--precision", "fp32"]) as address:
        with Client(address) as client:
            assert np.isfinite(client.embed(["cat"])).all()
        raise KeyboardInterrupt
    return address


def test_interrupt_stops_the_server() -> None:
    host, _, port = _interrupted().rpartition(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=5)


def test_exit_code_of_a_server_that_does_not_start_is_kept(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(click.exceptions.Exit) as caught, child_server(tmp_path, []):
        pass
    assert caught.value.exit_code == 1
    assert "is not a bundle" in capfd.readouterr().err
