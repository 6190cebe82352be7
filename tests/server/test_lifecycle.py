"""Process lifecycle: startup errors, readiness and shutdown."""

import asyncio
import contextlib
import errno
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from attnlens.tensors import from_tensor
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens_server.engine.engine import LANE_NICENESS
from attnlens_server.process import _use_batch_scheduling
from attnlens_server.server import _stop_signals
from failures import read_failure
from served import ServerProcess
from tampered import EMBEDDINGS, change_graph, copy_of, endless_loop, through

SERVICE = "attnlens.v1.EncoderService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
ONE_TEXT = pb.EmbedRequest(inputs=[pb.Input(text="hello")])


def failed_start(bundle: Path, *args: str) -> str:
    """Start a server that must fail to start. Return its one-line error message."""
    ended = subprocess.run(
        ServerProcess(bundle, *args).command, check=False, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == (2 if ": use " in ended.stderr else 1), ended.stderr
    assert ended.stdout == ""
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("{")]  # excluding the log
    assert len(lines) == 1, ended.stderr
    return lines[0]


# --- startup errors -------------------------------------------------------------------------------


def test_invalid_bundle_is_rejected_with_one_line(tmp_path: Path) -> None:
    assert f"{tmp_path} is not a bundle" in failed_start(tmp_path)


def test_cuda_is_rejected_when_it_would_not_be_used(minilm_bundle: Path) -> None:
    assert "cuda was requested" in failed_start(minilm_bundle, "--provider", "cuda")


def test_option_out_of_range_is_a_usage_error(tmp_path: Path) -> None:
    assert "--max-concurrent-inputs is 0: use 1" in failed_start(tmp_path, "--max-concurrent-inputs", "0")


# --- readiness, health, reflection ----------------------------------------------------------------


def test_readiness_is_announced_in_one_line(minilm_server: ServerProcess) -> None:
    pattern = (
        r"attnlens is ready at 127\.0\.0\.1:[1-9]\d*: model all-MiniLM-L6-v2, "
        r"CPUExecutionProvider, fp32, texts up to 256 tokens, (\d+) threads?, \1 lanes?, "
        r"batches of 256 tokens, warm-up \d+\.\d\d s\n"
    )
    assert re.fullmatch(pattern, minilm_server.ready_line)


@pytest.mark.skipif(sys.platform != "linux", reason="scheduling policies are specific to Linux")
def test_event_loop_does_not_preempt_a_batch(minilm_server: ServerProcess) -> None:
    allowed = "import os; os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))"
    if subprocess.run([sys.executable, "-c", allowed], check=False, capture_output=True).returncode:
        pytest.skip("the sandbox forbids changing the scheduling policy")
    main = minilm_server.process.pid
    threads = [int(each.name) for each in Path(f"/proc/{main}/task").iterdir()]
    assert os.sched_getscheduler(main) == os.SCHED_BATCH
    # Thread numbers follow the start order. Libraries start a few threads on import that are idle here.
    assert os.sched_getscheduler(max(threads)) == os.SCHED_BATCH


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a niceness of their own only on Linux")
def test_batches_get_less_time_than_the_event_loop_and_small_calls(minilm_server: ServerProcess) -> None:
    main = minilm_server.process.pid
    threads = [int(each.name) for each in Path(f"/proc/{main}/task").iterdir()]
    own = os.getpriority(os.PRIO_PROCESS, main)
    if own >= LANE_NICENESS:
        pytest.skip("these tests run with a low priority themselves")
    assert {os.getpriority(os.PRIO_PROCESS, each) for each in threads} == {own, LANE_NICENESS}


def test_permanent_objects_are_not_collected_again(minilm_bundle: Path) -> None:
    """A full collection would delay all calls by 100 ms."""
    script = f"""
import gc, os, signal
from pathlib import Path
from attnlens_server.config import ServerConfig
from attnlens_server.engine.engine import LANE_NICENESS
from attnlens_server.process import serve

def on_ready(ready):
    print(gc.get_freeze_count(), *gc.get_threshold(), gc.isenabled())
    os.kill(os.getpid(), signal.SIGTERM)

serve(ServerConfig(bundle=Path({str(minilm_bundle)!r}), port=0), on_ready)
"""
    printed = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    ).stdout
    num_frozen, first, *_, is_enabled = printed.split()
    assert int(num_frozen) > 50_000
    assert (first, is_enabled) == ("5000", "True")


@pytest.mark.skipif(sys.platform != "linux", reason="scheduling policies are specific to Linux")
def test_server_works_without_scheduling_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    queried_pids = []

    def missing(pid: int) -> int:
        queried_pids.append(pid)
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "sched_getscheduler", missing)
    _use_batch_scheduling()
    assert queried_pids == [0]


