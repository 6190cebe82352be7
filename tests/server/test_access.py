"""Keys, certificates and policies of a real server, over gRPC and HTTP, and their reload while calls run."""

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from attnlens.oip import open_inference_pb2
from attnlens.oip.open_inference_pb2_grpc import GRPCInferenceServiceStub
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens_cli.app import run
from attnlens_client import (
    Client,
    PermissionDeniedError,
    RateLimitedError,
    UnauthenticatedError,
)
from attnlens_server.access.keys import new_key
from attnlens_server.config import ServerConfig
from attnlens_server.server import Server
from commands_here import process_as_before
from served import ServerProcess

NAMES = ("search", "import", "slow", "prometheus")
POLICY = """
[default]
methods = ["embeddings"]

[clients.search]
methods = ["*"]
share = 4

[clients.slow]
texts_per_second = 0.01
burst_texts = 3

[clients.prometheus]
methods = ["Metrics"]
"""
TEXT = pb.EmbedRequest(inputs=[pb.Input(text="It rained.")])


class Guarded(NamedTuple):
    server: ServerProcess
    url: str
    keys: Mapping[str, str]
    files: Path

    def metadata(self, name: str | None) -> tuple[tuple[str, str], ...]:
        return () if name is None else (("authorization", f"Bearer {self.keys.get(name, name)}"),)

    def get(
        self, path: str, name: str | None, body: Any = None, **headers: str
    ) -> tuple[int, Any, Mapping[str, str]]:
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=60)
        sent = dict(self.metadata(name)) | headers
        content = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, content, sent)
        response = connection.getresponse()
        text = response.read()
        connection.close()
        shown = json.loads(text) if text[:1] in (b"{", b"[") else text
        return response.status, shown, {name.lower(): value for name, value in response.headers.items()}


def write_keys(path: Path, keys: Mapping[str, str]) -> None:
    path.write_text("\n".join(keys.values()) + "\n")


