"""What the check of a graph in fp16 found, and whether that is good enough."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np

from attnlens.v1.manifest_pb2 import Gate, GateKind, Graph, ParityFigure
from attnlens_export.fp16.convert import FP16_PATH, Fp16Weights
from attnlens_export.graph.lint import MAX_FP16
from attnlens_export.json_files import finite
from attnlens_export.parity.result import Errors, max_or_nan, worst_figures
from attnlens_export.precision import GraphResult, Table

MIN_COSINE = 0.9999


@dataclass(frozen=True)
class Fp16Measurement(Errors):
    """The errors on one input, with every fp16 result rounded.

    `min_cosine` is the smaller of those with rounded results and as the CPU computes.

    Attributes:
        inputs: a shape of the grid, or sentences.
        length: tokens, padding included.
        largest_value: the largest magnitude in fp16, at padded positions too; infinite beyond the range.
        largest_place: the graph's value that holds it, with the parameter that it is made with.
        worst_index: where the largest error is: (batch, token, component).
        worst_values: what fp16 and PyTorch fp32 have there.
        finite: whether no output has a NaN or an infinity, rounded or as the CPU computes.
    """

    inputs: str
    length: int
    largest_value: float
    largest_place: str
    worst_index: tuple[int, ...]
    worst_values: tuple[float, float]
    finite: bool

    def failures(self) -> Iterator[str]:
        """Yield a line for each gate that does not hold."""
        where = f"{self.graph} at {self.inputs}"
        if not self.largest_value <= MAX_FP16:
            yield f"{where}: {self.largest_place} is beyond {MAX_FP16:g}, the largest number of fp16"
        elif not self.finite:
            yield f"{where}: the output has a NaN or an infinity"
        if not self.min_cosine >= MIN_COSINE:
            yield (
                f"{where}: a token's vector has a cosine of {self.min_cosine:.6f} with PyTorch's, at least "
                f"{MIN_COSINE} is allowed; {self.role}{list(self.worst_index)} is "
                f"{self.worst_values[0]:.8g}, PyTorch has {self.worst_values[1]:.8g}"
            )


@dataclass(frozen=True)
class Fp16Result(GraphResult):
    """All measurements of a graph in fp16, at least one, and what became of its weights."""

    name: ClassVar[str] = "fp16"
    path: ClassVar[str] = FP16_PATH

    measurements: tuple[Fp16Measurement, ...]
    weights: Fp16Weights

    def failures(self) -> list[str]:
        """Return a line for each gate that did not hold, those of the smallest cosine first."""
        by_cosine = sorted(
            self.measurements, key=lambda measurement: float(np.nan_to_num(measurement.min_cosine, nan=-1.0))
        )
        return [line for measurement in by_cosine for line in measurement.failures()]

    @property
    def largest(self) -> Fp16Measurement:
        """The measurement with the largest value in fp16."""
        return max(
            self.measurements,
            key=lambda measurement: float(np.nan_to_num(measurement.largest_value, nan=np.inf)),
        )

    def figures(self) -> list[ParityFigure]:
        """Return the worst figures of all inputs; a NaN is worse than any number."""
        figure = worst_figures(self.measurements, max(found.length for found in self.measurements))
        figure.max_fp16_value = max_or_nan(found.largest_value for found in self.measurements)
        return [figure]

    def gates(self) -> list[Gate]:
        """Return the gates on cosines and range."""
        [figure] = self.figures()
        return [
            Gate(graph=figure.graph, role=figure.role, kind=kind, limit=limit, value=found)
            for kind, limit, found in (
                (GateKind.GATE_KIND_MIN_COSINE, MIN_COSINE, figure.min_cosine),
                (GateKind.GATE_KIND_MAX_FP16_VALUE, MAX_FP16, figure.max_fp16_value),
            )
        ]

    def describe(self, graph: Graph) -> None:
        """State nothing: `figures` and the graph's file say it all."""

    def as_json(self) -> dict[str, Any]:
        """Return the gate, what became of the weights, and every measurement."""
        return {"min_cosine_allowed": MIN_COSINE, **finite(asdict(self))}

    def table(self) -> Table:
        """Return remarks alone: its errors stand among those of the other graphs."""
        weights, largest = self.weights, self.largest
        caption = (
            f"{len(self.measurements)} inputs, each as ONNX Runtime computes it on the CPU and with every "
            "fp16 result rounded, as a GPU does (the errors above are of the second). The gate is a cosine "
            f"of {MIN_COSINE} with PyTorch fp32 for every token, and the range"
        )
        smallest = f"fp16: the smallest cosine is {self.figures()[0].min_cosine:.7f}"
        values = (
            f"fp16: the largest of all values is {largest.largest_value:.4g} ({largest.largest_place} at "
            f"{largest.inputs}), fp16 holds {MAX_FP16:g}; of {weights.num_values:,} weights "
            f"{weights.num_subnormal:,} are subnormal and {weights.num_zeroed:,} became 0"
        )
        return Table(caption, remarks=(smallest, values))
