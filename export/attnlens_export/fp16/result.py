"""What the check of a graph in fp16 found, and whether that is good enough."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np

from attnlens.v1.manifest_pb2 import Gate, GateKind, Graph, OutputRole, ParityFigure
from attnlens_export.fp16.convert import FP16_PATH, Fp16Weights
from attnlens_export.graph.lint import MAX_FP16
from attnlens_export.json_files import finite
from attnlens_export.precision import PrecisionResult, Table

MIN_COSINE = 0.9999


@dataclass(frozen=True)
class Fp16Measurement:
    """The graph in fp16 on one input, live tokens only. Errors are those with every fp16 result rounded.

    Attributes:
        graph: the ONNX file.
        inputs: a shape of the grid, or sentences.
        length: tokens, padding included.
        output: `last_hidden_state`.
        max_abs_error: the largest |fp16 - PyTorch fp32|.
        max_abs_error_float64: the largest |fp16 - PyTorch float64|.
        torch_abs_error_float64: the largest |PyTorch fp32 - PyTorch float64|.
        mean_abs_error: the mean of |fp16 - PyTorch fp32|.
        p99_abs_error: its 99th percentile.
        min_cosine: the smallest cosine of a token's vector with PyTorch's, rounded or as the CPU computes.
        num_elements: the number of elements compared.
        largest_value: the largest magnitude in fp16, at padded positions too; infinite beyond the range.
        largest_place: the graph's value that holds it, with the parameter that it is made with.
        worst_index: where the largest error is: (batch, token, component).
        worst_values: what fp16 and PyTorch fp32 have there.
        finite: whether no output has a NaN or an infinity, rounded or as the CPU computes.
    """

    graph: str
    inputs: str
    length: int
    output: str
    max_abs_error: float
    max_abs_error_float64: float
    torch_abs_error_float64: float
    mean_abs_error: float
    p99_abs_error: float
    min_cosine: float
    num_elements: int
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
                f"{MIN_COSINE} is allowed; {self.output}{list(self.worst_index)} is "
                f"{self.worst_values[0]:.8g}, PyTorch has {self.worst_values[1]:.8g}"
            )


@dataclass(frozen=True)
class Fp16Result(PrecisionResult):
    """All measurements of a graph in fp16, at least one, and what became of its weights."""

    name: ClassVar[str] = "fp16"
    path: ClassVar[str] = FP16_PATH

    measurements: tuple[Fp16Measurement, ...]
    weights: Fp16Weights

    def failures(self) -> list[str]:
        """Return a line for each gate that did not hold, those of the smallest cosine first."""
        by_cosine = sorted(
            self.measurements, key=lambda each: float(np.nan_to_num(each.min_cosine, nan=-1.0))
        )
        return [line for measurement in by_cosine for line in measurement.failures()]

    @property
    def largest(self) -> Fp16Measurement:
        """The measurement with the largest value in fp16."""
        return max(self.measurements, key=lambda each: float(np.nan_to_num(each.largest_value, nan=np.inf)))

    def figures(self) -> list[ParityFigure]:
        """Return the worst figures of all inputs; a NaN is worse than any number."""
        worst = {
            name: float(np.max([getattr(each, name) for each in self.measurements]))
            for name in ("max_abs_error", "max_abs_error_float64", "torch_abs_error_float64", "p99_abs_error")
        }
        counts = [each.num_elements for each in self.measurements]
        figure = ParityFigure(
            graph=f"embeddings.{self.name}",
            role=OutputRole.OUTPUT_ROLE_LAST_HIDDEN_STATE,
            mean_abs_error=float(
                np.average([each.mean_abs_error for each in self.measurements], weights=counts)
            ),
            min_cosine=float(np.min([each.min_cosine for each in self.measurements])),
            longest_input_tokens=max(each.length for each in self.measurements),
            max_fp16_value=float(np.max([each.largest_value for each in self.measurements])),
            **worst,
        )
        return [figure]

    def gates(self) -> list[Gate]:
        """Return the gates on cosines and range."""
        [figure] = self.figures()
        return [
            Gate(graph=figure.graph, role=figure.role, kind=kind, limit=limit, found=found)
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
