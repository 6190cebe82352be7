"""The commands that ask a server, where things go wrong: against a scripted server, as processes."""

import json
import os
import re
import signal
import socket
import socketserver
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.manifest_pb2 import Parity, ParityFigure
from scripted import ScriptedServer, refuse, vectors

Run = Callable[..., subprocess.CompletedProcess[str]]

SOON_S = 30.0


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(max_text_bytes=1000) as server:
        yield server


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
def test_a_signal_ends_a_run_that_waits_for_input(
    server: ScriptedServer, tmp_path: Path, signal_number: int
) -> None:
    output = tmp_path / "vectors.npy"
    with _embed(server, "-o", str(output)) as process:
        assert process.stdin
        assert process.stderr
        _wait_for(lambda: list(tmp_path.iterdir()))
        process.send_signal(signal_number)
        assert process.wait(timeout=SOON_S) == 130  # with standard input still open
        assert process.stderr.read().decode().strip() == "attnlens embed: interrupted"
    assert list(tmp_path.iterdir()) == []


def test_sigterm_ends_a_run_that_ignores_interrupts(server: ScriptedServer, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "attnlens_cli.main", "embed", "--address", server.address]
    background = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command, "-o", str(tmp_path / "vectors.npy")]
    with subprocess.Popen(background, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        _wait_for(lambda: list(tmp_path.iterdir()))
        process.send_signal(signal.SIGINT)
        process.terminate()
        assert process.wait(timeout=SOON_S) == 130
    assert list(tmp_path.iterdir()) == []


def test_results_come_while_the_input_is_open(server: ScriptedServer) -> None:
    with _embed(server) as process:
        assert process.stdin
        assert process.stdout
        for text in ("a", "bb", "ccc"):
            process.stdin.write(f"{text}\n".encode())
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["text"] == text  # before the next line goes in
        process.stdin.close()
        assert process.wait(timeout=SOON_S) == 0


def test_a_refusal_is_told_while_the_input_is_open(server: ScriptedServer) -> None:
    def embed(request: pb.EmbedRequest, context: grpc.ServicerContext) -> pb.EmbedResponse:
        if any(each.text == "bad" for each in request.inputs):
            refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "inputs[1].text is bad")
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


def test_lines_that_are_there_fill_whole_batches(server: ScriptedServer, run: Run) -> None:
    result = run("embed", "--address", server.address, "--batch-size", "50", input="x\n" * 500)
    assert result.returncode == 0, result.stderr
    sizes = [len(each.inputs) for each in server.requests if isinstance(each, pb.EmbedRequest)]
    assert sizes == [50] * 10


def test_nohup_outlasts_the_terminal(server: ScriptedServer, tmp_path: Path) -> None:
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


def test_a_run_outlasts_a_restart_of_the_server(server: ScriptedServer, tmp_path: Path) -> None:
    output = tmp_path / "vectors.jsonl"
    with _embed(server, "-o", str(output), "--batch-size", "1", "--in-flight", "1") as process:
        assert process.stdin
        process.stdin.write(b"a\n")
        process.stdin.flush()
        _wait_for(lambda: any(isinstance(each, pb.EmbedRequest) for each in server.requests))
        server.stop()
        process.stdin.write(b"bb\n")
        process.stdin.close()
        server.start()
        assert process.wait(timeout=SOON_S) == 0
    assert [json.loads(line)["text"] for line in output.read_text().splitlines()] == ["a", "bb"]


def test_a_run_outlasts_a_server_that_is_away_for_longer_than_grpc_tries(
    server: ScriptedServer, run: Run
) -> None:
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


def test_a_run_that_loses_its_server_says_how_far_it_came(server: ScriptedServer) -> None:
    with _embed(server, "--timeout", "2") as process:
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


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_line_that_is_too_long_is_named_and_never_sent(
    server: ScriptedServer, run: Run, tmp_path: Path, name: str
) -> None:
    source = tmp_path / name
    long = "x" * 1001
    source.write_text("a\n" + long if name == "a.txt" else f'{{"text": "a"}}\n{{"text": "{long}"}}\n')
    result = run("embed", source, "--address", server.address)
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert f"{source}, line 2 has " in result.stderr
    assert "a text may have 1000: send it in pieces" in result.stderr
    assert not any(long in str(each) for each in server.requests)


