"""Measures the cost of hostile clients for a server: `python -m bench.studies.hostile BUNDLE`.

Each measurement attacks a new server and compares the cost with a target. tests/hostile covers the behavior
under the same attacks. Requires Linux and an otherwise idle machine.
"""

import argparse
import gzip
import math
import re
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens.v1.explanation_pb2 import PAIR_MATRIX_INPUT
from bench.servers import RunningServer, attnlens_server
from bench.studies.raw_http2 import RawClient, Reply, method, repeated_field

MIB = 1 << 20
LOG = Path(tempfile.gettempdir()) / "attnlens-hostile.log"
GIVE_UP_S = 30.0
PROBE_EVERY_S = 0.01
NUM_HEAVY, NUM_LIGHT_CALLS, WARM_UP_CALLS = 64, 100, 5
ATTEMPTS = 3  # the shortest time is reported, because noise only adds time

EVERY_LAYER = [pb.AttentionQuery()]
LONG_IDS = pb.Input(token_ids=pb.TokenIds(input_ids=[101, *[2773] * 254, 102]))  # maximum length of MiniLM
LONG_TEXT = pb.Input(text="word " * 250)


@dataclass(frozen=True)
class Measured:
    """A measurement and its target."""

    what: str
    value: float
    target: float
    unit: str
    lower_is_better: bool = True

    def __str__(self) -> str:
        met = self.value <= self.target if self.lower_is_better else self.value >= self.target
        target = f"{'<=' if self.lower_is_better else '>='} {self.target:g}"
        return f"| {self.what} | {self.value:.3g} {self.unit} | {target} | {'yes' if met else 'NO'} |"


@contextmanager
def served(bundle: Path, *args: str) -> Iterator[RunningServer]:
    """Run a server with additional options and warm up each graph."""
    with attnlens_server(bundle, "fp32", 0, LOG, *args) as server:
        call(server, "Embed", pb.EmbedRequest(inputs=[LONG_TEXT]).SerializeToString())
        call(
            server, "Encode", pb.EncodeRequest(inputs=[LONG_TEXT], attention=EVERY_LAYER).SerializeToString()
        )
        yield server


def call(server: RunningServer, name: str, message: bytes, timeout_s: float = GIVE_UP_S) -> Reply:
    """Make one call. Raises TimeoutError after `timeout_s`."""
    with RawClient(server.address) as client:
        reply = client.call(method(name), message)
        client.wait_for_ends([reply], timeout_s)
    return reply


# --- Tokenize -------------------------------------------------------------------------------------


def measure_tokenize(bundle: Path) -> list[Measured]:
    """Measure Tokenize with texts of 32 KB and 128 KB."""
    with served(bundle) as server:
        small, large = (tokenize_s(server, num_bytes) for num_bytes in (32 << 10, 128 << 10))
    return [
        Measured("Tokenize, time(128 KB) / time(32 KB)", large / small, 5, ""),
        Measured("Tokenize, 128 KB", large, 0.2, "s"),
    ]


