"""`attnlens embed` with invalid inputs, outputs or responses, against a scripted server."""

import json
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from attnlens.v1 import encoder_service_pb2 as pb
from scripted import ScriptedServer, fails, vectors, violation

Run = Callable[..., subprocess.CompletedProcess[str]]

RunHere = Callable[..., tuple[int, str, str]]

SOON_S = 30.0


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_line_that_is_too_long_is_reported_and_never_sent(
    server: ScriptedServer, run: Run, tmp_path: Path, name: str
) -> None:
    source = tmp_path / name
    long = "x" * 1001
    source.write_text("a\n" + long if name == "a.txt" else f'{{"text": "a"}}\n{{"text": "{long}"}}\n')
    result = run("embed", source, "--address", server.address)
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert f"{source}, line 2 has " in result.stderr
    assert "but the limit is 1000: split the text (--truncate cuts tokens, not bytes; " in result.stderr
    assert not any(long in str(request) for request in server.requests)


def test_all_calls_have_the_priority_of_bulk_work(server: ScriptedServer, run: Run, tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_text("a\nb\n")
    assert run("embed", source, "--address", server.address, env={"ATTNLENS_API_KEY": "k"}).returncode == 0
    sent = {(metadata.get("attnlens-priority"), metadata["authorization"]) for metadata in server.metadata}
    assert sent == {("bulk", "Bearer k")}


def test_endless_line_does_not_exhaust_memory(server: ScriptedServer) -> None:
    limited = "import resource; resource.setrlimit(resource.RLIMIT_DATA, (600 << 20,) * 2)"
    program = f"{limited}; from attnlens_cli.main import main; main()"
    command = [sys.executable, "-c", program, "embed", "--address", server.address]
    with Path("/dev/zero").open("rb") as endless:
        result = subprocess.run(
            command, stdin=endless, capture_output=True, check=False, text=True, timeout=SOON_S
        )
    assert result.returncode == 1
    assert result.stderr.startswith("attnlens embed: standard input, line 1 has more than 1000 bytes")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a", "id": ' + b"1" * 5000 + b"}", ", line 1: cannot be read as JSON: "),
        (b"[" * 200_000, ", line 1: cannot be read as JSON: "),
    ],
)
def test_json_that_python_cannot_parse_is_an_invalid_line(
    run: Run, tmp_path: Path, content: bytes, message: str
) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(content)
    with ScriptedServer() as server:
        result = run("embed", source, "--address", server.address)
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert message in result.stderr


@pytest.mark.parametrize(
    ("redirection", "code", "line"),
    [
        ("<&-", 2, "attnlens embed: standard input is closed: use FILE"),
        ("</dev/null >&-", 2, "attnlens embed: standard output is closed: use --output"),
        ("</dev/null 2>&-", 0, ""),
    ],
)
def test_closed_stream_is_a_usage_error_or_ignored(
    server: ScriptedServer, redirection: str, code: int, line: str
) -> None:
    command = f"{sys.executable} -m attnlens_cli.main embed --address {server.address} {redirection}"
    result = subprocess.run(command, shell=True, capture_output=True, check=False, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr.strip()) == (code, "", line)


