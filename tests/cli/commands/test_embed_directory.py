"""`attnlens embed` into a directory, in process and through servers."""

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import bulk_runs
from attnlens_client import Client
from served import ServerProcess

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "texts.csv"
    path.write_text("key,title,body\n" + "".join(f"k{number},Title {number},Body\n" for number in range(9)))
    return path


def test_servers_write_a_directory_and_the_same_command_continues(
    run: Run, minilm_server: ServerProcess, source: Path, tmp_path: Path
) -> None:
    args = ("embed", source, "--address", f"{minilm_server.address},{minilm_server.address}")
    columns = ("--text-column", "title", "--text-column", "body", "--id", "key", "--keep", "title")
    command = (*args, *columns, "--rows-per-part", "4", "--output", f"{tmp_path}/out/")
    result = run(*command)
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
    assert result.stderr.startswith("9 rows, 3 parts, 9 distinct texts, ")
    assert result.stderr.endswith(f" texts/s) -> {tmp_path}/out/\n")
    table = pq.read_table(tmp_path / "out" / "parts")
    assert table["id"].to_pylist() == [f"k{number}" for number in range(9)]
    assert table["title"].to_pylist() == [f"Title {number}" for number in range(9)]
    with Client(minilm_server.address) as client:
        expected = client.embed([f"Title {number}\nBody" for number in range(9)])
    assert np.abs(bulk_runs.vectors_of(tmp_path / "out") - expected).max() <= 1e-5
    (tmp_path / "out" / "parts" / "part-000001.parquet").unlink()
    again = run(*command)
    assert again.stderr.startswith("9 rows, 3 parts (2 existed), 4 distinct texts, "), again.stderr
    refused = run(*command, "--dtype", "float16")
    assert refused.returncode == 1
    assert refused.stderr.startswith(
        "attnlens embed: the option dtype was 'float32' and is 'float16': restore it"
    )


def test_bundle_replaces_the_server(
    run: Run, minilm_bundle: Path, minilm_server: ServerProcess, tmp_path: Path
) -> None:
    source = tmp_path / "texts.txt"
    source.write_text("It rained.\n\nIt was wet.\n")
    bundle = ("--bundle", minilm_bundle, "--threads", "1")
    result = run("embed", source, *bundle, "--output", tmp_path / "vectors.npy")
    assert result.returncode == 0, result.stderr
    with Client(minilm_server.address) as client:
        expected = client.embed(["It rained.", "", "It was wet."])
    assert np.abs(np.load(tmp_path / "vectors.npy") - expected).max() <= 1e-5
    (tmp_path / "run").mkdir()
    result = run("embed", source, *bundle, "-o", tmp_path / "run", "--output-format", "npy")
    assert result.returncode == 0, result.stderr
    assert np.abs(np.load(tmp_path / "run/parts/part-000000.npy") - expected).max() <= 1e-5


def test_token_vectors_need_one_option(
    run: Run, minilm_bundle: Path, minilm_server: ServerProcess, source: Path, tmp_path: Path
) -> None:
    args = ("embed", source, "--text-column", "title", "--id", "key", "--vectors", "tokens")
    bundle = ("--bundle", minilm_bundle, "--threads", "1")
    for name, model in (("process", bundle), ("server", ("--address", minilm_server.address))):
        result = run(*args, *model, "-o", f"{tmp_path}/{name}/")
        assert result.returncode == 0, result.stderr
    one, other = (pq.read_table(tmp_path / name / "parts").to_pylist() for name in ("process", "server"))
    assert [row["id"] for row in one] == [f"k{number}" for number in range(9)]
    assert [row["token_ids"] for row in one] == [row["token_ids"] for row in other]
    with Client(minilm_server.address) as client:
        encoded = client.encode([f"Title {number}" for number in range(9)])
    for rows in (one, other):
        for row, text in zip(rows, encoded, strict=True):
            assert np.abs(np.array(row["token_vectors"]) - text.last_hidden_state).max() <= 1e-5
    described = json.loads((tmp_path / "server" / "run.json").read_bytes())
    assert described["options"]["rows_per_part"] == 1_024


def test_dry_run_shows_an_estimate(
    run: Run, minilm_server: ServerProcess, source: Path, tmp_path: Path
) -> None:
    options = ("--text-column", "title", "--address", minilm_server.address, "--dry-run")
    result = run("embed", source, *options, "-o", f"{tmp_path}/out/")
    assert result.returncode == 0, result.stderr
    lines = [line.partition(":")[0] for line in result.stdout.splitlines()]
    assert lines == ["input", "speed", "time", "output"]
    assert "1 file, 0.0 MB, about 9 rows in 1 part" in result.stdout
    assert not (tmp_path / "out").exists()


def test_skipped_rows_are_counted(run: Run, minilm_server: ServerProcess, tmp_path: Path) -> None:
    source = tmp_path / "texts.jsonl"
    source.write_text('{"text": "a"}\n{"text": null}\n')
    args = ("embed", source, "--address", minilm_server.address, "-o", f"{tmp_path}/out/")
    failed = run(*args)
    assert failed.returncode == 1
    assert f"row 1 of {source}: no text. Correct it, or skip bad rows" in failed.stderr
    result = run(*args, "--bad-rows", "skip")
    assert result.stderr.startswith("2 rows, 1 row rejected, 1 part, 1 distinct text, "), result.stderr
    [entry] = (tmp_path / "out" / "rejected-000000.jsonl").read_text("utf-8").splitlines()
    assert json.loads(entry) == {"row": 1, "file": str(source), "file_row": 1, "reason": "no text"}


