"""What is measured: each case is a row of the result, measured once in each repetition."""

import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeAlias

from attnlens.v1.manifest_pb2 import Architecture
from bench.flops import text_flops, total_flops
from bench.lines import LineProcess, ProcessError
from bench.servers import RunningServer
from bench.workloads import Workload

Row: TypeAlias = dict[str, Any]  # as JSON has it

MATMUL = "ONNX Runtime MatMul"
WARM_UP_TEXTS = 32
CHECK_EVERY = 16  # of the requests, one is also sent alone, and compared


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement."""

    seconds: float
    texts: int
    tokens: int
    flops: float


@dataclass(frozen=True, slots=True)
class RowKey:
    """Who does what with which texts, for how many clients (None: in-process)."""

    name: str
    precision: str
    what: str
    workload: str
    clients: int | None = None

    def __str__(self) -> str:
        """Return what `--rows` is compared with."""
        clients = "" if self.clients is None else f", {self.clients} clients"
        return f"{self.name} {self.precision}: {self.what}, {self.workload}{clients}"


class Case:
    """A row of the result. This base class is a row that failed before it began."""

    def __init__(self, key: RowKey, failure: str = "") -> None:
        self.key = key
        self.failure = failure
        self.samples: list[Sample] = []
        self.details: dict[str, Any] = {}

    def prepare(self) -> None:
        """Warm up, and choose the batch size where there is a choice."""
        raise NotImplementedError

    def measure(self) -> Sample:
        """Measure once."""
        raise NotImplementedError

    def row(self) -> Row:
        """Return the row as JSON has it."""
        about = asdict(self.key) | {"failure": self.failure} | self.details
        if not self.samples:
            return about
        return about | {
            "texts_per_s": spread([sample.texts / sample.seconds for sample in self.samples]),
            "tokens_per_s": spread([sample.tokens / sample.seconds for sample in self.samples]),
            "gflop_per_s": spread([sample.flops / sample.seconds / 1e9 for sample in self.samples]),
        }


class MatMulCase(Case):
    """The ceiling: ONNX Runtime's own fp32 MatMul."""

    def __init__(self, process: LineProcess, m: int, k: int, n: int) -> None:
        super().__init__(RowKey(MATMUL, "fp32", "matmul", f"{m}x{k}x{n}"))
        self._process, self._shape = process, {"m": m, "k": k, "n": n}

    def prepare(self) -> None:
        self.measure()

    def measure(self) -> Sample:
        answer = self._process.ask(**self._shape)
        return Sample(answer["seconds"], 0, 0, answer["flops"])


class InProcessCase(Case):
    """Texts in one call, at the batch size that was best."""

    def __init__(
        self,
        process: LineProcess,
        key: RowKey,
        workload: Workload,
        batch_sizes: Sequence[int],
        architecture: Architecture,
    ) -> None:
        super().__init__(key)
        self._process, self._texts, self._batch_sizes = process, workload.texts, batch_sizes
        self._batch_size = batch_sizes[0]
        self._num_tokens = workload.num_tokens
        self._flops = total_flops(architecture, workload.lengths)

    def prepare(self) -> None:
        """Warm up, then run once with each batch size."""
        self._seconds(self._batch_sizes[-1], WARM_UP_TEXTS)
        if len(self._batch_sizes) > 1:
            seconds = {size: self._seconds(size) for size in self._batch_sizes}
            self._batch_size = min(seconds, key=lambda size: seconds[size])
            self.details["batch_size"] = self._batch_size
            self.details["tokens_per_s_by_batch_size"] = {
                size: self._num_tokens / taken for size, taken in seconds.items()
            }

    def measure(self) -> Sample:
        return Sample(self._seconds(self._batch_size), len(self._texts), self._num_tokens, self._flops)

    def _seconds(self, batch_size: int, num_texts: int | None = None) -> float:
        texts = self._texts[:num_texts]
        answer = self._process.ask(texts=texts, what=self.key.what, batch_size=batch_size)
        seconds: float = answer["seconds"]
        return seconds