def test_replaced_file_keeps_its_mode_and_a_link_stays_a_link(
    server: ScriptedServer, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    target, link = tmp_path / "data" / "vectors.jsonl", tmp_path / "link.jsonl"
    target.write_text("old")
    target.chmod(0o600)
    link.symlink_to(target)
    result = run("embed", "--address", server.address, "-o", link, input="a\n")
    assert result.returncode == 0, result.stderr
    assert link.is_symlink()
    assert json.loads(target.read_text())["text"] == "a"
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert list((tmp_path / "data").iterdir()) == [target]


@pytest.mark.parametrize("args", [("embed",), ("encode", "-i")], ids=["embed", "encode"])
def test_input_file_is_not_replaced(
    run_here: RunHere, server: ScriptedServer, tmp_path: Path, args: tuple[str, ...]
) -> None:
    source, link = tmp_path / "Texts.jsonl", tmp_path / "link.jsonl"
    source.write_text('{"text": "a"}\n')
    link.symlink_to(source)
    for output in (source, link):
        code, out, err = run_here(*args, source, "-o", output, "--address", server.address)
        assert (code, out) == (2, "")
        assert f"invalid value for '--output': {output} is the input file" in err
    assert source.read_text() == '{"text": "a"}\n'


def test_standard_input_is_not_replaced_either(run: Run, tmp_path: Path) -> None:
    source = tmp_path / "texts.jsonl"
    source.write_text('{"text": "a"}\n')
    with source.open("rb") as file:
        result = run("embed", "-o", source, stdin=file)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert f"{source} is the input file" in result.stderr
    assert source.read_text() == '{"text": "a"}\n'


def test_failing_output_is_reported(server: ScriptedServer, tmp_path: Path) -> None:
    output = tmp_path / "vectors.jsonl"
    program = (
        "import resource, signal; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); "
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); from attnlens_cli.main import main; main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, "embed", "--address", server.address, "-o", str(output)],
        input="a\n" * 1000, capture_output=True, check=False, text=True, timeout=60,
    )  # fmt: skip
    assert result.returncode == 1
    assert result.stderr.startswith(f"attnlens embed: {output}: file too large")
    assert list(tmp_path.iterdir()) == []


def test_too_many_dimensions_fail_before_input_is_read(server: ScriptedServer, run: Run) -> None:
    result = run("embed", "--address", server.address, "--dimensions", "5", stdin=subprocess.PIPE)
    message = "attnlens embed: invalid value for '--dimensions': is 5: use 1 to 4\n"
    assert (result.returncode, result.stderr) == (2, message)


@pytest.mark.parametrize("suffix", ["npy", "jsonl"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda reply: reply.embeddings.shape.__setitem__(0, 9), "shape (9, 4), expected (3, any)"),
        (lambda reply: reply.embeddings.shape.__setitem__(1, -1), "do not fill the shape (3, -1)"),
        (
            lambda reply: setattr(reply.embeddings, "data", reply.embeddings.data[:-4] + b"\0\0\xc0\x7f"),
            "line 3 has an embedding with a value that is not finite",
        ),
        (lambda reply: setattr(reply, "model", "b"), "is 'b', expected 'scripted'"),
        (lambda reply: reply.usages.pop(), "2 usages for texts[0:3], expected 3"),
    ],
)
def test_invalid_response_has_its_own_exit_code_and_leaves_no_file(
    server: ScriptedServer,
    run: Run,
    tmp_path: Path,
    change: Callable[[Any], object],
    message: str,
    suffix: str,
) -> None:
    server.change = lambda reply: change(reply) if isinstance(reply, pb.EmbedResponse) else None
    output = tmp_path / f"vectors.{suffix}"
    result = run("embed", "--address", server.address, "-o", output, input="a\nb\nc\n")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (76, "", 1)
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_all_batches_must_have_the_width_of_the_first(
    server: ScriptedServer, run: Run, tmp_path: Path
) -> None:
    def embed(request: pb.EmbedRequest, _: grpc.ServicerContext) -> pb.EmbedResponse:
        answer = vectors(request)
        if request.inputs[0].text == "b":
            answer.embeddings.shape[1] = 3
            answer.embeddings.data = bytes(12)
        return answer

    server.embed = embed
    args = ("--address", server.address, "--batch-size", "1", "-o", tmp_path / "vectors.npy")
    result = run("embed", *args, input="a\nb\n")
    assert (result.returncode, list(tmp_path.iterdir())) == (76, [])
    assert result.stderr.endswith(
        "the embedding size changed from 4 to 3 components during the command; 1 text was done\n"
    )


