"""The life of the process: what it refuses to serve, when it is ready, how it stops."""

import contextlib
import errno
import json
import os
import queue
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from attnlens.tensors import from_tensor
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens_server.server import _let_batches_finish
from failures import read_failure
from served import ServerProcess

SERVICE = "attnlens.v1.EncoderService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
ONE_TEXT = pb.EmbedRequest(inputs=[pb.Input(text="hello")])


@pytest.fixture
def bundle_copy(minilm_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(minilm_bundle, tmp_path / "bundle"))


def refuse(bundle: Path, *args: str) -> str:
    """Start a server that must not start; return the one line that it says."""
    ended = subprocess.run(
        ServerProcess(bundle, *args).command, check=False, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == (2 if "must be" in ended.stderr else 1), ended.stderr
    assert ended.stdout == ""
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("{")]  # without the log
    assert len(lines) == 1, ended.stderr
    return lines[0]


def change_manifest(bundle: Path, **changes: object) -> None:
    path = bundle / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["onnx/model.onnx", "onnx/model_attentions.onnx", "tokenizer.json"])
def test_an_altered_file_is_refused_by_name(bundle_copy: Path, name: str) -> None:
    path = bundle_copy / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert f"{path} was altered" in refuse(bundle_copy)


def test_a_missing_file_is_refused_by_name(bundle_copy: Path) -> None:
    (bundle_copy / "config.json").unlink()
    assert "config.json is missing" in refuse(bundle_copy)


def test_failed_parity_is_refused(bundle_copy: Path) -> None:
    parity = json.loads((bundle_copy / "manifest.json").read_text())["parity"] | {"passed": False}
    change_manifest(bundle_copy, parity=parity)
    line = refuse(bundle_copy)
    assert "parity failed" in line
    assert "report.md" in line


def test_another_format_is_refused(bundle_copy: Path) -> None:
    change_manifest(bundle_copy, format_version=2)
    assert "has format version 2" in refuse(bundle_copy)


def test_defaults_that_nobody_knows_are_refused(bundle_copy: Path) -> None:
    change_manifest(bundle_copy, default_prompt_name="query")
    assert "has no prompt 'query', its default" in refuse(bundle_copy)
    change_manifest(bundle_copy, default_prompt_name="", pooling={"pooling": "POOLING_OF_TOMORROW"})
    assert "states no pooling that this version knows" in refuse(bundle_copy)


def test_a_manifest_that_points_outside_is_refused(bundle_copy: Path) -> None:
    files = json.loads((bundle_copy / "manifest.json").read_text())["files"]
    change_manifest(bundle_copy, files=[*files, {"path": "../secret", "size_bytes": "1", "sha256": "0"}])
    assert "outside the bundle" in refuse(bundle_copy)


def test_a_directory_without_a_bundle_is_refused(tmp_path: Path) -> None:
    assert f"{tmp_path} is not a bundle" in refuse(tmp_path)


def test_cuda_is_refused_where_it_would_not_be_used(minilm_bundle: Path) -> None:
    assert "cuda was asked for" in refuse(minilm_bundle, "--provider", "cuda")


def test_a_host_that_is_not_there_is_refused(minilm_bundle: Path) -> None:
    assert "is no address here" in refuse(minilm_bundle, "--host", "no-such-host.invalid")


def test_a_certificate_that_is_none_is_refused(minilm_bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "cert.pem"
    path.write_text("garbage")
    line = refuse(minilm_bundle, "--tls-cert", str(path), "--tls-key", str(path))
    assert f"can't use the PEM files {path}" in line


def test_an_address_in_use_is_refused(minilm_bundle: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"can't listen on 127.0.0.1:{port}" in refuse(minilm_bundle, "--port", port)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--max-queue", "0"), "max_queue is 0: it must be from 1"),
        (("--max-batch-tokens", "-5"), "max_batch_tokens is -5: it must be from 0"),
        (("--max-text-bytes", "99999999"), "max_text_bytes is 99999999: it must be from 1 to 4194304"),
        (("--max-tokens", "513"), "max_tokens is 513: it must be from 1 to 512"),
    ],
)
def test_an_option_out_of_range_is_refused_with_the_range(
    minilm_bundle: Path, args: tuple[str, ...], message: str
) -> None:
    assert message in refuse(minilm_bundle, *args)


# --- readiness, health, reflection ----------------------------------------------------------------


def test_one_line_says_that_it_is_ready(minilm_server: ServerProcess) -> None:
    pattern = (
        r"attnlens is ready at 127\.0\.0\.1:[1-9]\d*: model all-MiniLM-L6-v2, "
        r"CPUExecutionProvider, warm-up \d+\.\d\d s\n"
    )
    assert re.fullmatch(pattern, minilm_server.ready_line)


@pytest.mark.skipif(sys.platform != "linux", reason="a policy of Linux")
def test_events_do_not_stop_a_batch_in_the_middle(minilm_server: ServerProcess) -> None:
    allowed = "import os; os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))"
    if subprocess.run([sys.executable, "-c", allowed], check=False, capture_output=True).returncode:
        pytest.skip("a sandbox that forbids it")
    main = minilm_server.process.pid
    threads = [int(each.name) for each in Path(f"/proc/{main}/task").iterdir()]
    assert os.sched_getscheduler(main) == os.SCHED_BATCH
    # Threads have numbers in the order of their start; libraries start a few on import that do nothing here.
    assert os.sched_getscheduler(max(threads)) == os.SCHED_BATCH


