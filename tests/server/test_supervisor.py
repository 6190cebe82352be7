"""Health of a server follows its batches, graphs, results and refusals; stopped batches free their lane."""

import re
import resource
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import onnx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from onnx import TensorProto, helper

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens_client import AttnlensError
from attnlens_server import local
from attnlens_server.engine.engine import PROBE_TOKENS
from attnlens_server.supervisor import Limits, LoopLag, Observation, Verdict, judge
from failures import Failure, read_failure
from mounted import Mounted
from served import ServerProcess
from tampered import EMBEDDINGS, change_graph, constant, copy_of, endless_loop, through

HIDDEN = "last_hidden_state"
LIMITS = Limits(batch_s=100, lockout_s=30)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
USUAL = pb.EmbedRequest(inputs=[pb.Input(text="a usual text")])
TRIGGER = pb.EmbedRequest(inputs=[pb.Input(text="q q q q")])
CALL_S = 1.5  # longer than `LONG_BATCH_S`
NUM_BOXES = 400_000


def problems(*observations: Observation) -> list[str]:
    verdict, found = Verdict(), []
    for observed in observations:
        verdict = judge(verdict, observed, LIMITS)
        found.append(verdict.problem)
    return found


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (Observation(1, longest_batch_s=101, graph="attention"), "batch of the attention graph .* 100 s"),
        (Observation(1, is_main_graph_usable=False), "cannot be used"),
        (Observation(1, has_bad_results=True), "NaN or infinity"),
    ],
)
def test_each_problem_lasts_as_long_as_its_cause(bad: Observation, problem: str) -> None:
    before, during, after = problems(Observation(0, longest_batch_s=99), bad, Observation(2))
    assert (before, after) == ("", "")
    assert re.search(problem, during)


def test_refusals_without_any_batch_are_a_lockout_until_a_batch_ends() -> None:
    observations = [Observation(1000 + s, num_batches=5, num_refused=s) for s in range(40)]
    found = problems(*observations, Observation(1040, num_batches=6, num_refused=41))
    assert [bool(problem) for problem in found] == [s >= 31 for s in range(40)] + [False]