def tokenize_s(server: RunningServer, num_bytes: int) -> float:
    """Return the shortest time to tokenize a text, or infinity if it exceeds GIVE_UP_S."""
    request = pb.TokenizeRequest(inputs=[pb.Input(text="word " * (num_bytes // 5))]).SerializeToString()
    times = []
    for _ in range(ATTEMPTS):
        started = time.perf_counter()
        try:
            call(server, "Tokenize", request)
        except TimeoutError:
            return math.inf
        times.append(time.perf_counter() - started)
    return min(times)


# --- memory ---------------------------------------------------------------------------------------


def measure_compressed(bundle: Path) -> list[Measured]:
    """Send six 33 KB messages concurrently that decompress to 32 MB each."""
    bomb = gzip.compress(b"\x12\x00" * (16 * MIB - 32))
    with served(bundle) as server, ExitStack() as stack:
        idle_mib = reset_peak(server)
        clients = [stack.enter_context(RawClient(server.address)) for _ in range(6)]
        calls = [
            client.call(method("Embed"), bomb, headers=[("grpc-encoding", "gzip")], is_compressed=True)
            for client in clients
        ]
        for client, reply in zip(clients, calls, strict=True):
            client.wait_for_ends([reply])
        grown_mib = server.peak_rss_mib - idle_mib
    return [Measured("six gzip messages of 33 KB, peak RSS above idle", grown_mib, 300, "MiB")]


def reset_peak(server: RunningServer) -> float:
    server.forget_peak()
    return server.rss_mib


def measure_limits(bundle: Path) -> list[Measured]:
    """Saturate a server with each kind of call and compare its memory with the configured limits.

    The limits are --max-call-memory-bytes and, for attention, --max-attention-bytes.
    """
    embed = pb.EmbedRequest(inputs=[LONG_IDS] * 512).SerializeToString()
    tokens = pb.EncodeRequest(inputs=[LONG_IDS] * 80).SerializeToString()
    maps = pb.EncodeRequest(inputs=[LONG_IDS], attention=EVERY_LAYER).SerializeToString()
    many_maps = pb.EncodeStreamRequest(inputs=[LONG_IDS] * 16, attention=EVERY_LAYER).SerializeToString()
    return [
        limit_ratio(bundle, "Embed", "Embed, 512 texts a call", embed, num_calls=8, limit_mib=512),
        limit_ratio(bundle, "Encode", "Encode, token vectors, 80 texts", tokens, num_calls=16, limit_mib=512),
        limit_ratio(bundle, "Encode", "Encode, attention, 1 text", maps, num_calls=32, limit_mib=768),
        limit_ratio(
            bundle,
            "EncodeStream",
            "EncodeStream, attention, 16 texts",
            many_maps,
            num_calls=16,
            limit_mib=768,
        ),
    ]


def limit_ratio(
    bundle: Path, name: str, what: str, request: bytes, *, num_calls: int, limit_mib: float
) -> Measured:
    """Return the memory limit divided by the memory used by calls with unread replies."""
    with served(bundle) as server, RawClient(server.address, window_bytes=0) as client:
        idle_mib = reset_peak(server)
        calls = [client.call(method(name), request) for _ in range(num_calls)]
        client.wait_for_heads(calls, 300)
        used_mib = server.peak_rss_mib - idle_mib
        rejected = sum(reply.reason == "OVERLOADED" for reply in calls)
        others = {reply.reason for reply in calls} - {"OVERLOADED", ""}
        if others:
            raise RuntimeError(f"{what} was rejected for another reason: {', '.join(sorted(others))}")
    what = f"{what}: {num_calls - rejected} of {num_calls} calls admitted, {used_mib:.0f} MiB; limit / used"
    return Measured(what, limit_mib / max(used_mib, 1), 0.8, "", lower_is_better=False)


# --- the event loop -------------------------------------------------------------------------------


def measure_stalls(bundle: Path) -> list[Measured]:
    """Probe the health service every 10 ms during the largest requests of each kind."""
    with served(bundle) as server, ProcessPoolExecutor(1, mp_context=get_context("spawn")) as sender:
        largest = largest_request_bytes(server.address)
        return [
            Measured(
                f"longest stall: {what}", longest_stall_s(server, sender, name, request) * 1000, 50, "ms"
            )
            for what, name, request in large_requests(largest)
        ]


def largest_request_bytes(address: str) -> int:
    with grpc.insecure_channel(address) as channel:
        limits = EncoderServiceStub(channel).GetModel(pb.GetModelRequest()).model.limits
    return limits.max_request_bytes


def large_requests(largest: int) -> Iterator[tuple[str, str, bytes]]:
    """Yield the description, method and serialized message of each request."""
    texts = [pb.Input(text="word " * 1600)] * 512
    yield (
        "Embed, 512 texts of 8 KB",
        "Embed",
        pb.EmbedRequest(inputs=texts, truncate=True).SerializeToString(),
    )
    yield "Embed, 512 texts of 256 ids", "Embed", pb.EmbedRequest(inputs=[LONG_IDS] * 512).SerializeToString()
    tokens = pb.EncodeRequest(inputs=[LONG_IDS] * 80).SerializeToString()
    yield "Encode, token vectors of 80 texts", "Encode", tokens
    maps = pb.EncodeRequest(inputs=[LONG_IDS], attention=EVERY_LAYER).SerializeToString()
    yield "Encode, attention of 256 tokens", "Encode", maps
    stream = pb.EncodeStreamRequest(inputs=[LONG_IDS] * 16, attention=EVERY_LAYER).SerializeToString()
    yield "EncodeStream, attention, 16 texts", "EncodeStream", stream
    tokenize = pb.TokenizeRequest(inputs=texts).SerializeToString()
    yield "Tokenize, 512 texts of 8 KB", "Tokenize", tokenize
    ids = pb.Input.TOKEN_IDS_FIELD_NUMBER
    one_list = repeated_field(1, b"\x01" * (largest - 64))
    yield "a request full of ids", "Embed", repeated_field(2, repeated_field(ids, one_list))
    some = repeated_field(2, repeated_field(ids, repeated_field(1, b"\x01" * 130_000)))
    yield "a request full of lists of ids", "Embed", some * ((largest - 64) // len(some))
    yield "a request full of empty inputs", "Embed", b"\x12\x00" * (largest // 2 - 32)
    queries = pb.EncodeRequest.ATTENTION_FIELD_NUMBER
    yield "a request full of queries", "Encode", repeated_field(queries, b"") * (largest // 2 - 32)
    layers = repeated_field(pb.AttentionQuery.LAYERS_FIELD_NUMBER, b"\x01" * (largest - 64))
    yield "a query full of layers", "Encode", repeated_field(queries, layers)


def longest_stall_s(server: RunningServer, sender: ProcessPoolExecutor, name: str, request: bytes) -> float:
    """Return the longest health check latency during a request, in seconds."""
    stalls = []
    with grpc.insecure_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for _ in range(ATTEMPTS):
            call = sender.submit(send, server.address, name, request)
            stall = 0.0
            while not call.done():
                started = time.perf_counter()
                health.Check(health_pb2.HealthCheckRequest())
                elapsed = time.perf_counter() - started
                stall = max(stall, elapsed)
                time.sleep(max(0.0, PROBE_EVERY_S - elapsed))
            stalls.append(stall)
            if not call.result():
                break
    return min(stalls)


def send(address: str, name: str, request: bytes) -> bool:
    """Make a call and return whether it completed. Runs in a separate process to not delay probes."""
    with RawClient(address) as client:
        try:
            client.wait_for_ends([client.call(method(name), request)], GIVE_UP_S)
        except TimeoutError:
            return False
    return True


# --- many failures --------------------------------------------------------------------------------


def measure_failures(bundle: Path) -> list[Measured]:
    """Make 10,000 rejected calls, and 10,000 calls that fail because the attention graph changed."""
    kinds = [
        ("Embed", pb.EmbedRequest().SerializeToString()),
        ("Embed", pb.EmbedRequest(model="another").SerializeToString()),
        ("Embed", pb.EmbedRequest(inputs=[pb.Input(text="a " * 500)]).SerializeToString()),
        (
            "Encode",
            pb.EncodeRequest(inputs=[LONG_TEXT], attention=one_layer(99)).SerializeToString(),
        ),
        ("EncodeStream", b"\xff" * 11),
        ("Tokenize", pb.TokenizeRequest().SerializeToString()),
    ]
    with served(bundle) as server:
        rejected = repeat(server, kinds, 10_000)
        tracebacks = LOG.read_text(encoding="utf-8").count("Traceback")
    ids = pb.Input(token_ids=pb.TokenIds(input_ids=[2773] * 200))
    attention = pb.EncodeRequest(inputs=[ids] * 8, attention=one_layer(0)).SerializeToString()
    with broken(bundle) as server:
        failed = repeat(server, [("Encode", attention)], 10_000)
        failed_tracebacks = LOG.read_text(encoding="utf-8").count("Traceback")
    return [
        Measured(f"10,000 rejected calls ({rejected[1]}), RSS", rejected[0], 5, "MiB"),
        Measured("10,000 rejected calls, tracebacks in the log", tracebacks, 0, ""),
        Measured(f"10,000 calls without the attention graph ({failed[1]}), RSS", failed[0], 5, "MiB"),
        Measured("10,000 calls without the attention graph, tracebacks", failed_tracebacks, 0, ""),
    ]


def one_layer(layer: int) -> list[pb.AttentionQuery]:
    """Return a query for the attention of one layer."""
    return [pb.AttentionQuery(layers=[layer])]


@contextmanager
def broken(bundle: Path) -> Iterator[RunningServer]:
    """Run a server whose attention graph is modified before it is loaded."""
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "bundle"
        shutil.copytree(bundle, copy)
        with attnlens_server(copy, "fp32", 0, LOG) as server:
            with (copy / "onnx/model_attentions.onnx").open("ab") as graph:
                graph.write(b"more")
            yield server


def repeat(server: RunningServer, kinds: Sequence[tuple[str, bytes]], num_calls: int) -> tuple[float, str]:
    """Make calls, 50 at a time. Return the memory growth in MiB and a summary of the outcomes.

    Memory fluctuates, so growth is twice the difference between the medians of the two halves.
    """
    outcomes: Counter[str] = Counter()
    rss_mib = []
    with RawClient(server.address) as client:
        for first in range(0, num_calls, 50):
            batch = (kinds[index % len(kinds)] for index in range(first, first + 50))
            calls = [client.call(method(name), message) for name, message in batch]
            client.wait_for_ends(calls)
            outcomes.update("reset stream" if reply.reset else reply.reason for reply in calls)
            rss_mib.append(server.rss_mib)
    half = len(rss_mib) // 2
    grown_mib = 2 * (statistics.median(rss_mib[half:]) - statistics.median(rss_mib[:half]))
    return grown_mib, ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())


# --- slow consumers --------------------------------------------------------------------------------------


def measure_slow_consumers(bundle: Path) -> list[Measured]:
    """Leave replies unread until the stall timeout, then make calls from other clients."""
    maps = pb.EncodeRequest(inputs=[pb.Input(text="word " * 113)], attention=EVERY_LAYER).SerializeToString()
    long = [pb.Input(text="word " * 200)] * 4
    stream = pb.EncodeStreamRequest(inputs=long, attention=EVERY_LAYER).SerializeToString()
    return [
        Measured(f"other callers served of 20, {what}", count_served(bundle, name, request, count), 20, "",
                 lower_is_better=False)
        for what, name, request, count in (
            ("72 unary calls unread", "Encode", maps, 72),
            ("50 streams unread", "EncodeStream", stream, 50),
        )
    ]  # fmt: skip


def count_served(bundle: Path, name: str, request: bytes, num_calls: int) -> int:
    """Return how many of 20 callers are served after the stall timeout."""
    stall_timeout_s = 3
    with (
        served(bundle, "--stall-timeout-s", str(stall_timeout_s)) as server,
        RawClient(server.address, window_bytes=0) as client,
    ):
        client.wait_for_heads([client.call(method(name), request) for _ in range(num_calls)])
        time.sleep(stall_timeout_s + 1)
        return sum(call(server, name, request).status == 0 for _ in range(20))


# --- explanations ---------------------------------------------------------------------------------


def measure_input_matrices(bundle: Path) -> list[Measured]:
    """Measure a light Explain client alone, then alongside 64 clients that request input matrices."""
    light = pb.ExplainRequest(inputs=[pb.Input(text="A man is playing a guitar on the stage.")])
    long = pb.Input(text="word " * 200)
    heavy = pb.CompareRequest(pairs=[pb.ComparedPair(a=long, b=long)], matrix=PAIR_MATRIX_INPUT)
    with served(bundle) as server:
        alone, _ = explain_times(server, light)
        with grpc.insecure_channel(server.address) as channel:
            calls = [EncoderServiceStub(channel).Compare.future(heavy) for _ in range(NUM_HEAVY)]
            loaded, rejected = explain_times(server, light)
            completed = Counter(call.code().name for call in calls if call.done())
    print(f"alone {format_times(alone)}, with {NUM_HEAVY} heavy clients {format_times(loaded)}")
    print(f"completed heavy calls: {completed}")
    return [
        Measured("light Explain calls rejected", rejected, 0, ""),
        Measured("light Explain, p99 under load / alone", p99(loaded) / p99(alone), 5, ""),
    ]


def explain_times(server: RunningServer, request: pb.ExplainRequest) -> tuple[list[float], int]:
    """Return the times of sequential calls and the number of rejected calls."""
    times, rejected = [], 0
    with RawClient(server.address) as client:
        for index in range(NUM_LIGHT_CALLS + WARM_UP_CALLS):
            started = time.perf_counter()
            reply = client.call(method("Explain"), request.SerializeToString())
            client.wait_for_ends([reply], GIVE_UP_S)
            if index >= WARM_UP_CALLS:
                times.append(time.perf_counter() - started)
                rejected += reply.status != 0
    return times, rejected


def p99(times: Sequence[float]) -> float:
    """Return the 99th percentile."""
    return statistics.quantiles(times, n=100)[-1]


def format_times(times: Sequence[float]) -> str:
    """Format the median and 99th percentile."""
    return f"p50 {1e3 * statistics.median(times):.0f} ms, p99 {1e3 * p99(times):.0f} ms"


MEASUREMENTS: dict[str, Callable[[Path], list[Measured]]] = {
    "tokenize": measure_tokenize,
    "compressed": measure_compressed,
    "limits": measure_limits,
    "stalls": measure_stalls,
    "failures": measure_failures,
    "slow_consumers": measure_slow_consumers,
    "input_matrices": measure_input_matrices,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.studies.hostile", description=__doc__)
    parser.add_argument("bundle", type=Path, help="MiniLM bundle.")
    parser.add_argument(
        "--rows", default="", help=f"Regular expression that selects measurements: {', '.join(MEASUREMENTS)}"
    )
    arguments = parser.parse_args()
    print("| what | measured | target | met |\n|---|---|---|---|")
    for name, measure in MEASUREMENTS.items():
        if re.search(arguments.rows, name):
            for measured in measure(arguments.bundle):
                print(measured, flush=True)


if __name__ == "__main__":
    main()