def test_a_line_without_end_takes_no_memory(server: ScriptedServer) -> None:
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
        (b'{"text": "a", "id": ' + b"1" * 5000 + b"}", ", line 1: can't be read as JSON: "),
        (b"[" * 200_000, ", line 1: can't be read as JSON: "),
    ],
)
def test_json_that_python_can_not_read_is_a_bad_line(
    run: Run, tmp_path: Path, content: bytes, message: str
) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(content)
    with ScriptedServer() as server:
        result = run("embed", source, "--address", server.address)
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert message in result.stderr


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["embed", "--dimensions", "99999999999999"], "embed: invalid value for '--dimensions': "),
        (["embed", "--batch-size", "9" * 30], "embed: invalid value for '--batch-size': "),
        (["embed", "--in-flight", "9" * 30], "embed: invalid value for '--in-flight': "),
        (["info", "--timeout", "nan"], "info: invalid value for '--timeout': it is no number"),
        (["info", "--timeout", "inf"], "info: invalid value for '--timeout': inf is not in the range"),
        (["info", "--model", b"\xff"], "info: invalid value for '--model': it is not UTF-8"),
        (
            ["info", "--address", "localhost"],
            "info: invalid value for '--address': address is 'localhost': give",
        ),
        (["info", "--address", "localhost:115587"], "info: invalid value for '--address': "),
        (["info", "--tls-server-name", "x"], "info: --tls-server-name needs TLS: give --tls or --tls-ca"),
        (["info", "--tls-ca", __file__], f"info: invalid value for '--tls-ca': {__file__} is no PEM file"),
        (["attend", "a", "--json", "--token", "a"], "attend: --json prints all weights: leave out --token"),
        (["attend", "a", "--json", "--top", "3"], "attend: --json prints all weights: leave out --token"),
        (["attend", "a", "--png", "x.png", "--top", "3"], "attend: --top is for what is printed: with --png"),
    ],
)
def test_a_value_out_of_range_is_a_mistake(run: Run, args: list[str], line: str) -> None:
    result = run(*args)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(f"attnlens {line}")