def test_every_batch_requests_the_model_of_the_first(server: ScriptedServer, run: Run) -> None:
    result = run("embed", "--address", server.address, "--batch-size", "1", input="a\nb\n")
    assert result.returncode == 0
    assert {request.model for request in server.requests if isinstance(request, pb.EmbedRequest)} == {
        "scripted"
    }


@pytest.mark.parametrize("number", [7, 2**31 - 1])
def test_rejection_of_a_text_that_was_not_sent_is_reported_unchanged(
    server: ScriptedServer, run: Run, number: int
) -> None:
    told = violation(f"inputs[{number}].text", "is bad", number)
    server.embed = fails(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "not this", told)
    result = run("embed", "--address", server.address, input="a\n")
    assert (result.returncode, result.stderr) == (1, f"attnlens embed: texts[{number}] is bad\n")


def test_rejected_text_is_reported_with_its_line(server: ScriptedServer, run: Run) -> None:
    told = violation("inputs[1].text_pair", "cannot be used: texts[9] is no line", 1)
    server.embed = fails(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "not this", told, times=2)
    for options in ((), ("--batch-size", "2")):
        result = run("embed", "--address", server.address, *options, input="a\nb\n")
        line = "attnlens embed: standard input, line 2 cannot be used: texts[9] is no line\n"
        assert (result.returncode, result.stderr) == (1, line)


def test_vectors_of_two_model_versions_are_not_mixed_in_a_file(
    server: ScriptedServer, run: Run, tmp_path: Path
) -> None:
    def embed(request: pb.EmbedRequest, _: grpc.ServicerContext) -> pb.EmbedResponse:
        answer = vectors(request)
        if request.inputs[0].text == "b":
            answer.model_version = "new"
        return answer

    server.embed = embed
    args = ("--address", server.address, "--batch-size", "1", "-o", tmp_path / "vectors.npy")
    result = run("embed", *args, input="a\nb\n")
    assert (result.returncode, list(tmp_path.iterdir())) == (76, [])
    assert (
        "the model version changed from '1a2b' to 'new' during the command; 1 text was done" in result.stderr
    )


def test_summary_uses_the_singular(server: ScriptedServer, run: Run) -> None:
    assert run("embed", "--address", server.address, input="a\n").stderr.startswith("1 text, 1 token in ")


def test_other_keys_of_a_line_are_kept_unchanged(
    server: ScriptedServer, run_here: RunHere, tmp_path: Path
) -> None:
    others = {"id": 7, "größe": [1.5, None, {"text": "x"}], "half": "\ud800"}
    source, output = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    source.write_text(json.dumps({"id": 1, "text": "a", "text_pair": "b"} | others) + '\n{"text": "c"}\n')
    assert run_here("embed", source, "--address", server.address, "-o", output)[0] == 0
    first, second = (json.loads(line) for line in output.read_text(encoding="utf-8").splitlines())
    assert list(first) == ["index", "text", "text_pair", *others, "embedding"]
    assert {key: first[key] for key in others} == others
    assert list(second) == ["index", "text", "embedding"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a", "embedding": []}', 'the output uses the key "embedding" itself: rename it'),
        ('{"index": 1, "text": "a"}', 'the output uses the key "index" itself: rename it'),
        ('{"text": "a", "x": [1e999]}', "the value of another key is not JSON: "),
        ('{"text": "a", "x": NaN}', "the value of another key is not JSON: "),
    ],
)
def test_key_that_the_output_cannot_keep_is_reported_with_its_line(
    server: ScriptedServer, run_here: RunHere, tmp_path: Path, line: str, message: str
) -> None:
    source, output = tmp_path / "a.jsonl", tmp_path / "vectors.jsonl"
    source.write_text('{"text": "fine"}\n' + line)
    code, _, err = run_here("embed", source, "--address", server.address, "-o", output)
    assert (code, err.count("\n")) == (1, 1)
    assert f"{source}, line 2: {message}" in err
    assert not output.exists()
    rows = tmp_path / "vectors.npy"  # .npy files store no keys
    assert run_here("embed", source, "--address", server.address, "-o", rows)[0] == 0
