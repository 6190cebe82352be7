"""What the check of a graph in fp16 found, and whether that is good enough."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from attnlens.v1.manifest_pb2 import Gate, GateKind, ParityFigure
from attnlens_export.fp16.convert import MAX_HALF, HalfWeights
from attnlens_export.graph.names import GRAPH_IDS, ROLES

MIN_COSINE = 0.9999


@dataclass(frozen=True)
class HalfMeasurement:
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
        if not self.largest_value <= MAX_HALF:
            yield f"{where}: {self.largest_place} is beyond {MAX_HALF:g}, the largest number of fp16"
        elif not self.finite:
            yield f"{where}: the output has a NaN or an infinity"
        if not self.min_cosine >= MIN_COSINE:
            yield (
                f"{where}: a token's vector has a cosine of {self.min_cosine:.6f} with PyTorch's, at least "
                f"{MIN_COSINE} is allowed; {self.output}{list(self.worst_index)} is "
                f"{self.worst_values[0]:.8g}, PyTorch has {self.worst_values[1]:.8g}"
            )


@dataclass(frozen=True)
class HalfResult:
    """All measurements of a graph in fp16, at least one, and what became of its weights."""

    measurements: tuple[HalfMeasurement, ...]
    weights: HalfWeights

    def failures(self) -> list[str]:
        """Return a line for each gate that did not hold, those of the smallest cosine first."""
        by_cosine = sorted(
            self.measurements, key=lambda each: float(np.nan_to_num(each.min_cosine, nan=-1.0))
        )
        return [line for measurement in by_cosine for line in measurement.failures()]

    @property
    def largest(self) -> HalfMeasurement:
        """The measurement with the largest value in fp16."""
        return max(self.measurements, key=lambda each: float(np.nan_to_num(each.largest_value, nan=np.inf)))

    def gates(self) -> list[Gate]:
        """Return both gates with what was found."""
        figure = self.figure()
        return [
            Gate(graph=figure.graph, role=figure.role, kind=kind, limit=limit, found=found)
            for kind, limit, found in (
                (GateKind.GATE_KIND_MIN_COSINE, MIN_COSINE, figure.min_cosine),
                (GateKind.GATE_KIND_MAX_FP16_VALUE, MAX_HALF, figure.max_fp16_value),
            )
        ]

    def figure(self) -> ParityFigure:
        """Return the worst figures of all inputs; a NaN is worse than any number."""
        worst = {
            name: float(np.max([getattr(each, name) for each in self.measurements]))
            for name in ("max_abs_error", "max_abs_error_float64", "torch_abs_error_float64", "p99_abs_error")
        }
        counts = [each.num_elements for each in self.measurements]
        return ParityFigure(
            graph=GRAPH_IDS[self.measurements[0].graph],
            role=ROLES[self.measurements[0].output],
            mean_abs_error=float(
                np.average([each.mean_abs_error for each in self.measurements], weights=counts)
            ),
            min_cosine=float(np.min([each.min_cosine for each in self.measurements])),
            longest_input_tokens=max(each.length for each in self.measurements),
            max_fp16_value=float(np.max([each.largest_value for each in self.measurements])),
            **worst,
        )

    def describe(self) -> str:
        """Return one line: range and weights."""
        weights, largest = self.weights, self.largest
        return (
            f"fp16: the largest of all values is {largest.largest_value:.4g} ({largest.largest_place} at "
            f"{largest.inputs}), fp16 holds {MAX_HALF:g}; of {weights.num_values:,} weights "
            f"{weights.num_subnormal:,} are subnormal and {weights.num_zeroed:,} became 0"
        )