@pytest.mark.parametrize("service", ["", SERVICE])
def test_health_is_serving_for_each_service_and_overall(minilm_server: ServerProcess, service: str) -> None:
    with grpc.insecure_channel(minilm_server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest(service=service)).status == SERVING
        with pytest.raises(grpc.RpcError) as caught:
            health.Check(health_pb2.HealthCheckRequest(service="no.such.Service"))
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        assert "use one of '', 'attnlens.v1.EncoderService'" in (caught.value.details() or "")


def test_health_watch_reports_an_unknown_service(minilm_server: ServerProcess) -> None:
    with grpc.insecure_channel(minilm_server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        unknown = health.Watch(health_pb2.HealthCheckRequest(service="no.such.Service"))
        assert next(unknown).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        unknown.cancel()


def test_cancelled_health_watch_does_not_affect_others(minilm_bundle: Path) -> None:
    with ServerProcess(minilm_bundle) as server, grpc.insecure_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        leaving, staying = (health.Watch(health_pb2.HealthCheckRequest()) for _ in range(2))
        assert next(leaving).status == next(staying).status == SERVING
        leaving.cancel()
        health.Check(health_pb2.HealthCheckRequest())
        server.process.terminate()
        assert next(staying).status == NOT_SERVING


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_lists_and_describes_the_services(minilm_server: ServerProcess, version: str) -> None:
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


def test_sigterm_reports_not_serving_finishes_running_calls_and_exits_with_zero(minilm_bundle: Path) -> None:
    request = pb.EncodeStreamRequest(
        inputs=[pb.Input(text="word " * 250)] * 12, attention=[pb.AttentionQuery(layers=[0])]
    )
    seen: list[int] = []
    with ServerProcess(minilm_bundle) as server, grpc.insecure_channel(server.address) as channel:
        watcher = watch_health(server.address, seen)
        next(watcher)
        stub = EncoderServiceStub(channel)
        running = stub.EncodeStream(request)
        first = next(running)
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        next(watcher)
        assert seen == [SERVING, NOT_SERVING]
        assert [part.input_index for part in [first, *running]] == [i for i in range(12) for _ in range(2)]
        stopping.join(60)
        assert server.process.returncode == 0


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has fewer signals")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM"])
async def test_every_termination_signal_drains_the_server(name: str) -> None:
    with _stop_signals() as stop:
        signal.raise_signal(getattr(signal, name))
        async with asyncio.timeout(30):
            await stop.wait()


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="needs SIGHUP")
def test_closing_the_terminal_stops_the_server_gracefully(minilm_bundle: Path) -> None:
    with ServerProcess(minilm_bundle) as server:
        server.process.send_signal(signal.SIGHUP)
        assert server.process.wait(60) == 0
        assert '"stopped"' in server.log()


def test_endless_streams_do_not_block_the_shutdown(minilm_bundle: Path) -> None:
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
        assert server.stop() == 0  # waits for up to 60 s
        reflection.cancel()


def test_sigterm_during_startup_stops_the_process_without_a_ready_line(
    small_bundle: Callable[[str], Path], tmp_path: Path
) -> None:
    bundle = copy_of(small_bundle("wordpiece"), tmp_path)
    name = "last_hidden_state"
    change_graph(bundle, EMBEDDINGS, through(name, *endless_loop("inner", name)))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [*ServerProcess(bundle).command, "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        while process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
        process.terminate()
        assert process.wait(60) == 0
        assert process.stdout is not None
        assert process.stdout.read() == ""


# --- under load -----------------------------------------------------------------------------------


def test_overload_is_rejected_immediately_with_a_retry_delay(minilm_bundle: Path) -> None:
    request = pb.EmbedRequest(inputs=[pb.Input(text="word " * 200)] * 8)
    with (
        ServerProcess(minilm_bundle, "--max-concurrent-inputs", "8") as server,
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
        stub.Embed(ONE_TEXT, timeout=60)  # afterwards, there is capacity again


def test_many_clients_with_texts_of_mixed_lengths_get_their_own_vectors(
    minilm_server: ServerProcess,
) -> None:
    texts = ["word " * (1 + 37 * number % 200) + f"number {number}" for number in range(48)]
    with grpc.insecure_channel(minilm_server.address) as channel:
        stub = EncoderServiceStub(channel)
        alone = [stub.Embed(pb.EmbedRequest(inputs=[pb.Input(text=text)])).embeddings for text in texts]
        futures = [stub.Embed.future(pb.EmbedRequest(inputs=[pb.Input(text=text)])) for text in texts]
        concurrent = [future.result(60).embeddings for future in futures]
    for one, other in zip(alone, concurrent, strict=True):
        np.testing.assert_allclose(from_tensor(one), from_tensor(other), atol=1e-5)