class ServerCase(Case):
    """Clients in a closed loop: each sends its next request when it has its reply."""

    def __init__(
        self,
        load: LineProcess,
        server: RunningServer,
        key: RowKey,
        workload: Workload,
        architecture: Architecture,
        *,
        seconds: float,
        threads: int,
        protocol: str = "grpc",
        texts_per_request: int = 1,
        settle_s: float = 0.3,
    ) -> None:
        super().__init__(key)
        self._load, self.server, self._architecture = load, server, architecture
        self._seconds, self._settle_s, self._threads = seconds, settle_s, threads
        self._answers: list[dict[str, Any]] = []
        self._key = f"{key} {texts_per_request}"
        self._aim: dict[str, Any] = {
            "texts": workload.texts,
            "lengths": workload.lengths,
            "num_layers": architecture.num_layers,
            "texts_per_request": texts_per_request,
            "check_every": CHECK_EVERY if texts_per_request == 1 else len(workload.texts),
            "protocol": protocol,
            "what": key.what,
            "address": server.address,
        }
        self.details["texts_per_request"] = texts_per_request

    def prepare(self) -> None:
        self._load.ask(do="aim", key=self._key, **self._aim)
        self.measure_closed(seconds=0.3)

    def measure(self) -> Sample:
        sample, answer = self.measure_closed(self._seconds)
        self._answers.append(answer)
        return sample

    def measure_closed(self, seconds: float) -> tuple[Sample, dict[str, Any]]:
        """Count for so many seconds; with many texts in a request, until all of them are done once."""
        clients, texts_per_request = self.key.clients, self._aim["texts_per_request"]
        if texts_per_request > 1:
            requests = -(-len(self._aim["texts"]) // texts_per_request)
            return self._ask(do="count", clients=clients, requests=requests)
        return self._ask(do="closed", clients=clients, seconds=seconds, settle_s=self._settle_s)

    def row(self) -> Row:
        """Add what the load generator saw: centiles and shares as medians of the repetitions."""
        return super().row() | (merge(self._answers) if self.samples else {})

    def measure_open(self, rate: float, seconds: float) -> dict[str, Any]:
        """Send at a fixed rate, and return the rate of answers and the latencies."""
        sample, answer = self._ask(do="open", clients=64, rate=rate, seconds=seconds, seed=round(rate))
        about = asdict(self.key) | {"clients": None, "rate": rate}
        return about | {"texts_per_s": sample.texts / sample.seconds} | answer

    def check_all(self) -> None:
        """From now on compare every reply."""
        self._load.ask(do="aim", key=self._key, **(self._aim | {"check_every": 1}))

    def send(self, clients: int, requests: int) -> dict[str, Any]:
        """Send a number of requests, and return what became of them."""
        sample, answer = self._ask(do="count", clients=clients, requests=requests)
        return {"texts": sample.texts, "texts_per_s": sample.texts / sample.seconds} | answer

    def _ask(self, **request: object) -> tuple[Sample, dict[str, Any]]:
        server_cpu_s = self.server.cpu_s
        answer = self._load.ask(key=self._key, **request)
        cores_s = answer.pop("wall_s") * self._threads
        answer["client_cpu_share"] = answer.pop("client_cpu_s") / cores_s
        answer["server_cpu_share"] = (self.server.cpu_s - server_cpu_s) / cores_s
        counts = {int(length): count for length, count in answer.pop("counts_by_length").items()}
        sample = Sample(
            answer.pop("seconds"),
            answer.pop("texts"),
            sum(length * count for length, count in counts.items()),
            sum(text_flops(self._architecture, length) * count for length, count in counts.items()),
        )
        return sample, answer


def merge(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one answer for several: medians, but the sum of errors and the largest difference."""
    errors: Counter[str] = Counter()
    for answer in answers:
        errors.update(answer["errors"])
    latencies = [answer["latency_ms"] for answer in answers if answer["latency_ms"]]
    return {
        "latency_ms": {
            centile: statistics.median(latency[centile] for latency in latencies) for centile in latencies[0]
        }
        if latencies
        else {},
        "errors": dict(errors),
        "compared": sum(answer["compared"] for answer in answers),
        "max_abs_difference_from_alone": max(answer["max_abs_difference_from_alone"] for answer in answers),
        "client_cpu_share": statistics.median(answer["client_cpu_share"] for answer in answers),
        "server_cpu_share": statistics.median(answer["server_cpu_share"] for answer in answers),
    }


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return the median, the extremes and all values, in the order of the repetitions."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "all": list(values),
    }


def prepare_all(cases: Sequence[Case]) -> None:
    """Warm up every case; one that fails is out."""
    for case in cases:
        attempt(case, case.prepare)


def interleave(cases: Sequence[Case], repetitions: int) -> None:
    """Measure A B C A B C ..., so that a disturbance or a warm machine hits all alike."""
    for repetition in range(repetitions):
        print(f"Repetition {repetition + 1} of {repetitions} ...", file=sys.stderr, flush=True)
        for case in cases:
            attempt(case, partial(measure_once, case))


def measure_once(case: Case) -> None:
    case.samples.append(case.measure())


def attempt(case: Case, do: Callable[[], object]) -> None:
    """Do something with a case unless it failed before; a failure drops its samples."""
    if case.failure:
        return
    try:
        do()
    except ProcessError as error:
        case.failure = str(error)
        case.samples.clear()
