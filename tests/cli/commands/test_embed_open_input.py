"""`attnlens embed` while its input is open: signals, server restarts, incremental results."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from attnlens.v1 import encoder_service_pb2 as pb
from scripted import ScriptedServer, refuse, vectors, violation

Run = Callable[..., subprocess.CompletedProcess[str]]

SOON_S = 30.0


def _embed(server: ScriptedServer, *args: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "attnlens_cli.main", "embed", "--address", server.address, *args]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"},
    )


def _wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_a_run_that_waits_for_input(
    server: ScriptedServer, tmp_path: Path, signal_number: int
) -> None:
    output = tmp_path / "vectors.npy"
    with _embed(server, "-o", str(output)) as process:
        assert process.stdin
        assert process.stderr
        _wait_for(lambda: list(tmp_path.iterdir()))
        process.send_signal(signal_number)
        assert process.wait(timeout=SOON_S) == 130  # standard input is still open
        assert process.stderr.read().decode().strip() == "attnlens embed: interrupted"
    assert list(tmp_path.iterdir()) == []


def test_interrupted_run_leaves_the_old_file(server: ScriptedServer, tmp_path: Path) -> None:
    output = tmp_path / "vectors.npy"
    output.write_bytes(b"old")
    with _embed(server, "-o", str(output), "--batch-size", "1") as process:
        assert process.stdin
        process.stdin.write(b"It rained.\n" * 20)
        process.stdin.flush()
        _wait_for(lambda: len(list(tmp_path.iterdir())) == 2)  # the partial file exists
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=SOON_S) == 130
    assert list(tmp_path.iterdir()) == [output]
    assert output.read_bytes() == b"old"


def test_sigterm_ends_a_run_that_ignores_interrupts(server: ScriptedServer, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "attnlens_cli.main", "embed", "--address", server.address]
    background = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command, "-o", str(tmp_path / "vectors.npy")]
    with subprocess.Popen(background, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        _wait_for(lambda: list(tmp_path.iterdir()))
        process.send_signal(signal.SIGINT)
        process.terminate()
        assert process.wait(timeout=SOON_S) == 130
    assert list(tmp_path.iterdir()) == []


def test_results_are_written_while_the_input_is_open(server: ScriptedServer) -> None:
    with _embed(server) as process:
        assert process.stdin
        assert process.stdout
        for text in ("a", "bb", "ccc"):
            process.stdin.write(f"{text}\n".encode())
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["text"] == text  # before the next line goes in
        process.stdin.close()
        assert process.wait(timeout=SOON_S) == 0


def test_rejection_is_reported_while_the_input_is_open(server: ScriptedServer) -> None:
    def embed(request: pb.EmbedRequest, context: grpc.ServicerContext) -> pb.EmbedResponse:
        if any(text_input.text == "bad" for text_input in request.inputs):
            told = violation("inputs[1].text", "is bad", 1)
            refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "not this", told)
        return vectors(request)

    server.embed = embed
    with _embed(server, "--batch-size", "2") as process:
        assert process.stdin
        assert process.stderr
        process.stdin.write(b"a\nb\nc\nbad\n")
        process.stdin.flush()
        assert process.wait(timeout=SOON_S) == 1
        message = process.stderr.read().decode()
    assert message == "attnlens embed: standard input, line 4 is bad; 2 texts were done\n"


def test_run_with_nohup_survives_a_hangup(server: ScriptedServer, tmp_path: Path) -> None:
    output = tmp_path / "vectors.jsonl"
    command = [sys.executable, "-m", "attnlens_cli.main", "embed", "--address", server.address]
    background = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *command, "-o", str(output)]
    with subprocess.Popen(background, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin
        _wait_for(lambda: list(tmp_path.iterdir()))
        process.send_signal(signal.SIGHUP)
        process.stdin.write(b"a\n")
        process.stdin.close()
        assert process.wait(timeout=SOON_S) == 0
    assert json.loads(output.read_text())["text"] == "a"


def test_run_survives_a_restart_of_the_server(server: ScriptedServer, tmp_path: Path) -> None:
    output = tmp_path / "vectors.jsonl"
    with _embed(server, "-o", str(output), "--batch-size", "1", "--in-flight", "1") as process:
        assert process.stdin
        process.stdin.write(b"a\n")
        process.stdin.flush()
        _wait_for(lambda: any(isinstance(request, pb.EmbedRequest) for request in server.requests))
        server.stop()
        process.stdin.write(b"bb\n")
        process.stdin.close()
        server.start()
        assert process.wait(timeout=SOON_S) == 0
    assert [json.loads(line)["text"] for line in output.read_text().splitlines()] == ["a", "bb"]


def test_run_survives_an_outage_longer_than_the_grpc_retries(server: ScriptedServer, run: Run) -> None:
    left = [7]  # gRPC makes 5 attempts

    def embed(request: pb.EmbedRequest, context: grpc.ServicerContext) -> pb.EmbedResponse:
        if request.inputs[0].text == "bb" and left[0]:
            left[0] -= 1
            context.set_trailing_metadata((("grpc-retry-pushback-ms", "1"),))
            context.abort(grpc.StatusCode.UNAVAILABLE, "away")
        return vectors(request)

    server.embed = embed
    result = run(
        "embed", "--address", server.address, "--batch-size", "1", "--in-flight", "1", input="a\nbb\n"
    )
    assert result.returncode == 0, result.stderr
    assert [json.loads(line)["text"] for line in result.stdout.splitlines()] == ["a", "bb"]
    assert left == [0]


def test_run_that_loses_its_server_reports_its_progress(server: ScriptedServer) -> None:
    with _embed(server, "--timeout-s", "2") as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        process.stdin.write(b"a\nb\n")
        process.stdin.flush()
        process.stdout.readline()
        server.stop()
        process.stdin.write(b"c\n")
        process.stdin.close()
        assert process.wait(timeout=SOON_S) == 1
        message = process.stderr.read().decode()
    assert message.count("\n") == 1
    assert server.address in message
    assert message.endswith("; 2 texts were done\n")


def test_available_lines_fill_whole_batches(server: ScriptedServer, run: Run) -> None:
    result = run("embed", "--address", server.address, "--batch-size", "50", input="x\n" * 500)
    assert result.returncode == 0, result.stderr
    sizes = [len(request.inputs) for request in server.requests if isinstance(request, pb.EmbedRequest)]
    assert sizes == [50] * 10