def test_special_rows_and_rows_of_a_shard_are_counted(
    run: Run, minilm_server: ServerProcess, tmp_path: Path
) -> None:
    source = tmp_path / "texts.txt"
    source.write_text(f"a\n\n{'word ' * 300}\nb\n")
    args = ("embed", source, "--address", minilm_server.address, "--truncate", "--rows-per-part", "3")
    result = run(*args, "-o", f"{tmp_path}/out/")
    assert result.stderr.startswith("4 rows, 1 row truncated, 1 row with an empty text, 2 parts, ")
    result = run(*args, "-o", f"{tmp_path}/shard/", "--shard", "1/2", "--empty", "skip")
    assert result.stderr.startswith("1 of 4 rows, 1 part, 1 distinct text, "), result.stderr


def test_servers_that_stay_away_are_named_with_the_remedy(
    run: Run, minilm_server: ServerProcess, tmp_path: Path
) -> None:
    source, output = tmp_path / "texts.txt", tmp_path / "out"
    source.write_text("a\nb\n")
    command = ("embed", source, "-o", f"{output}/", "--rows-per-part", "1")
    assert run(*command, "--address", minilm_server.address).returncode == 0
    (output / "parts" / "part-000001.parquet").unlink()
    result = run(*command, "--address", "127.0.0.1:1,127.0.0.1:2", "--patience", "0.1")
    assert result.returncode == 1
    waiting, last = result.stderr.splitlines()
    expected = r"127\.0\.0\.1:1 \(no server answers at .*; 127\.0\.0\.1:2 \(no server answers at "
    assert re.match(rf"0\.0%, 0 texts/s, waiting for {expected}", waiting)
    assert re.match(r"attnlens embed: no call has succeeded for 0\.\d s \(127\.0\.0\.1:1: no server", last)
    assert "Start the servers and repeat the command, which continues after the finished parts" in last


def test_progress_is_written_in_lines_without_a_terminal(
    run: Run, minilm_server: ServerProcess, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnlens_cli.commands.asking.embed._LINE_INTERVAL_S", 0.0)
    options = ("--text-column", "title", "--rows-per-part", "3", "--address", minilm_server.address)
    result = run("embed", source, *options, "-o", f"{tmp_path}/out/")
    *lines, last = result.stderr.splitlines()
    assert last.startswith("9 rows, 3 parts, ")
    assert all(re.fullmatch(r"\d+\.\d%, [\d,]+ texts/s", line) for line in lines), lines
    assert lines[-1].startswith("100.0%, ")


def test_terminal_shows_a_bar(minilm_server: ServerProcess, source: Path, tmp_path: Path) -> None:
    shown, terminal = pty.openpty()
    command = [sys.executable, "-m", "attnlens_cli.main", "embed", str(source), "--text-column", "title"]
    options = ["--address", minilm_server.address, "--rows-per-part", "3", "-o", f"{tmp_path}/out/"]
    content = b""
    with subprocess.Popen([*command, *options], stderr=terminal) as process:
        os.close(terminal)
        with suppress(OSError):  # the process has closed the terminal
            while data := os.read(shown, 1 << 16):  # a terminal stores only 4 KiB
                content += data
        assert process.wait(60) == 0
    os.close(shown)
    text = content.decode()
    assert "100.0 %" in text
    assert "9 rows, 3 parts, " in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("a.txt", "b.txt"), "2 inputs need an --output directory: let --output end with /"),
        (("a.txt", "--shard", "0/2"), "--shard needs an --output directory, which ends with /"),
        (("a.txt", "--keep", "x"), "--keep needs an --output directory"),
        (("a.txt", "--input-format", "csv"), "--input-format csv needs an --output directory"),
        (("a.txt", "--threads", "2"), "--threads needs --bundle, since a server has its own settings"),
        (("a.txt", "--shard", "2/2", "-o", "x/"), "'2/2' is not I/N with an index I from 0 to N - 1"),
        (("-o", "x/"), "an --output directory needs files as INPUT"),
        ((".",), "to embed a directory, let --output end with /"),
        (("a.txt", "--address", "localhost:1,localhost:2"), "several addresses need an --output directory"),
        (("a.txt", "--address", "localhost:1,x"), "address is 'x': use HOST:PORT"),
        (("a.txt", "-o", "x/", "--output-format", "npy", "--keep", "a"), "which contains embeddings alone"),
        (("a.txt", "--vectors", "tokens"), "--vectors needs an --output directory, which ends with /"),
        (
            ("a.txt", "-o", "x/", "--vectors", "tokens", "--output-format", "npy"),
            "use parquet, arrow or jsonl for token vectors",
        ),
        (
            ("a.txt", "-o", "x/", "--vectors", "tokens", "--embedding-type", "binary"),
            "embedding_type is 'binary', but token vectors are not quantized",
        ),
        (
            ("a.txt", "-o", "x/", "--vectors", "tokens", "--normalize"),
            "normalize does not apply to token vectors: omit it",
        ),
    ],
)
def test_invalid_combinations_are_explained(
    run: Run, tmp_path: Path, args: tuple[str, ...], message: str
) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("a\n")
    result = run("embed", *args, cwd=tmp_path)
    assert result.returncode == 2
    assert message in result.stderr
