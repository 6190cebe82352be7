"""The access log, and a server on a Unix socket; both use the same server process."""

import json
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import grpc
import pytest

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens_cli.app import run
from attnlens_server.core.request_record import RequestRecord, validate_request_id
from served import ServerProcess

SECRET = "Persephone"
LONG = pb.Input(text=f"{SECRET} " * 60)
ONE = pb.EmbedRequest(inputs=[pb.Input(text=SECRET)])


class Logged:
    """A server process and its log lines."""

    def __init__(self, server: ServerProcess, http_url: str, path: Path) -> None:
        self.server = server
        self.http_url = http_url
        self.path = path

    def lines(self, message: str) -> list[dict[str, Any]]:
        """Return the complete log lines that have a message, oldest first."""
        whole = self.server.log().rpartition("\n")[0]
        return [line for line in map(json.loads, whole.splitlines()) if line["message"] == message]

    def after(self, ask: Callable[[], object]) -> dict[str, Any]:
        """Make one request, and return its log line. Every request in this file goes through this method.

        The line is written after the response, so a skipped line would be taken for the next one.
        """
        before = len(self.lines("request"))
        try:
            ask()
        except HTTPError as error:
            error.close()
        except grpc.RpcError:
            pass
        until = time.monotonic() + 30
        while len(lines := self.lines("request")) <= before:
            assert time.monotonic() < until, "no line was written"
            time.sleep(0.02)
        return lines[before]


@pytest.fixture(scope="module")
def logged(minilm_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Logged]:
    path = tmp_path_factory.mktemp("s") / "my models.sock"
    with ServerProcess(
        minilm_bundle, "--address", f"unix:{path}", "--access-log", "all", "--http-port", "0"
    ) as server:
        yield Logged(server, server.http_url(), path)
        assert server.stop() == 0
        assert list(path.parent.iterdir()) == []
        assert SECRET not in server.log()


@pytest.fixture
def stub(logged: Logged) -> Iterator[EncoderServiceStub]:
    options = [("grpc.max_receive_message_length", -1), ("grpc.enable_retries", 0)]
    with grpc.insecure_channel(logged.server.address, options=options) as channel:
        yield EncoderServiceStub(channel)


# --- the socket -----------------------------------------------------------------------------------


def test_ready_line_contains_the_client_address(logged: Logged) -> None:
    assert logged.server.address == f"unix:{logged.path}".replace(" ", "%20")
    assert stat.S_IMODE(logged.path.stat().st_mode) == 0o660


@pytest.mark.parametrize("form", ["the ready line's", "a relative path", "three slashes"])
def test_commands_connect_to_a_socket(
    logged: Logged, form: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(logged.path.parent)
    addresses = {
        "the ready line's": logged.server.address,
        "a relative path": f"unix:./{logged.path.name}",
        "three slashes": f"unix://{logged.path}",
    }
    assert logged.after(lambda: run(["info", "--address", addresses[form]]))["method"] == "GetModel"
    assert "all-MiniLM-L6-v2" in capsys.readouterr().out


def test_second_server_does_not_replace_the_socket_of_the_first(
    logged: Logged, minilm_bundle: Path, capsys: pytest.CaptureFixture[str], stub: EncoderServiceStub
) -> None:
    assert run(["serve", str(minilm_bundle), "--address", logged.server.address]) == 1
    assert "another server listens there" in capsys.readouterr().err
    assert logged.after(lambda: stub.Embed(ONE, timeout=60))["status"] == "OK"


# --- the log --------------------------------------------------------------------------------------


def test_request_is_logged_with_its_cost(logged: Logged, stub: EncoderServiceStub) -> None:
    request = pb.EmbedRequest(inputs=[pb.Input(text=SECRET), pb.Input(text=f"the {SECRET}")])
    replies = []
    line = logged.after(
        lambda: replies.append(stub.Embed(request, metadata=(("x-request-id", "job-7/a"),), timeout=60))
    )
    [reply] = replies
    assert (line["method"], line["status"], line["request_id"]) == ("Embed", "OK", "job-7/a")
    assert (line["inputs"], line["tokens"]) == (2, sum(usage.num_tokens for usage in reply.usages))
    assert (line["request_bytes"], line["reply_bytes"]) == (request.ByteSize(), reply.ByteSize())
    compute_ms = reply.timings.compute.ToMicroseconds() / 1000
    assert line["compute_ms"] == pytest.approx(compute_ms, abs=0.01)
    assert line["total_ms"] >= line["compute_ms"] > 0
    assert line["peer"].startswith("unix:")
    assert "reason" not in line


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("Encode", pb.EncodeRequest(inputs=[LONG] * 2, last_hidden_state=True)),
        ("Tokenize", pb.TokenizeRequest(inputs=[LONG] * 2)),
    ],
)
def test_each_method_logs_its_texts_and_tokens(
    logged: Logged, stub: EncoderServiceStub, method: str, request_: Any
) -> None:
    replies: list[Any] = []
    line = logged.after(lambda: replies.append(getattr(stub, method)(request_, timeout=60)))
    num_tokens = sum(len(result.tokens) for result in replies[0].results)
    assert (line["method"], line["status"], line["inputs"]) == (method, "OK", 2)
    assert (line["tokens"], line["reply_bytes"]) == (num_tokens, replies[0].ByteSize())


