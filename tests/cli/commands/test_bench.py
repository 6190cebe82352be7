"""`attnlens bench` in a subprocess: a small bundle, user texts, usage errors."""

import os
import pty
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from attnlens_cli.sources.measured import choose_options
from attnlens_server.config import ServerConfig
from attnlens_server.tuning.settings import EQUIVALENT_MARGIN
from schemas import conforms

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory in which results are stored."""
    directory = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory))
    return directory / "attnlens"


def test_measurements_as_json(
    run: Run, small_bundle: Callable[[str], Path], tmp_path: Path, cache: Path
) -> None:
    bundle = small_bundle("wordpiece")
    texts = tmp_path / "my texts.txt"
    texts.write_text("It rained.\n\n" + "word " * 400 + "\n" + "so it was wet\n" * 5, encoding="utf-8")
    result = run(
        "bench",
        bundle,
        "--seconds",
        "0.02",
        "--threads",
        "1",
        "--texts",
        texts,
        "--no-compare",
        "--json",
    )
    assert (result.returncode, result.stderr) == (0, "")
    report = conforms("bench", result.stdout)
    assert report["texts"]["source"] == f"8 texts of {texts}"
    assert (report["texts"]["cut"], report["texts"]["p50_tokens"], report["texts"]["p100_tokens"]) == (
        1,
        7,  # [CLS], four words in five pieces, [SEP]
        34,
    )
    settings = report["settings"]
    assert {(setting["threads"], setting["lanes"]) for setting in settings} == {(1, 1)}
    assert all(setting["tokens_per_s"] > 0 for setting in settings)
    [best] = [setting for setting in settings if report["best"].items() <= setting.items()]
    repeated = [setting for setting in settings if len(setting["repetitions_tokens_per_s"]) == 3]
    assert best in repeated
    assert best["tokens_per_s"] >= (1 - EQUIVALENT_MARGIN) * max(
        setting["tokens_per_s"] for setting in repeated
    )
    words = shlex.split(report["command"])
    assert words[:3] == ["attnlens", "serve", str(bundle)]
    given = {name.removeprefix("--").replace("-", "_"): int(value) for name, value in _pairs(words[3:])}
    assert given == report["best"]
    assert report["comparison"] is None
    config = ServerConfig(bundle=bundle)
    assert choose_options(config, cache, ["onnxruntime"]) == {"engine": "onnxruntime", **report["best"]}
    [serve] = report["serve"]
    assert (serve["command"], serve["accuracy"], serve["is_tuned"]) == (report["command"], None, True)


def _pairs(words: list[str]) -> list[tuple[str, str]]:
    return list(zip(words[::2], words[1::2], strict=True))


@pytest.mark.extended
def test_engines_are_compared_on_the_given_texts(
    run: Run, small_bundle: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "texts.txt").write_text("It rained.\nso it was wet\n" * 10, encoding="utf-8")
    args = ["--texts", "texts.txt", "--seconds", "0.01", "--threads", "1"]
    engine = ["--engine", "openvino"]
    result = run("bench", small_bundle("wordpiece"), *args, *engine, "--json", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    report = conforms("bench", result.stdout)
    comparison = report["comparison"]
    assert comparison["accuracy_texts"] == {"source": "20 texts of texts.txt", "count": 20, "are_real": True}
    found = {(row["engine"], row["precision"]): row for row in comparison["engines"]}
    reference, openvino = found["onnxruntime", "fp32"], found["openvino", "fp32"]
    assert (reference["relative_speed"], reference["mean_cosine"], reference["is_checked"]) == (1, 1, True)
    assert openvino["smallest_cosine"] > 1 - 1e-6
    assert not openvino["is_checked"]
    without = {(row["engine"], row["precision"]): row["reason"] for row in comparison["left_out"]}
    assert found.keys() | without.keys() == {
        *(("onnxruntime", precision) for precision in ("fp32", "int8")),
        *(("openvino", precision) for precision in ("fp32", "bf16", "int8")),
    }
    assert "has no graph in int8" in without["onnxruntime", "int8"]
    assert report["serve"][0]["accuracy"] == "exact"
    [tuned] = [serve for serve in report["serve"] if serve["is_tuned"]]
    bundle = str(small_bundle("wordpiece"))
    assert tuned["command"] == report["command"]
    assert shlex.split(tuned["command"])[:5] == ["attnlens", "serve", bundle, "--engine", "openvino"]
    assert shlex.split(tuned["check_command"]) == ["attnlens", "check", bundle, "--engine", "openvino"]


def test_tables_end_with_the_command_to_copy(run: Run, small_bundle: Callable[[str], Path]) -> None:
    bundle = small_bundle("wordpiece")
    result = run("bench", bundle, "--attention", "--seconds", "0.01", "--threads", "2", env={"COLUMNS": "80"})
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert "random texts (lengths log-normal, median 32, sigma 1, cut at" in lines[0]
    assert lines[-1].startswith(f"    attnlens serve {bundle} --threads 2 --lanes ")
    assert sum(line.endswith("<- best") for line in lines) == 1
    assert "without gRPC, tokenization and pooling" in result.stdout
    assert max(len(line) for line in lines[1:-1]) <= 80
    assert "…" not in result.stdout


@pytest.mark.parametrize(
    ("args", "code", "line"),
    [
        (["--texts", "missing.txt"], 2, "invalid value for '--texts': File 'missing.txt' does not exist"),
        (
            ["--texts", "empty.txt"],
            1,
            "empty.txt contains only empty texts: use a file with one text per line",
        ),
        (["--texts", "bad.txt"], 1, "bad.txt, line 2: not UTF-8 (byte 1 of the line)"),
        (["--texts", "bad.jsonl"], 1, "bad.jsonl, line 1: not JSON"),
        (["--threads", "1,2.5"], 2, "invalid value for '--threads': '2.5' is not a whole number from 1"),
        (["--threads", "0"], 2, "invalid value for '--threads': '0' is not a whole number from 1"),
        (["--threads", "1025"], 2, "invalid value for '--threads': '1025' is not a whole number from 1"),
        (["--seconds", "0"], 2, "invalid value for '--seconds': 0.0 is not in the range"),
        (["--precision", "bf16"], 2, "precision is bf16, which ONNX Runtime does not support on CPUs"),
        (["--device", "GPU"], 2, "device is 'GPU', but only --engine openvino supports it"),
        (["--precision", "fp16"], 1, "has no graph in fp16: export it again with --precision fp16"),
        (["--device-id", "-1"], 2, "--device-id is -1: use 0 to 1023"),
        (["--provider", "cuda"], 1, "provider cuda was requested, but this build of ONNX Runtime has only"),
    ],
)
def test_usage_error_is_reported_in_one_line(
    run: Run, small_bundle: Callable[[str], Path], tmp_path: Path, args: list[str], code: int, line: str
) -> None:
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "bad.txt").write_bytes(b"good\n\xff\n")
    (tmp_path / "bad.jsonl").write_bytes(b"{\n")
    result = run("bench", small_bundle("wordpiece"), *args, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (code, "")
    assert result.stderr.startswith("attnlens bench: ")
    assert line in result.stderr
    assert result.stderr.count("\n") == 1


def test_missing_bundle_is_reported_in_one_line(run: Run, tmp_path: Path) -> None:
    result = run("bench", tmp_path)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert str(tmp_path) in result.stderr


def test_ctrl_c_replaces_the_progress_bar_by_one_line(small_bundle: Callable[[str], Path]) -> None:
    command = [
        sys.executable,
        "-m",
        "attnlens_cli.main",
        "bench",
        str(small_bundle("wordpiece")),
        "--no-compare",
    ]
    terminal, stderr = pty.openpty()
    with subprocess.Popen([*command, "--seconds", "0.3"], stdout=subprocess.PIPE, stderr=stderr) as process:
        os.close(stderr)
        shown = b""
        while b"settings, round 1" not in shown:
            shown += os.read(terminal, 4096)
        process.send_signal(signal.SIGINT)
        with suppress(OSError):  # reading a terminal raises it when the other end is closed
            while more := os.read(terminal, 4096):
                shown += more
        assert process.communicate(timeout=20)[0] == b""
    os.close(terminal)
    assert process.returncode == 130
    assert shown.endswith(b"attnlens bench: interrupted\r\n")
