"""A row of the result: whose it is, and what was measured for it."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from bench.accuracy import Accuracy, as_json, compare
from bench.lines import LineProcess, ProcessError
from bench.workloads import Workload

Row: TypeAlias = dict[str, Any]  # as JSON has it

MATMUL = "ONNX Runtime MatMul"
MINILM = "MiniLM"


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement."""

    seconds: float
    texts: int
    tokens: int
    flops: float


@dataclass(frozen=True, slots=True)
class RowKey:
    """Who does what with which texts, for how many clients (None: in-process), with which model."""

    name: str
    precision: str
    what: str
    workload: str
    clients: int | None = None
    model: str = MINILM

    def __str__(self) -> str:
        """Return what `--rows` is compared with."""
        clients = "" if self.clients is None else f", {self.clients} clients"
        return f"{self.model}: {self.name} {self.precision}: {self.what}, {self.workload}{clients}"


class Reference:
    """The vectors that all others are compared with: those of our engine with ONNX Runtime in fp32."""

    def __init__(self, engine: LineProcess) -> None:
        self._engine = engine
        self._vectors: dict[str, npt.NDArray[np.float64]] = {}

    def compare(self, vectors: Sequence[Sequence[float]], workload: Workload) -> Accuracy:
        """Compare the vectors of the first texts of a workload.

        Raises:
            ProcessError: they are no vectors of these texts.
        """
        if workload.name not in self._vectors:
            request = {"texts": workload.texts, "what": "embed", "batch_size": 0, "return_vectors": True}
            self._vectors[workload.name] = np.array(self._engine.request(**request)["vectors"], np.float64)
        try:
            return compare(vectors, self._vectors[workload.name][: len(vectors)])
        except ValueError as error:
            raise ProcessError(str(error)) from error


class Case:
    """A row of the result. This base class is a row that failed before it began."""

    def __init__(self, key: RowKey, failure: str = "") -> None:
        self.key = key
        self.failure = failure
        self.samples: list[Sample] = []
        self.accuracy: Accuracy | None = None
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
        if self.accuracy is not None:
            about["accuracy"] = as_json(self.accuracy)
        if not self.samples:
            return about
        return about | {
            "texts_per_s": spread([sample.texts / sample.seconds for sample in self.samples]),
            "tokens_per_s": spread([sample.tokens / sample.seconds for sample in self.samples]),
            "gflop_per_s": spread([sample.flops / sample.seconds / 1e9 for sample in self.samples]),
        }


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return the median, the extremes and all values, in the order of the repetitions."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "all": list(values),
    }