def test_refusals_while_batches_end_are_no_lockout() -> None:
    assert not any(problems(*(Observation(s, num_batches=s // 10, num_refused=s) for s in range(200))))


def test_one_refusal_after_an_idle_time_is_no_lockout() -> None:
    assert not any(problems(*(Observation(s, num_refused=s >= 50) for s in range(200))))


def test_lockout_ends_when_nobody_is_refused_any_more() -> None:
    found = problems(*(Observation(s, num_refused=min(s, 40)) for s in range(100)))
    assert found[40]
    assert [bool(problem) for problem in found[70:72]] == [True, False]


def test_lag_is_counted_in_its_bucket_and_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    lag = LoopLag()
    for now, seconds in ((0.0, 0.0005), (1.0, 3.0), (2.0, 9.0), (62.0, 1.5)):
        lag.add(seconds, now)
    assert (lag.counts[0], lag.counts[-1], sum(lag.counts)) == (1, 1, 4)
    assert (lag.max_s, lag.sum_s) == (9.0, 13.5005)
    assert [record.args for record in caplog.records] == [(3.0,), (1.5,)]


# --- real servers with a graph that hangs, or fails, for some texts ------------------------------


def contains_trigger(token_id: int) -> list[onnx.NodeProto]:
    """Return nodes that compute whether a batch contains a token at least three times."""
    return [
        constant("trigger", token_id, TensorProto.INT64),
        constant("two", 2, TensorProto.INT64),
        helper.make_node("Equal", ["input_ids", "trigger"], ["is_trigger"]),
        helper.make_node("Cast", ["is_trigger"], ["ones"], to=TensorProto.INT64),
        helper.make_node("ReduceSum", ["ones"], ["count"], keepdims=0),
        helper.make_node("Greater", ["count", "two"], ["has_trigger"]),
    ]


def hangs_in_many_nodes(token_id: int) -> list[onnx.NodeProto]:
    """Return nodes with an endless loop for a batch that contains the trigger."""
    _, loop = endless_loop("inner", HIDDEN)
    loop.input[1] = "has_trigger"
    return [*contains_trigger(token_id), loop]


def hangs_in_one_node(token_id: int) -> list[onnx.NodeProto]:
    """Return nodes of which one takes minutes and cannot be interrupted if a batch contains the trigger.

    It compares each of many boxes with all others.
    """
    return [
        *contains_trigger(token_id),
        shape("many_boxes", 1, NUM_BOXES, 4),
        shape("many_scores", 1, 1, NUM_BOXES),
        shape("one_box", 1, 1, 4),
        shape("one_score", 1, 1, 1),
        shape("max_boxes", NUM_BOXES),
        helper.make_node("Where", ["has_trigger", "many_boxes", "one_box"], ["boxes_shape"]),
        helper.make_node("Where", ["has_trigger", "many_scores", "one_score"], ["scores_shape"]),
        helper.make_node("ConstantOfShape", ["boxes_shape"], ["boxes"]),
        helper.make_node("ConstantOfShape", ["scores_shape"], ["scores"]),
        helper.make_node("NonMaxSuppression", ["boxes", "scores", "max_boxes"], ["kept"]),
        helper.make_node("Cast", ["kept"], ["kept_boxes"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMin", ["kept_boxes"], ["zero"], keepdims=0),
        helper.make_node("Add", ["inner", "zero"], [HIDDEN]),
    ]


def fails_the_probe(token_id: int) -> list[onnx.NodeProto]:
    """Return nodes that make the results of the probe and of batches with the trigger NaN."""
    return [
        *contains_trigger(token_id),
        constant("probe_id", PROBE_TOKENS * 11, TensorProto.INT64),
        helper.make_node("Equal", ["input_ids", "probe_id"], ["is_probe"]),
        helper.make_node("Cast", ["is_probe"], ["probe_ones"], to=TensorProto.INT64),
        helper.make_node("ReduceMax", ["probe_ones"], ["num_probes"], keepdims=0),
        helper.make_node("Cast", ["num_probes"], ["has_probe"], to=TensorProto.BOOL),
        helper.make_node("Or", ["has_trigger", "has_probe"], ["is_bad"]),
        *added_if("is_bad", float("nan")),
    ]


def fails_texts(token_id: int) -> list[onnx.NodeProto]:
    """Return nodes that make the results of batches with the trigger NaN. The probe succeeds."""
    return [*contains_trigger(token_id), *added_if("has_trigger", float("nan"))]


def added_if(condition: str, value: float) -> list[onnx.NodeProto]:
    return [
        constant("value", value),
        constant("nothing", 0.0),
        helper.make_node("Where", [condition, "value", "nothing"], ["added"]),
        helper.make_node("Add", ["inner", "added"], [HIDDEN]),
    ]


def shape(name: str, *sizes: int) -> onnx.NodeProto:
    tensor = helper.make_tensor(name, TensorProto.INT64, [len(sizes)], sizes)
    return helper.make_node("Constant", [], [name], value=tensor)


class Client:
    """Stubs of a server."""

    def __init__(self, channel: grpc.Channel, server: ServerProcess) -> None:
        self.stub = EncoderServiceStub(channel)
        self._health = health_pb2_grpc.HealthStub(channel)
        self._server = server
        self._url = server.http_url()

    def embed(self, request: pb.EmbedRequest = USUAL) -> pb.EmbedResponse:
        return self.stub.Embed(request, timeout=60)

    def fail(self, request: pb.EmbedRequest) -> Failure:
        with pytest.raises(grpc.RpcError) as caught:
            self.embed(request)
        return read_failure(caught.value)

    def wait_for(self, status: int) -> None:
        """Wait until the health services have this status, and check that /readyz agrees."""
        for service in ("", "attnlens.v1.EncoderService", "attnlens.v1.EncoderService.attentions"):
            for response in self._health.Watch(health_pb2.HealthCheckRequest(service=service), timeout=30):
                if response.status == status:
                    break
        try:
            with urllib.request.urlopen(f"{self._url}readyz", timeout=30) as response:
                assert (response.status, status) == (200, SERVING)
        except urllib.error.HTTPError as error:
            assert (error.code, status) == (503, NOT_SERVING)
            self.reason = error.read().decode()


def change_main_graph(bundle: Path, change: Callable[[int], list[onnx.NodeProto]]) -> None:
    """Add nodes at the end of the main graph that depend on the token "q"."""
    vocabulary = [line.strip() for line in (bundle / "vocab.txt").read_text().splitlines()]
    change_graph(bundle, EMBEDDINGS, through(HIDDEN, *change(vocabulary.index("q"))))


@contextmanager
def serving(
    bundle: Path, change: Callable[[int], list[onnx.NodeProto]], *options: str
) -> Iterator[tuple[Client, ServerProcess]]:
    """Run a server with additional nodes, see `change_main_graph`."""
    change_main_graph(bundle, change)
    options = ("--http-port", "0", "--threads", "1", "--lanes", "1", *options)
    with ServerProcess(bundle, *options) as server, grpc.insecure_channel(server.address) as channel:
        client = Client(channel, server)
        client.embed()
        yield client, server


@pytest.fixture
def bundle(small_bundle: Callable[[str], Path], tmp_path: Path) -> Path:
    return copy_of(small_bundle("wordpiece"), tmp_path)


def test_hanging_batch_fails_health_checks_until_its_caller_has_gone(bundle: Path) -> None:
    with serving(bundle, hangs_in_many_nodes, "--stuck-timeout-s", "0.5") as (client, server):
        call = client.stub.Embed.future(TRIGGER, timeout=60)
        client.wait_for(NOT_SERVING)
        assert "a batch of the embeddings graph has been running for more than 0.5 s" in client.reason
        call.cancel()
        client.embed()  # the only lane is free
        client.wait_for(SERVING)
        assert server.stop() == 0
        assert "not healthy: a batch of the embeddings graph" in server.log()
        assert "Traceback" not in server.log()
        assert "running them one by one" not in server.log()


def test_batch_is_stopped_when_its_deadline_has_passed(bundle: Path) -> None:
    with serving(bundle, hangs_in_many_nodes) as (client, _):
        with pytest.raises(grpc.RpcError) as caught:
            client.stub.Embed(TRIGGER, timeout=CALL_S)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        client.embed()


def test_server_with_a_batch_that_cannot_be_stopped_ends_after_the_drain_timeout(bundle: Path) -> None:
    with serving(bundle, hangs_in_one_node, "--drain-timeout-s", "1") as (client, server):
        call = client.stub.Embed.future(TRIGGER, timeout=60)
        time.sleep(0.5)
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=30) == 1
        assert time.monotonic() - started < 15
        assert call.exception() is not None
        assert "a graph hangs and cannot be interrupted" in server.log()


def test_invalid_results_for_the_probe_fail_health_checks(bundle: Path) -> None:
    with serving(bundle, fails_the_probe) as (client, _):
        for _ in range(3):
            assert client.fail(TRIGGER).reason == "INTERNAL"
        client.wait_for(NOT_SERVING)
        assert "NaN or infinity for a valid text" in client.reason


def test_texts_with_invalid_results_do_not_fail_health_checks(bundle: Path) -> None:
    with serving(bundle, fails_texts) as (client, _):
        for _ in range(6):
            failure = client.fail(TRIGGER)
            assert (failure.reason, failure.code) == ("INTERNAL", grpc.StatusCode.INTERNAL)
            assert failure.message.startswith("inputs[0] has NaN or infinity in its result")
        time.sleep(1)  # the supervisor would have changed the health by now
        client.wait_for(SERVING)


# --- other hosts ----------------------------------------------------------------------------------


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("change", "problem"),
    [(fails_the_probe, b"NaN or infinity for a valid text"), (hangs_in_many_nodes, b"more than 0.5 s")],
)
def test_application_is_not_ready_while_a_batch_hangs_or_results_are_invalid(
    bundle: Path, change: Callable[[int], list[onnx.NodeProto]], problem: bytes
) -> None:
    change_main_graph(bundle, change)
    with Mounted(bundle, stuck_timeout_s=0.5) as mounted:
        assert mounted.ask("GET", "/readyz").status == 200
        connections = [mounted.connect() for _ in range(3)]
        for connection in connections:
            mounted.send(connection, "POST", "/embed", {"inputs": "q q q q"})
            if change is fails_the_probe:
                assert connection.getresponse().status == 500
        wait_until(lambda: mounted.ask("GET", "/readyz").status == 503)
        assert problem in mounted.ask("GET", "/readyz").body
        for path in ("/health", "/.well-known/ready"):
            assert mounted.ask("GET", path).status == 503
        for connection in connections:
            connection.close()  # cancels its request
        if change is hangs_in_many_nodes:
            wait_until(lambda: mounted.ask("GET", "/readyz").status == 200)


def test_model_in_the_own_process_logs_invalid_results(
    bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change_main_graph(bundle, fails_the_probe)
    with local(bundle, threads=1) as model:
        for _ in range(3):
            with pytest.raises(AttnlensError, match="NaN or infinity"):
                model.embed(["q q q q"])
        wait_until(lambda: "not healthy: the graph of the main results returns NaN" in caplog.text)


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of another process")
def test_graph_that_does_not_fit_into_memory_is_unavailable_until_there_is_more(minilm_bundle: Path) -> None:
    request = pb.EncodeRequest(inputs=USUAL.inputs, attention=[pb.AttentionQuery(layers=[0])])
    options = ("--http-port", "0", "--threads", "1", "--lanes", "1")
    with ServerProcess(minilm_bundle, *options) as server, grpc.insecure_channel(server.address) as channel:
        client = Client(channel, server)
        client.embed()
        # Unlike RLIMIT_AS, RLIMIT_DATA does not count what the allocator has only reserved.
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        [used_kib] = re.findall(r"^VmData:\s*(\d+) kB$", status, re.MULTILINE)
        limit = (int(used_kib) << 10) + (20 << 20)  # the graph needs more
        resource.prlimit(server.process.pid, resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
        with pytest.raises(grpc.RpcError) as caught:
            client.stub.Encode(request, timeout=60)
        failure = read_failure(caught.value)
        assert (failure.reason, failure.code) == ("GRAPH_UNAVAILABLE", grpc.StatusCode.UNAVAILABLE)
        assert failure.retry_delay_s is not None
        client.embed()
        resource.prlimit(server.process.pid, resource.RLIMIT_DATA, (resource.RLIM_INFINITY,) * 2)
        time.sleep(failure.retry_delay_s)
        client.stub.Encode(request, timeout=60)
        client.wait_for(SERVING)


def test_server_with_too_little_memory_for_calls_does_not_start(minilm_bundle: Path) -> None:
    with pytest.raises(RuntimeError, match=r"max_memory_bytes is 500000000, but at least \d{9,} are needed"):
        ServerProcess(minilm_bundle, "--max-memory-bytes", "500000000").__enter__()


def test_memory_limit_of_the_process_is_divided_completely(minilm_bundle: Path) -> None:
    options = ("--max-memory-bytes", str(1200 << 20), "--no-explain", "--lanes", "1", "--threads", "1")
    with ServerProcess(minilm_bundle, *options) as server:
        server.stop()  # until then, a thread writes the log
        [line] = re.findall(r"memory at most [^\"]*", server.log())
    total, limit, *parts = (int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\d|\d", line))
    assert total == limit == 1200
    assert abs(sum(parts) - 1200) <= 2  # rounded