def test_a_flag_is_no_value_in_the_configuration_file(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "attnlens.toml"
    file.write_text("[info]\ntimeout = true\n")
    result = run("--config-file", file, "info")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "timeout is true in table [info] of the configuration file: it takes a value" in result.stderr


@pytest.mark.parametrize(
    ("redirection", "code", "line"),
    [
        ("<&-", 2, "attnlens embed: standard input is closed: give FILE"),
        ("</dev/null >&-", 2, "attnlens embed: standard output is closed: give --output"),
        ("</dev/null 2>&-", 0, ""),
    ],
)
def test_a_closed_stream_is_no_bug(server: ScriptedServer, redirection: str, code: int, line: str) -> None:
    command = f"{sys.executable} -m attnlens_cli.main embed --address {server.address} {redirection}"
    result = subprocess.run(command, shell=True, capture_output=True, check=False, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr.strip()) == (code, "", line)


def test_errors_stand_below_their_graph_in_lines_of_80_columns(server: ScriptedServer, run: Run) -> None:
    graphs = ("onnx/model.onnx", "onnx/model_attentions.onnx", "onnx/model_fp16.onnx")
    outputs = [(graph, "last_hidden_state") for graph in graphs] + [(graphs[1], "attentions")]
    figures = [ParityFigure(graph=graph, output=output) for graph, output in sorted(outputs)]
    server.model.parity.CopyFrom(Parity(figures=figures))
    result = run("info", "--address", server.address, env={"COLUMNS": "80"})
    assert result.returncode == 0, result.stderr
    assert max(len(line) for line in result.stdout.splitlines()) <= 80
    names = [line.split()[0] for line in result.stdout.rpartition("─")[2].splitlines() if line.strip()]
    hidden = "last_hidden_state"
    assert names == [
        *("model.onnx", hidden),
        *("model_attentions.onnx", "attentions", hidden),
        *("model_fp16.onnx", hidden),
    ]


class _NotGrpc(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        self.rfile.readline()
        self.wfile.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


def test_another_program_at_the_address_is_told_as_such(run: Run) -> None:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _NotGrpc) as other:
        other.daemon_threads = True
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        address = f"127.0.0.1:{other.server_address[1]}"
        plain = run("info", "--address", address, "--timeout", "10")
        encrypted = run("info", "--address", address, "--timeout", "10", "--tls")
        other.shutdown()
        thread.join()
    for result in (plain, encrypted):
        assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert f"what answers at {address} is no attnlens server: give another --address" in plain.stderr
    assert f"no TLS with {address}: check --tls-ca" in encrypted.stderr


def test_the_new_file_has_the_mode_of_the_old_one_and_a_link_stays_one(
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


def test_an_output_that_fails_is_named(server: ScriptedServer, tmp_path: Path) -> None:
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


def test_grpc_prints_nothing_of_its_own(run: Run) -> None:
    program = (
        "import atexit, os; atexit.register(lambda: print(os.environ['GRPC_VERBOSITY'])); "
        "from attnlens_cli.main import main; main()"
    )
    told = ["-c", program]
    assert run("--version", command=[sys.executable, *told]).stdout.endswith("\nNONE\n")
    chosen = run("--version", command=[sys.executable, *told], env={"GRPC_VERBOSITY": "ERROR"})
    assert chosen.stdout.endswith("\nERROR\n")


def test_more_dimensions_than_the_model_has_fail_before_anything_is_read(
    server: ScriptedServer, run: Run
) -> None:
    result = run("embed", "--address", server.address, "--dimensions", "5", stdin=subprocess.PIPE)
    assert (result.returncode, result.stderr) == (1, "attnlens embed: dimensions is 5: scripted has 4\n")


def test_a_grpc_server_of_another_kind_is_told_as_such(run: Run) -> None:
    other = grpc.server(ThreadPoolExecutor(1))
    address = f"127.0.0.1:{other.add_insecure_port('127.0.0.1:0')}"
    other.start()
    result = run("info", "--address", address)
    other.stop(None).wait()
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert f"what answers at {address} is no attnlens server: give another --address" in result.stderr


@pytest.mark.parametrize("suffix", ["npy", "jsonl"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda reply: reply.embeddings.shape.__setitem__(0, 9), "have the shape (9, 4) instead of (3, any)"),
        (lambda reply: reply.embeddings.shape.__setitem__(1, -1), "do not fill the shape (3, -1)"),
        (
            lambda reply: setattr(reply.embeddings, "data", reply.embeddings.data[:-4] + b"\0\0\xc0\x7f"),
            "standard input, line 3 has a value that is no finite number",
        ),
        (lambda reply: setattr(reply, "model", "b"), "is 'b' instead of 'scripted'"),
        (lambda reply: reply.usages.pop(), "2 instead of 3 usages"),
    ],
)
def test_a_wrong_reply_has_an_exit_code_of_its_own_and_leaves_no_file(
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
    assert "the reply is wrong: " in result.stderr
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_all_batches_of_a_file_are_as_wide_as_the_first(
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
        "the reply is wrong: the embeddings are 3 wide now instead of 4; 1 text was done\n"
    )


def test_every_batch_names_the_model_that_was_there_at_first(server: ScriptedServer, run: Run) -> None:
    result = run("embed", "--address", server.address, "--batch-size", "1", input="a\nb\n")
    assert result.returncode == 0
    assert {each.model for each in server.requests if isinstance(each, pb.EmbedRequest)} == {"scripted"}


def test_other_commands_believe_no_reply_either(server: ScriptedServer, run: Run, tmp_path: Path) -> None:
    def change(reply: Any) -> None:
        if isinstance(reply, pb.EncodeResponse):
            reply.results[0].attention.layers[0] = 0

    server.change = change
    picture = tmp_path / "map.png"
    attend = run("attend", "abc", "--address", server.address, "--png", picture)
    assert (attend.returncode, attend.stdout, attend.stderr.count("\n")) == (76, "", 1)
    assert "0 instead of 1 among its layers" in attend.stderr
    assert not picture.exists()
    server.model.embedding_size = -1
    info = run("info", "--address", server.address)
    assert (info.returncode, info.stdout, info.stderr.count("\n")) == (76, "", 1)


def test_a_message_can_not_control_the_terminal(server: ScriptedServer, run: Run) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\u009b31m\u202e\x7f"

    def embed(request: pb.EmbedRequest, context: grpc.ServicerContext) -> pb.EmbedResponse:
        refuse(
            context,
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_FIELD",
            f"inputs[0].text {evil}\nattnlens: fine",
        )
        return vectors(request)

    def change(reply: Any) -> None:
        if isinstance(reply, pb.GetModelResponse):
            reply.model.source = reply.model.prompts[evil] = reply.model.versions[evil] = evil
            reply.model.parity.figures.add(graph=evil, output=evil)
        if isinstance(reply, pb.EncodeResponse):
            reply.results[0].tokens[1].text = evil

    server.embed = embed
    server.change = change
    shown = [
        run("embed", "--address", server.address, input="a\n"),
        run("--debug", "embed", "--address", server.address, input="a\n"),
        run("info", "--address", server.address),
        run("info", "--address", server.address, "--json"),
        run("attend", "abc", "--address", server.address),
        run("attend", "abc", "--address", server.address, "--token", "1"),
        run("attend", "abc", "--address", server.address, "--json"),
        run("attend", "abc", "--address", server.address, "--top", "2", env={"COLUMNS": "20"}),
    ]
    assert [each.returncode for each in shown] == [1, 1, 0, 0, 0, 0, 0, 0]
    assert shown[0].stderr.count("\n") == 1
    assert "line 1 \\x1b]0;owned\\x07\\x1b[2J\\x9b31m\\u202e\\x7f" in shown[0].stderr
    for each in shown:
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", each.stdout + each.stderr)
    assert json.loads(shown[3].stdout)["source"] == evil
    assert json.loads(shown[6].stdout)["tokens"][1]["text"] == evil


@pytest.mark.parametrize("number", ["7", "9" * 5000])
def test_a_refusal_of_a_text_that_was_not_sent_is_no_bug(
    server: ScriptedServer, run: Run, number: str
) -> None:
    def embed(request: pb.EmbedRequest, context: grpc.ServicerContext) -> pb.EmbedResponse:
        refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", f"inputs[{number}].text is bad")
        return vectors(request)

    server.embed = embed
    result = run("embed", "--address", server.address, input="a\n")
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert f"[{number}].text is bad" in result.stderr


def test_bytes_that_are_no_message_are_one_line(run: Run, garbled_server: str) -> None:
    for args in (("info",), ("attend", "abc"), ("embed", __file__)):
        result = run(*args, "--address", garbled_server)
        assert (result.returncode, result.stdout, result.stderr.count("\n")) == (76, "", 1)
        assert "its bytes are no message" in result.stderr


def test_no_server_within_a_short_time_is_told_as_such(run: Run) -> None:
    with socket.socket() as silent:  # accepts no connection
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        result = run("info", "--address", address, "--timeout", "0.2")
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert f"no server answered at {address} within 0.2 s: is one there?" in result.stderr


def test_one_text_is_one_text(server: ScriptedServer, run: Run) -> None:
    assert run("embed", "--address", server.address, input="a\n").stderr.startswith("1 text, 1 token in ")
