"""Cases for in-process libraries, and the MatMul ceiling."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attnlens.v1.manifest_pb2 import Architecture
from bench.cases.row import MATMUL, Case, Reference, Row, RowKey, Sample
from bench.flops import total_flops
from bench.lines import LineProcess
from bench.load.calls import percentiles
from bench.workloads import Workload

WARM_UP_TEXTS = 32
FIRST_CALLS = 8  # warm-up calls excluded from each single-text measurement
SINGLE_TEXTS = 64


@dataclass(frozen=True, slots=True)
class Choice:
    """A batching configuration to try.

    Attributes:
        batch_size: Texts per batch. If 0, the program chooses.
        side_by_side: Batches that run concurrently and share the threads.
    """

    batch_size: int
    side_by_side: int = 1

    def __str__(self) -> str:
        """Return `8`, or `2 x 8` for two batches of eight."""
        return f"{self.batch_size}" if self.side_by_side == 1 else f"{self.side_by_side} x {self.batch_size}"

    @property
    def arguments(self) -> dict[str, int]:
        """Arguments of the request to the process."""
        arguments = {"batch_size": self.batch_size}
        return arguments if self.side_by_side == 1 else arguments | {"side_by_side": self.side_by_side}


class MatMulCase(Case):
    """ONNX Runtime's fp32 MatMul rate, an upper bound for fp32 engines."""

    def __init__(self, process: LineProcess, model: str, m: int, k: int, n: int) -> None:
        super().__init__(RowKey(MATMUL, "fp32", "matmul", f"{m}x{k}x{n}", model=model))
        self._process, self._shape = process, {"m": m, "k": k, "n": n}

    def prepare(self) -> None:
        self.measure()

    def measure(self) -> Sample:
        response = self._process.request(**self._shape)
        return Sample(response["seconds"], 0, 0, response["flops"])


class InProcessCase(Case):
    """All texts in one call, with the fastest batching choice."""

    def __init__(
        self,
        process: LineProcess,
        key: RowKey,
        workload: Workload,
        choices: Sequence[Choice],
        architecture: Architecture,
        reference: Reference,
    ) -> None:
        super().__init__(key)
        self._process, self._workload, self._choices = process, workload, choices
        self._choice = choices[0]
        self._flops = total_flops(architecture, workload.lengths)
        self._reference = reference

    def prepare(self) -> None:
        """Warm up, select the fastest choice and measure its accuracy."""
        self._request(self._choices[-1], self._workload.texts[:WARM_UP_TEXTS])
        if len(self._choices) > 1:
            seconds = {choice: self._seconds(choice) for choice in self._choices}
            self._choice = min(seconds, key=lambda choice: seconds[choice])
            self.details["choice"] = str(self._choice)
            self.details["tokens_per_s_by_choice"] = {
                str(choice): self._workload.num_tokens / elapsed for choice, elapsed in seconds.items()
            }
        if self.key.what == "embed":
            vectors = self._request(self._choice, self._workload.texts, return_vectors=True)["vectors"]
            self.accuracy = self._reference.compare(vectors, self._workload)

    def measure(self) -> Sample:
        workload = self._workload
        return Sample(self._seconds(self._choice), len(workload.texts), workload.num_tokens, self._flops)

    def _seconds(self, choice: Choice) -> float:
        seconds: float = self._request(choice, self._workload.texts)["seconds"]
        return seconds

    def _request(self, choice: Choice, texts: Sequence[str], **options: object) -> dict[str, Any]:
        return self._process.request(texts=texts, what=self.key.what, **choice.arguments, **options)


class OneByOneCase(Case):
    """Sequential calls with one text each."""

    def __init__(
        self,
        process: LineProcess,
        key: RowKey,
        workload: Workload,
        architecture: Architecture,
        reference: Reference,
    ) -> None:
        super().__init__(key)
        self._process, self._workload, self._reference = process, workload, reference
        self._texts = workload.texts[: FIRST_CALLS + SINGLE_TEXTS]
        self._lengths = workload.lengths[FIRST_CALLS : len(self._texts)]
        self._flops = total_flops(architecture, self._lengths)
        self._seconds: list[list[float]] = []

    def prepare(self) -> None:
        response = self._request(return_vectors=True)
        self.accuracy = self._reference.compare(response["vectors"], self._workload)

    def measure(self) -> Sample:
        seconds = self._request()["seconds_by_text"][FIRST_CALLS:]
        self._seconds.append(seconds)
        return Sample(sum(seconds), len(seconds), sum(self._lengths), self._flops)

    def row(self) -> Row:
        """Return the row, including latency perpercentiles over all repetitions."""
        latencies = [second for seconds in self._seconds for second in seconds]
        return super().row() | ({"latency_ms": percentiles(latencies)} if self.samples else {})

    def _request(self, **options: object) -> dict[str, Any]:
        return self._process.request(
            texts=self._texts, what="embed", batch_size=1, one_by_one=True, **options
        )
