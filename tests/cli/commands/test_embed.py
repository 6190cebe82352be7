"""`attnlens embed` against a real server process."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from attnlens_client import Client
from served import ServerProcess

Run = Callable[..., subprocess.CompletedProcess[str]]

# 1,200 different texts, with empty lines, spaces at both ends, and characters of two bytes to four.
TEXTS = [
    f" café {number} 東京 😀 " + "word " * (number % 7) if number % 100 else "" for number in range(1200)
]


@pytest.fixture(scope="module")
def vectors(minilm_server: ServerProcess) -> np.ndarray:
    with Client(minilm_server.address) as client:
        return client.embed(TEXTS)


def _read_jsonl(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def test_row_i_of_an_npy_file_belongs_to_line_i(
    run: Run, minilm_server: ServerProcess, vectors: np.ndarray, tmp_path: Path
) -> None:
    source, output = tmp_path / "texts.txt", tmp_path / "vectors.npy"
    source.write_bytes("\r\n".join(TEXTS).encode())  # no trailing newline
    result = run(
        "embed", source, "--address", minilm_server.address, "--output", output, "--batch-size", "37"
    )
    assert (result.returncode, result.stdout) == (0, "")
    assert result.stderr.startswith("1,200 texts, ")
    assert result.stderr.endswith(f" texts/s) -> {output}\n")
    written = np.load(output)
    assert written.dtype == np.float32
    assert np.abs(written - vectors).max() <= 1e-5
    assert sorted(tmp_path.iterdir()) == [source, output]


def test_json_lines_in_and_out_keep_text_and_order(
    run: Run, minilm_server: ServerProcess, vectors: np.ndarray, tmp_path: Path
) -> None:
    source, output = tmp_path / "texts.jsonl", tmp_path / "vectors.jsonl"
    objects = [json.dumps({"id": number, "text": text}) for number, text in enumerate(TEXTS)]
    source.write_text("\n".join([*objects, "", ""]), encoding="utf-8")
    result = run("embed", source, "--address", minilm_server.address, "-o", output, "--in-flight", "2")
    assert result.returncode == 0, result.stderr
    rows = _read_jsonl(output)
    assert [row["index"] for row in rows] == list(range(1200))
    assert [row["id"] for row in rows] == list(range(1200))
    assert [row["text"] for row in rows] == TEXTS
    assert np.abs(np.array([row["embedding"] for row in rows]) - vectors).max() <= 1e-5


def test_json_lines_can_contain_pairs(run: Run, minilm_server: ServerProcess) -> None:
    pairs = [("Who rained?", "It rained."), ("", "")]
    lines = [json.dumps({"text": text, "text_pair": second}) for text, second in pairs]
    lines.append(json.dumps({"text": "It rained.", "text_pair": None}))
    args = ("embed", "-", "--input-format", "jsonl", "--address", minilm_server.address)
    result = run(*args, input="\n".join(lines))
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(row["text"], row.get("text_pair")) for row in rows] == [*pairs, ("It rained.", None)]
    with Client(minilm_server.address) as client:
        expected = client.embed([*pairs, "It rained."])
    assert np.abs(np.array([row["embedding"] for row in rows]) - expected).max() <= 1e-5


def test_standard_input_goes_to_standard_output(
    run: Run, minilm_server: ServerProcess, vectors: np.ndarray
) -> None:
    result = run("embed", "--address", minilm_server.address, input="\n".join(TEXTS[:3]) + "\n")
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["text"] for row in rows] == TEXTS[:3]
    assert np.abs(np.array([row["embedding"] for row in rows]) - vectors[:3]).max() <= 1e-5


def test_options_reach_the_server(run: Run, minilm_server: ServerProcess, tmp_path: Path) -> None:
    output = tmp_path / "vectors.npy"
    options = ("--pooling", "cls", "--no-normalize", "--dimensions", "8", "--dtype", "float16", "--truncate")
    args = ("embed", "-", "--address", minilm_server.address, "-o", output, *options)
    result = run(*args, input="It rained.\n" + "word " * 300)
    assert result.returncode == 0, result.stderr
    assert "2 texts, 1 of them truncated, 261 tokens" in result.stderr
    with Client(minilm_server.address) as client:
        expected = client.embed(["It rained."], pooling="cls", normalize=False, dimensions=8)
    written = np.load(output)
    assert (written.shape, written.dtype) == ((2, 8), np.float16)
    assert np.abs(written[0] - expected[0]).max() <= 1e-3


def test_binary_embeddings_are_written_as_bytes(
    run: Run, minilm_server: ServerProcess, vectors: np.ndarray, tmp_path: Path
) -> None:
    expected = np.packbits(vectors[:3] > 0, axis=1)
    args = ("embed", "-", "--address", minilm_server.address, "--embedding-type")
    result = run(*args, "binary", "-o", tmp_path / "vectors.npy", input="\n".join(TEXTS[:3]))
    assert result.returncode == 0, result.stderr
    written = np.load(tmp_path / "vectors.npy")
    assert written.dtype == np.int8
    np.testing.assert_array_equal(written.view(np.uint8) ^ 0x80, expected)
    rows = [
        json.loads(line) for line in run(*args, "ubinary", input="\n".join(TEXTS[:3])).stdout.splitlines()
    ]
    assert [row["embedding"] for row in rows] == expected.tolist()
    result = run(*args, "int8", "--dtype", "float16", input="a")
    assert result.returncode == 2
    assert "dtype is set, but embedding_type is 'int8': omit it" in result.stderr


def test_empty_input_gives_an_empty_array(run: Run, minilm_server: ServerProcess, tmp_path: Path) -> None:
    output = tmp_path / "vectors.npy"
    assert run("embed", "--address", minilm_server.address, "-o", output).returncode == 0
    assert np.load(output).shape == (0, 384)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n\n{"txt": "b"}\n', ', line 3: not an object with a string "text"'),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', ", line 2: not JSON: "),
        ("a.jsonl", b'{"text": "a", "text_pair": 5}', ', line 1: "text_pair" is not a string'),
        (
            "a.jsonl",
            b'{"text": "a", "text_pair": "\\ud800"}',
            ", line 1: the text contains an unpaired surrogate",
        ),
        ("a.jsonl", b"[]", ", line 1: not an object"),
        ("a.jsonl", b'{"text": "\\ud800"}', ", line 1: the text contains an unpaired surrogate"),
        ("a.txt", b"fine\nna\xefve\n", ", line 2: not UTF-8 (byte 3 of the line)"),
        ("a.txt", b"fine\n" * 200 + b"word " * 300, ", line 201 has 302 tokens, but the limit is 256"),
    ],
)
def test_invalid_line_is_reported_and_no_output_is_left(
    run: Run, minilm_server: ServerProcess, tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    source, output = tmp_path / name, tmp_path / "vectors.npy"
    source.write_bytes(content)
    result = run("embed", source, "--address", minilm_server.address, "-o", output)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert result.stderr.startswith(f"attnlens embed: {source}{message}")
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize(
    ("output", "message"),
    [("x.csv", "x.csv must end in .npy or .jsonl"), ("no/x.npy", "there is no directory no")],
)
def test_unwritable_output_is_a_usage_error(run: Run, tmp_path: Path, output: str, message: str) -> None:
    result = run("embed", "-o", output, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (
        2,
        f"attnlens embed: invalid value for '--output': {message}\n",
    )


def test_closed_pipe_ends_the_run_quietly(minilm_server: ServerProcess) -> None:
    command = (
        f"yes It rained. | {sys.executable} -m attnlens_cli.main embed --address {minilm_server.address}"
    )
    result = subprocess.run(
        f"{command} | head -n 1", shell=True, capture_output=True, check=False, timeout=60, text=True
    )
    assert json.loads(result.stdout)["index"] == 0
    assert result.stderr == ""


def test_progress_is_shown_in_a_terminal(minilm_server: ServerProcess, tmp_path: Path) -> None:
    source = tmp_path / "texts.txt"
    source.write_text("It rained.\n" * 600)
    terminal, child_end = pty.openpty()
    args = ["embed", str(source), "--address", minilm_server.address, "-o", str(tmp_path / "vectors.npy")]
    with subprocess.Popen(
        [sys.executable, "-m", "attnlens_cli.main", *args],
        stdin=subprocess.DEVNULL, stderr=child_end, env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    ) as process:  # fmt: skip
        os.close(child_end)
        shown = b""
        while True:
            try:
                shown += os.read(terminal, 4096)
            except OSError:  # raised by Linux when the other end is closed
                break
        assert process.wait(timeout=30) == 0
    os.close(terminal)
    assert b"texts/s" in shown
    assert b"600 texts, 3,000 tokens in " in shown.splitlines()[-1]