@pytest.fixture(scope="module")
def guarded(minilm_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    files = tmp_path_factory.mktemp("access")
    keys = {name: new_key(name) for name in NAMES}
    write_keys(files / "keys", {name: line for name, (_, line) in keys.items()})
    (files / "policy.toml").write_text(POLICY)
    args = ["--api-keys", str(files / "keys"), "--policy", str(files / "policy.toml"), "--http-port", "0"]
    with ServerProcess(minilm_bundle, *args, "--lanes", "1") as server:
        yield Guarded(server, server.http_url(), {name: key for name, (key, _) in keys.items()}, files)


@pytest.fixture(scope="module")
def channel(guarded: Guarded) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(guarded.server.address) as channel:
        yield channel


def trailers(error: grpc.RpcError) -> dict[str, Any]:
    metadata: Any = error.trailing_metadata()
    return dict(metadata)


def failure(call: Callable[..., Any], request: Message, metadata: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call(request, metadata=metadata, timeout=20)
    return caught.value


def reason(error: grpc.RpcError) -> tuple[grpc.StatusCode, str]:
    return error.code(), trailers(error)["attnlens-error-reason"]


def test_grpc_calls_need_a_key_and_a_permission(guarded: Guarded, channel: grpc.Channel) -> None:
    stub, metadata = EncoderServiceStub(channel), guarded.metadata
    for name in (None, "wrong", guarded.keys["search"][:-1]):
        assert reason(failure(stub.Embed, TEXT, metadata(name))) == (
            grpc.StatusCode.UNAUTHENTICATED,
            "UNAUTHENTICATED",
        )
    assert stub.Embed(TEXT, metadata=metadata("import")).embeddings.shape
    error = failure(stub.Explain, pb.ExplainRequest(inputs=TEXT.inputs), metadata("import"))
    assert reason(error) == (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED")
    assert error.details() == (
        "import may not call Explain: ask the operator of the server to change its policy"
    )
    assert stub.Explain(pb.ExplainRequest(inputs=TEXT.inputs), metadata=metadata("search")).results
    assert stub.ListModels(pb.ListModelsRequest(), metadata=metadata("prometheus")).models
    twice = metadata("search") * 2
    assert reason(failure(stub.Embed, TEXT, twice))[1] == "UNAUTHENTICATED"


def test_a_stream_is_refused_before_its_first_message(guarded: Guarded, channel: grpc.Channel) -> None:
    stream = EncoderServiceStub(channel).EncodeStream(
        pb.EncodeStreamRequest(inputs=TEXT.inputs), metadata=guarded.metadata("import")
    )
    with pytest.raises(grpc.RpcError) as caught:
        next(stream)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_the_open_inference_protocol_has_the_same_access_control(
    guarded: Guarded, channel: grpc.Channel
) -> None:
    stub = GRPCInferenceServiceStub(channel)
    assert stub.ServerReady(open_inference_pb2.ServerReadyRequest()).ready
    request = open_inference_pb2.ServerMetadataRequest()
    assert reason(failure(stub.ServerMetadata, request, ()))[1] == "UNAUTHENTICATED"
    assert stub.ServerMetadata(request, metadata=guarded.metadata("import")).name == "attnlens"
    infer = open_inference_pb2.ModelInferRequest()
    assert reason(failure(stub.ModelInfer, infer, guarded.metadata("import")))[1] == "PERMISSION_DENIED"


def test_health_is_open_and_reflection_is_off(guarded: Guarded, channel: grpc.Channel) -> None:
    assert HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status == 1
    assert guarded.get("/healthz", None)[0] == 200
    replies = ServerReflectionStub(channel).ServerReflectionInfo(
        iter([ServerReflectionRequest(list_services="")]), metadata=guarded.metadata("search")
    )
    with pytest.raises(grpc.RpcError) as caught:
        next(replies)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_exceeded_rates_are_distinct_from_overload(guarded: Guarded, channel: grpc.Channel) -> None:
    stub = EncoderServiceStub(channel)
    for _ in range(3):
        stub.Embed(TEXT, metadata=guarded.metadata("slow"))
    error = failure(stub.Embed, TEXT, guarded.metadata("slow"))
    assert reason(error) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "RATE_LIMITED")
    assert str(error.details()).startswith("this client may send 0.01 texts per second on average")
    status = status_pb2.Status.FromString(trailers(error)["grpc-status-details-bin"])
    delays = [detail for detail in status.details if detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR)]
    retry = error_details_pb2.RetryInfo()
    assert delays[0].Unpack(retry)
    assert 90 < retry.retry_delay.seconds <= 100
    code, body, headers = guarded.get("/v1/embeddings", "slow", {"input": "It rained."})
    assert (code, body["error"]["type"], body["error"]["code"]) == (429, "rate_limit_error", "rate_limited")
    assert 90 < int(headers["retry-after"]) <= 100
    client = Client(guarded.server.address, api_key=guarded.keys["slow"], timeout_s=5)
    with client, pytest.raises(RateLimitedError):
        client.embed(["It rained."])


DENIED = "import may not call Score: ask the operator of the server to change its policy"
BODY = {
    "query": "a",
    "texts": ["b"],
    "documents": ["b"],
    "text_1": "a",
    "text_2": "b",
    "inputs": "a",
    "input": "a",
}


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        (
            "/v1/attnlens/score",
            {"error": DENIED, "reason": "PERMISSION_DENIED", "metadata": {"method": "Score"}},
        ),
        (
            "/score",
            {
                "error": {
                    "message": DENIED,
                    "type": "permission_error",
                    "param": None,
                    "code": "permission_denied",
                }
            },
        ),
        ("/v2/rerank", {"message": DENIED, "detail": DENIED}),
    ],
)
def test_http_errors_have_the_form_of_the_api(guarded: Guarded, path: str, shown: Any) -> None:
    code, body, headers = guarded.get(path, None, BODY)
    assert (code, headers["www-authenticate"]) == (401, "Bearer")
    assert "the key is missing: send `Authorization: Bearer KEY`" in json.dumps(body)
    code, body, _ = guarded.get(path, "import", BODY)
    assert (code, body) == (403, shown)