def test_stream_is_logged_once_when_it_ends(logged: Logged, stub: EncoderServiceStub) -> None:
    parts: list[Any] = []
    request = pb.EncodeStreamRequest(inputs=[LONG] * 2, attention=[pb.AttentionQuery(layers=[0, 1])])
    line = logged.after(lambda: parts.extend(stub.EncodeStream(request, timeout=60)))
    assert len(parts) == 6
    assert (line["method"], line["status"], line["inputs"]) == ("EncodeStream", "OK", 2)
    assert line["reply_bytes"] == sum(part.ByteSize() for part in parts)
    assert line["compute_ms"] > 0


def test_rejected_requests_are_logged_with_their_reason(logged: Logged, stub: EncoderServiceStub) -> None:
    too_long = pb.EmbedRequest(inputs=[pb.Input(text=f"{SECRET} " * 300)])
    line = logged.after(lambda: stub.Embed(too_long, timeout=60))
    assert (line["status"], line["reason"]) == ("INVALID_ARGUMENT", "INPUT_TOO_LONG")
    line = logged.after(lambda: stub.Embed(pb.EmbedRequest(model=SECRET, inputs=[LONG]), timeout=60))
    assert (line["status"], line["reason"], line["reply_bytes"]) == ("NOT_FOUND", "MODEL_NOT_FOUND", 0)


def test_cancelled_requests_are_logged_as_cancelled(logged: Logged, stub: EncoderServiceStub) -> None:
    many = pb.EmbedRequest(inputs=[LONG] * 400)

    def leave() -> None:
        stream = stub.EncodeStream(pb.EncodeStreamRequest(inputs=[LONG] * 8, attention=[pb.AttentionQuery()]))
        next(iter(stream))
        stream.cancel()

    line = logged.after(leave)
    assert (line["method"], line["status"]) == ("EncodeStream", "CANCELLED")
    # Long enough for the request to arrive on a loaded machine, too short to compute it on a fast one.
    line = logged.after(lambda: stub.Embed(many, timeout=1))
    assert (line["status"], line["inputs"]) == ("DEADLINE_EXCEEDED", 400)


def test_http_requests_are_logged_without_possible_text(logged: Logged) -> None:
    url = logged.http_url
    line = logged.after(lambda: urlopen(f"{url}?text={SECRET}").close())
    assert (line["method"], line["status"]) == ("GET /", "200")
    headers = {"Content-Type": "application/json", "X-Request-Id": "page-1"}
    page = Request(f"{url}page", json.dumps({"text": SECRET}).encode(), headers)
    line = logged.after(lambda: urlopen(page).read())
    assert (line["method"], line["status"], line["request_id"]) == ("POST /page", "200", "page-1")
    assert line["inputs"] == 1
    assert line["tokens"] > 0
    assert line["compute_ms"] > 0
    assert line["peer"].startswith("127.0.0.1:")
    line = logged.after(lambda: urlopen(Request(url, method="DELETE")).close())
    assert (line["method"], line["status"], line["reason"]) == ("DELETE /", "405", "METHOD_NOT_ALLOWED")


KEY = "attnlens_Zk3yQ8Zk3yQ8Zk3yQ8Zk3yQ8Zk3yQ8Zk3yQ8Zk3yQ8"


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        (f"v1/models?key={KEY}", "GET /v1/models"),
        (f"v1/models%3Fkey={KEY}", "GET /v1/*"),
        (f"{KEY}/v1/models", "GET /*/v1/models"),
        (f"api/v1/models/{KEY}", "GET /api/v1/models/*"),
        ("v1/chat/completions", "GET /v1/chat/completions"),
        (f"v1/{SECRET}%20{SECRET}", "GET /v1/*"),
    ],
)
def test_keys_in_request_targets_are_not_logged(logged: Logged, path: str, shown: str) -> None:
    line = logged.after(lambda: urlopen(f"{logged.http_url}{path}").close())
    assert line["method"] == shown
    assert KEY[:20] not in json.dumps(line)


@pytest.mark.parametrize("value", ["a b", 'a" status=OK', "", "x" * 129, "a\nb", "é", b"bytes", None])
def test_ambiguous_names_are_omitted_from_the_log(value: str | bytes | None) -> None:
    assert validate_request_id(value) == ""


def test_request_keeps_its_first_end_reason() -> None:
    record = RequestRecord("Embed")
    record.end("ABORTED", "SLOW_CONSUMER")
    record.disconnect()
    assert (record.status, record.reason) == ("ABORTED", "SLOW_CONSUMER")