@pytest.mark.skipif(sys.platform != "linux", reason="a policy of Linux")
def test_a_system_without_scheduling_policies_is_served_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def missing(pid: int) -> int:
        asked.append(pid)
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "sched_getscheduler", missing)
    _let_batches_finish()
    assert asked == [0]


@pytest.mark.parametrize("service", ["", SERVICE])
def test_health_is_serving_by_service_and_overall(minilm_server: ServerProcess, service: str) -> None:
    with grpc.insecure_channel(minilm_server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest(service=service)).status == SERVING
        with pytest.raises(grpc.RpcError) as caught:
            health.Check(health_pb2.HealthCheckRequest(service="no.such.Service"))
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


def test_a_watcher_hears_that_a_service_is_not_here(minilm_server: ServerProcess) -> None:
    with grpc.insecure_channel(minilm_server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        unknown = health.Watch(health_pb2.HealthCheckRequest(service="no.such.Service"))
        assert next(unknown).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        unknown.cancel()


def test_a_watcher_that_leaves_does_not_silence_the_others(minilm_bundle: Path) -> None:
    with ServerProcess(minilm_bundle) as server, grpc.insecure_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        leaving, staying = (health.Watch(health_pb2.HealthCheckRequest()) for _ in range(2))
        assert next(leaving).status == next(staying).status == SERVING
        leaving.cancel()
        health.Check(health_pb2.HealthCheckRequest())
        server.process.terminate()
        assert next(staying).status == NOT_SERVING


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_lists_the_services_and_describes_ours(minilm_server: ServerProcess, version: str) -> None:
    with grpc.insecure_channel(minilm_server.address) as channel:
        call = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
        ]
        listed, described = call(iter(requests))
    names = {each.name for each in listed.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names
    assert described.file_descriptor_response.file_descriptor_proto


# --- stopping -------------------------------------------------------------------------------------


def watch_health(address: str, seen: list[int]) -> Iterator[None]:
    with grpc.insecure_channel(address) as channel:
        for response in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
            seen.append(response.status)
            yield


def test_sigterm_says_not_serving_finishes_what_runs_and_exits_with_zero(minilm_bundle: Path) -> None:
    request = pb.EncodeRequest(
        inputs=[pb.Input(text="word " * 250)] * 12, outputs=[pb.ENCODE_OUTPUT_ATTENTIONS], layers=[0]
    )
    seen: list[int] = []
    with ServerProcess(minilm_bundle) as server, grpc.insecure_channel(server.address) as channel:
        watcher = watch_health(server.address, seen)
        next(watcher)
        stub = EncoderServiceStub(channel)
        running = stub.EncodeStream(pb.EncodeStreamRequest(encode=request))
        first = next(running)
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        next(watcher)
        assert seen == [SERVING, NOT_SERVING]
        assert [part.input_index for part in [first, *running]] == [i for i in range(12) for _ in range(2)]
        stopping.join(60)
        assert server.process.returncode == 0


def test_streams_that_never_end_do_not_hold_up_the_end(minilm_bundle: Path) -> None:
    requests: queue.SimpleQueue[reflection_pb2.ServerReflectionRequest] = queue.SimpleQueue()
    requests.put(reflection_pb2.ServerReflectionRequest(list_services=""))
    with (
        ServerProcess(minilm_bundle, "--drain-timeout-s", "600") as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        call = channel.stream_stream(
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        reflection = call(iter(requests.get, None))
        next(reflection)
        assert server.stop() == 0  # waits for at most 60 s
        reflection.cancel()


def test_sigterm_while_starting_ends_the_process_unannounced(minilm_bundle: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [*ServerProcess(minilm_bundle).command, "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        while process.poll() is None:  # the port is bound before the session is opened
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
        process.terminate()
        assert process.wait(60) == 0
        assert process.stdout is not None
        assert process.stdout.read() == ""


# --- under load -----------------------------------------------------------------------------------


def test_overload_is_refused_at_once_with_a_time_to_come_back(minilm_bundle: Path) -> None:
    request = pb.EmbedRequest(inputs=[pb.Input(text="word " * 200)] * 8)
    with (
        ServerProcess(minilm_bundle, "--max-queue", "8") as server,
        grpc.insecure_channel(server.address, options=[("grpc.enable_retries", 0)]) as channel,
    ):
        stub = EncoderServiceStub(channel)
        stub.Embed(ONE_TEXT)
        calls = [stub.Embed.future(request, timeout=60) for _ in range(6)]
        errors = [error for call in calls if isinstance(error := call.exception(), grpc.RpcError)]
        assert 1 <= len(errors) < 6
        for error in errors:
            failure = read_failure(error)
            assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
            assert failure.retry_delay_s is not None
            assert int(failure.trailers["grpc-retry-pushback-ms"]) == int(failure.retry_delay_s * 1000)
        stub.Embed(ONE_TEXT, timeout=60)  # and afterwards there is room again


def test_many_clients_with_mixed_lengths_get_their_own_vectors(
    minilm_server: ServerProcess,
) -> None:
    texts = ["word " * (1 + 37 * number % 200) + f"number {number}" for number in range(48)]
    with grpc.insecure_channel(minilm_server.address) as channel:
        stub = EncoderServiceStub(channel)
        alone = [stub.Embed(pb.EmbedRequest(inputs=[pb.Input(text=text)])).embeddings for text in texts]
        futures = [stub.Embed.future(pb.EmbedRequest(inputs=[pb.Input(text=text)])) for text in texts]
        crowd = [future.result(60).embeddings for future in futures]
    for one, other in zip(alone, crowd, strict=True):
        np.testing.assert_allclose(from_tensor(one), from_tensor(other), atol=1e-5)
