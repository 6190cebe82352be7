"""Commands that call a server: invalid options, missing servers, other programs, invalid responses."""

import json
import os
import re
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from attnlens.v1 import encoder_service_pb2 as pb
from scripted import ScriptedServer, fails, violation

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["embed", "--dimensions", "99999999999999"], "embed: invalid value for '--dimensions': "),
        (["explain", "a", "--dimensions", "99999999999"], "explain: invalid value for '--dimensions': "),
        (["compare", "a", "b", "--dimensions", "99999999999"], "compare: invalid value for '--dimensions': "),
        (["attend", "a", "--layer", "1", "--layer", "2"], "attend: --layer is given 2 times: use it once"),
        (
            ["serve", "x", "--max-concurrent-inputs", "0"],
            "serve: --max-concurrent-inputs is 0: use 1 to",
        ),
        (["serve", "x", "--port", "65536"], "serve: --port is 65536: use 0 to"),
        (["serve", "x", "--tls-key", "x"], "serve: only one of --tls-cert and --tls-key is set"),
        (
            ["serve", "x", "--address", "unix:x", "--port", "5"],
            "serve: --address and --port are both given: use --address alone",
        ),
        (["embed", "--batch-size", "9" * 30], "embed: invalid value for '--batch-size': "),
        (["embed", "--in-flight", "9" * 30], "embed: invalid value for '--in-flight': "),
        (["info", "--timeout-s", "nan"], "info: invalid value for '--timeout-s': it is not a number"),
        (["info", "--timeout-s", "inf"], "info: invalid value for '--timeout-s': inf is not in the range"),
        (["info", "--model", b"\xff"], "info: invalid value for '--model': it is not UTF-8"),
        (
            ["info", "--address", "localhost"],
            "info: invalid value for '--address': address is 'localhost': use",
        ),
        (["info", "--address", "localhost:115587"], "info: invalid value for '--address': "),
        (["info", "--tls-server-name", "x"], "info: --tls-server-name needs TLS: use --tls or --tls-ca"),
        (["info", "--tls-ca", __file__], f"info: invalid value for '--tls-ca': {__file__} is not a PEM file"),
        (["attend", "a", "--json", "--token", "a"], "attend: --json prints the weights of all tokens: omit"),
        (
            ["attend", "a", "--rollout", "--layer", "3"],
            "attend: --rollout combines all layers and the mean of",
        ),
        (
            ["attend", "a", "--image", "x.png", "--top", "3"],
            "attend: --top limits printed weights: with --image",
        ),
    ],
)
def test_out_of_range_value_is_a_usage_error(run: Run, args: list[str], line: str) -> None:
    result = run(*args)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(f"attnlens {line}")


def test_value_of_a_configuration_file_is_reported_with_the_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "attnlens.toml"
    path.write_text('[serve]\nmax-concurrent-inputs = 0\n[embed]\ndimensions = "x"\n')
    for args, message in (
        (["serve", "x"], "--max-concurrent-inputs is 0: use 1"),
        (["embed"], "'--dimensions': 'x' is"),
    ):
        result = run("--config-file", path, *args)
        assert (result.returncode, result.stderr.count("\n")) == (2, 1)
        assert message in result.stderr
        assert result.stderr.endswith(f"(from {path})\n")


@pytest.mark.parametrize("name", ["--tls-ca", "--tls-cert"])
def test_tls_file_without_its_counterpart_is_reported(run: Run, tmp_path: Path, name: str) -> None:
    key, damaged = tmp_path / "key.pem", tmp_path / "damaged.pem"
    trustme.CA().issue_cert("localhost").private_key_pem.write_to_path(key)
    damaged.write_text("\n".join(f"-----{end}-----" for end in ("BEGIN CERTIFICATE", "END CERTIFICATE")))
    more = ["--tls-key", key] if name == "--tls-cert" else []
    result = run("info", name, key, *more)
    assert f"invalid value for '{name}': {key} has no PEM CERTIFICATE" in result.stderr
    result = run("info", name, damaged, *more)
    assert result.returncode == 2
    assert result.stderr.startswith(f"attnlens info: invalid value for '{name}': {damaged} ")


def test_closed_output_pipe_is_not_a_failure(server: ScriptedServer) -> None:
    """For example, `attnlens info | head -1`. `--json` is written without rich."""
    for options in ([], ["--json"]):
        reading, writing = os.pipe()
        os.close(reading)
        command = [sys.executable, "-m", "attnlens_cli.main", "info", "--address", server.address, *options]
        with os.fdopen(writing, "wb") as output:
            result = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, timeout=60, check=False)
        assert (result.returncode, result.stderr) == (0, b"")