def test_other_apis_report_denied_calls_in_their_form(guarded: Guarded) -> None:
    for path, key in (
        ("/embed", "error"),
        ("/v2/embed", "message"),
        ("/vectors", "error"),
        ("/api/embed", "error"),
    ):
        for name, status in ((None, 401), ("prometheus", 403)):
            code, body, _ = guarded.get(path, name, {})
            assert (code, key in body) == (status, True)
    assert guarded.get("/embed", "import", {"inputs": "It rained."})[0] == 200
    assert [guarded.get("/metrics", name)[0] for name in (None, "import", "prometheus")] == [401, 403, 200]
    # A page contains explanations and attention, so it needs the permission for both.
    typed = {"Content-Type": "application/json"}
    assert [guarded.get("/page", name, {"text": "a"}, **typed)[0] for name in ("import", "search")] == [
        403,
        200,
    ]


def test_clients_and_commands_send_keys(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    address, key = guarded.server.address, guarded.keys["import"]
    with Client(address, api_key=key, priority="bulk") as client:
        assert client.embed(["It rained."]).shape == (1, 384)
        assert key not in repr(client)
        with pytest.raises(PermissionDeniedError):
            client.explain(["It rained."])
    with Client(address, metadata=guarded.metadata("import")) as client:  # without the argument for keys
        assert client.embed(["It rained."]).shape == (1, 384)
    with Client(address) as client, pytest.raises(UnauthenticatedError, match="the key is missing"):
        client.embed(["It rained."])
    monkeypatch.setenv("ATTNLENS_API_KEY", key)
    with process_as_before():
        assert run(["info", "--address", address]) == 0
        assert run(["info", "--address", address, "--api-key", "wrong"]) == 1
    assert "the key is invalid: send one of the server's keys" in capsys.readouterr().err


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_files_are_used_without_a_restart_while_calls_run(guarded: Guarded, channel: grpc.Channel) -> None:
    stub, keys = EncoderServiceStub(channel), dict(guarded.keys)
    failures: list[grpc.RpcError] = []
    done = threading.Event()

    def send() -> None:
        while not done.is_set():
            try:
                stub.Embed(TEXT, metadata=guarded.metadata("import"))
            except grpc.RpcError as error:
                failures.append(error)

    def code(metadata: Any) -> str:
        return reason(failure(stub.Score, pb.ScoreRequest(), metadata))[1]

    old, (new, new_line) = (guarded.files / "keys").read_text(), new_key("search")
    thread = threading.Thread(target=send)
    thread.start()
    try:
        lines = [line for line in old.splitlines() if not line.startswith("search ")]
        (guarded.files / "next").write_text("\n".join([*lines, new_line]))
        (guarded.files / "next").rename(guarded.files / "keys")
        (guarded.files / "policy.toml").write_text("[default")
        wait_until(lambda: code((("authorization", f"Bearer {new}"),)) == "NOT_SUPPORTED")
        assert code(guarded.metadata("search")) == "UNAUTHENTICATED"
        wait_until(lambda: "is not valid TOML" in guarded.server.log())
        assert code(guarded.metadata("import")) == "PERMISSION_DENIED"  # the previous policy
        (guarded.files / "policy.toml").write_text(POLICY.replace('["embeddings"]', '["Embed", "Score"]'))
        wait_until(lambda: code(guarded.metadata("import")) == "NOT_SUPPORTED")
    finally:
        done.set()
        thread.join()
        (guarded.files / "keys").write_text(old)
        (guarded.files / "policy.toml").write_text(POLICY)
        wait_until(lambda: code(guarded.metadata("search")) == "NOT_SUPPORTED")
        wait_until(lambda: code(guarded.metadata("import")) == "PERMISSION_DENIED")
    assert not failures
    log = [json.loads(line) for line in guarded.server.log().splitlines()]
    audit = [line for line in log if line["logger"] == "attnlens_server.audit"]
    changes = [line for line in audit if line["message"] == "changed"]
    assert [line["file"] for line in changes[:2]] == [
        str(guarded.files / name) for name in ("keys", "policy.toml")
    ]
    assert (changes[0]["added"], changes[0]["removed"], changes[0]["changed"]) == ([], [], ["search"])
    assert changes[1]["changed"] == ["clients.slow", "default"]  # tables inherit from the default
    assert sum("is not valid TOML" in line["message"] for line in log) == 1
    assert {line["reason"] for line in audit if line["message"] == "refused"} == {
        "UNAUTHENTICATED",
        "PERMISSION_DENIED",
    }
    for key in (*keys.values(), new, *old.split("sha256:")[1:]):
        assert key.strip() not in guarded.server.log()


async def test_health_and_reflection_can_need_a_key(minilm_bundle: Path, tmp_path: Path) -> None:
    key, line = new_key("probe")
    (tmp_path / "keys").write_text(line)
    (tmp_path / "policy").write_text("open_health = false\n[default]\nmethods = []\n")
    server = Server(
        ServerConfig(
            bundle=minilm_bundle,
            port=0,
            http_port=0,
            api_keys=tmp_path / "keys",
            policy=tmp_path / "policy",
            reflection=True,
        )
    )
    grpc_server, address = await server._listen()
    await server._listen_for_http()
    assert server._http is not None
    place = urlsplit(server._http.url).netloc

    async def outcomes(metadata: Any) -> list[str]:
        found = []
        async with grpc.aio.insecure_channel(address) as channel:
            health, inference = HealthStub(channel), GRPCInferenceServiceStub(channel)
            for call in (
                health.Check(health_pb2.HealthCheckRequest(), metadata=metadata),
                aiter(health.Watch(health_pb2.HealthCheckRequest(), metadata=metadata)).__anext__(),
                inference.ServerLive(open_inference_pb2.ServerLiveRequest(), metadata=metadata),
                aiter(
                    ServerReflectionStub(channel).ServerReflectionInfo(
                        iter([ServerReflectionRequest(list_services="")]), metadata=metadata
                    )
                ).__anext__(),
            ):
                try:
                    await call
                except grpc.aio.AioRpcError as error:
                    found.append(dict(error.trailing_metadata())["attnlens-error-reason"])
                else:
                    found.append("OK")
        return found

    def status(path: str, **headers: str) -> int:
        connection = http.client.HTTPConnection(place, timeout=20)
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        response.read()
        connection.close()
        return response.status

    authorization = f"Bearer {key}"
    assert await outcomes(()) == ["UNAUTHENTICATED"] * 4
    assert await outcomes((("authorization", authorization),)) == ["OK", "OK", "OK", "PERMISSION_DENIED"]
    paths = ("/healthz", "/health", "/ping", "/.well-known/live")
    run = asyncio.get_running_loop().run_in_executor
    assert [await run(None, status, path) for path in paths] == [401] * 4
    accepted = [await run(None, partial(status, path, Authorization=authorization)) for path in paths]
    assert accepted == [200, 503, 503, 204]
    await server._shut_down(grpc_server)


def test_explanations_of_scores_need_the_permission_for_explanations(
    classifier_bundle: Callable[[str], Path], tmp_path: Path
) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('[default]\nmethods = ["scores"]\n')
    options = ("--policy", str(policy), "--http-port", "0")
    with ServerProcess(classifier_bundle("reranker"), *options) as server, Client(server.address) as client:
        assert len(client.rerank("the man", ["the sea"])) == 1
        with pytest.raises(PermissionDeniedError, match="need the permission to call Explain: omit them"):
            client.rerank("the man", ["the sea"], explain=True)
        guarded = Guarded(server, server.http_url(), {}, tmp_path)
        body = {"query": "the man", "documents": ["the sea"]}
        assert guarded.get("/v2/rerank", None, body)[0] == 200
        assert guarded.get("/v2/rerank", None, {**body, "relevant_spans": {}})[0] == 403
        assert guarded.get("/v2/rerank", None, {**body, "relevant_spans": {"mode": "disabled"}})[0] == 200
