"""Result rows: keys, samples, the fp32 reference and the base class of all cases."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from bench.accuracy import Accuracy, as_json, compare
from bench.lines import LineProcess, ProcessError
from bench.workloads import Workload

Row: TypeAlias = dict[str, Any]  # JSON object

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
    """Identity of a row: program, precision, task, workload, number of clients and model.

    `clients` is None for in-process rows.
    """

    name: str
    precision: str
    what: str
    workload: str
    clients: int | None = None
    model: str = MINILM

    def __str__(self) -> str:
        """Return the name that `--rows` is matched against."""
        clients = "" if self.clients is None else f", {self.clients} clients"
        return f"{self.model}: {self.name} {self.precision}: {self.what}, {self.workload}{clients}"


class Reference:
    """Reference embeddings, computed by the fp32 engine with ONNX Runtime."""

    def __init__(self, engine: LineProcess) -> None:
        self._engine = engine
        self._vectors: dict[str, npt.NDArray[np.float64]] = {}

    def compare(self, vectors: Sequence[Sequence[float]], workload: Workload) -> Accuracy:
        """Compare the vectors of the first texts of a workload with the reference.

        Raises:
            ProcessError: If the vectors have the wrong shape, or are zero or non-finite.
        """
        if workload.name not in self._vectors:
            request = {"texts": workload.texts, "what": "embed", "batch_size": 0, "return_vectors": True}
            self._vectors[workload.name] = np.array(self._engine.request(**request)["vectors"], np.float64)
        try:
            return compare(vectors, self._vectors[workload.name][: len(vectors)])
        except ValueError as error:
            raise ProcessError(str(error)) from error


class Case:
    """One row of the result. The base class represents a program that failed to start."""

    def __init__(self, key: RowKey, failure: str = "") -> None:
        self.key = key
        self.failure = failure
        self.samples: list[Sample] = []
        self.accuracy: Accuracy | None = None
        self.details: dict[str, Any] = {}

    def prepare(self) -> None:
        """Warm up and select the batch size."""
        raise NotImplementedError

    def measure(self) -> Sample:
        """Measure once."""
        raise NotImplementedError

    def row(self) -> Row:
        """Return the row as a JSON object."""
        fields = asdict(self.key) | {"failure": self.failure} | self.details
        if self.accuracy is not None:
            fields["accuracy"] = as_json(self.accuracy)
        if not self.samples:
            return fields
        return fields | {
            "texts_per_s": spread([sample.texts / sample.seconds for sample in self.samples]),
            "tokens_per_s": spread([sample.tokens / sample.seconds for sample in self.samples]),
            "gflop_per_s": spread([sample.flops / sample.seconds / 1e9 for sample in self.samples]),
        }


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return the median, minimum and maximum, and all values in order of repetition."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "all": list(values),
    }