def test_value_that_the_model_rejects_is_reported_with_its_option(server: ScriptedServer, run: Run) -> None:
    result = run("embed", "--dimensions", "999", "--address", server.address, input="a\n")
    assert result.returncode == 2
    assert result.stderr == "attnlens embed: invalid value for '--dimensions': is 999: use 1 to 4\n"


class _NotGrpc(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        self.rfile.readline()
        self.wfile.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


def test_another_program_at_the_address_is_reported_as_such(run: Run) -> None:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _NotGrpc) as other:
        other.daemon_threads = True
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        address = f"127.0.0.1:{other.server_address[1]}"
        plain = run("info", "--address", address, "--timeout-s", "10")
        encrypted = run("info", "--address", address, "--timeout-s", "10", "--tls")
        other.shutdown()
        thread.join()
    for result in (plain, encrypted):
        assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert f"the program at {address} is not an attnlens server: use another --address" in plain.stderr
    assert f"the program at {address} does not use TLS: omit all TLS options" in encrypted.stderr


def test_another_grpc_server_at_the_address_is_reported_as_such(run: Run) -> None:
    other = grpc.server(ThreadPoolExecutor(1))
    address = f"127.0.0.1:{other.add_insecure_port('127.0.0.1:0')}"
    other.start()
    result = run("info", "--address", address)
    other.stop(None).wait()
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert f"the program at {address} is not an attnlens server: use another --address" in result.stderr


def test_no_server_within_the_timeout_is_reported_as_such(run: Run) -> None:
    with socket.socket() as silent:  # accepts no connection
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        result = run("info", "--address", address, "--timeout-s", "0.2")
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert f"no server reachable at {address} for 0.2 s: start one" in result.stderr


def test_reply_that_cannot_be_parsed_is_one_line(run: Run, garbled_server: str) -> None:
    for args in (("info",), ("attend", "abc"), ("embed", __file__)):
        result = run(*args, "--address", garbled_server)
        assert (result.returncode, result.stdout, result.stderr.count("\n")) == (76, "", 1)
        assert "not a message of the expected type" in result.stderr


def test_other_commands_validate_responses(server: ScriptedServer, run: Run, tmp_path: Path) -> None:
    def change(reply: Any) -> None:
        if isinstance(reply, pb.EncodeResponse):
            reply.results[0].attention[0].layers[0] = 0

    server.change = change
    picture = tmp_path / "map.png"
    attend = run("attend", "abc", "--address", server.address, "--image", picture)
    assert (attend.returncode, attend.stdout, attend.stderr.count("\n")) == (76, "", 1)
    assert "0 among the layers of attention[0], expected 1" in attend.stderr
    assert not picture.exists()
    server.model.embedding_size = -1
    info = run("info", "--address", server.address)
    assert (info.returncode, info.stdout, info.stderr.count("\n")) == (76, "", 1)


def test_control_characters_in_an_error_message_are_escaped(server: ScriptedServer, run: Run) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\u009b31m\u202e\x7f"

    def change(reply: Any) -> None:
        if isinstance(reply, pb.GetModelResponse):
            reply.model.source = reply.model.prompts[evil] = reply.model.versions[evil] = evil
            reply.model.parity.figures.add(graph=evil)
            reply.model.parity.gates.add(graph=evil, text_kind=evil)
            reply.model.architecture.layers.add(attention=evil)
            reply.model.version = reply.model.source_revision = evil
        if isinstance(reply, pb.EncodeResponse):
            reply.results[0].tokens[1].text = evil

    told = violation("inputs[0].text", f"{evil}\nattnlens: fine", 0)
    server.embed = fails(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", evil, told, times=2)
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
    assert [result.returncode for result in shown] == [1, 1, 0, 0, 0, 0, 0, 0]
    assert shown[0].stderr.count("\n") == 1
    assert "line 1 \\x1b]0;owned\\x07\\x1b[2J\\x9b31m\\u202e\\x7f" in shown[0].stderr
    for result in shown:
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", result.stdout + result.stderr)
    assert json.loads(shown[3].stdout)["source"] == evil
    assert json.loads(shown[6].stdout)["tokens"][1]["text"] == evil
