"""What the parity check found, and whether that is good enough."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from attnlens.v1.manifest_pb2 import Gate, GateKind, ParityFigure
from attnlens_export.graph.names import graph_id, role_number
from attnlens_export.parity.grid import Case

TOLERANCE = 1e-5
REFERENCE_ERROR_RATIO = 4.0


def allowed_error(torch_max_abs_error_float64: float) -> float:
    """Return the largest |ONNX - PyTorch fp32| that passes, given PyTorch's own error against float64."""
    return max(TOLERANCE, REFERENCE_ERROR_RATIO * torch_max_abs_error_float64)


@dataclass(frozen=True)
class Errors:
    """How far one output of one graph is from PyTorch's on one input, live tokens only.

    Attributes:
        graph: the ONNX file.
        role: of the outputs, all layers together: `last_hidden_state`, `attention_weights` ...
        max_abs_error: the largest |ONNX - PyTorch fp32|.
        max_abs_error_float64: the largest |ONNX - PyTorch float64|.
        torch_max_abs_error_float64: the largest |PyTorch fp32 - PyTorch float64|.
        mean_abs_error: the mean of |ONNX - PyTorch fp32|.
        p99_abs_error: its 99th percentile; the largest of any layer.
        min_cosine: the smallest cosine between a row of ONNX and of PyTorch fp32.
        num_elements: the number of elements compared.
    """

    graph: str
    role: str
    max_abs_error: float
    max_abs_error_float64: float
    torch_max_abs_error_float64: float
    mean_abs_error: float
    p99_abs_error: float
    min_cosine: float
    num_elements: int


@dataclass(frozen=True)
class Measurement(Errors):
    """The errors on one input shape, and whether they pass.

    Attributes:
        case: the input shape.
        allowed_error: the gate for `max_abs_error` and `max_batch_difference`.
        max_batch_difference: Maximum difference between the shortest text in the batch and the same text
            alone.
        worst_output: the tensor with the largest error.
        worst_index: where in it: (batch, token, component), or (batch, head, query, key).
        worst_values: what ONNX and PyTorch fp32 have there.
    """

    case: Case
    allowed_error: float
    max_batch_difference: float
    worst_output: str
    worst_index: tuple[int, ...]
    worst_values: tuple[float, float]

    @property
    def excess(self) -> float:
        """The larger error as a multiple of what is allowed; infinite for NaN."""
        largest = float(np.max([self.max_abs_error, self.max_batch_difference]))
        return float(np.nan_to_num(largest / self.allowed_error, nan=np.inf))

    @property
    def passed(self) -> bool:
        """Whether both gates hold."""
        return not list(self.failures())

    def failures(self) -> Iterator[str]:
        """Yield a line for each gate that does not hold."""
        if not self.max_abs_error <= self.allowed_error:
            yield (
                f"{self.graph} at {self.case}: {self.worst_output}{list(self.worst_index)} is "
                f"{self.worst_values[0]:.8g}, PyTorch has {self.worst_values[1]:.8g} "
                f"(error {self.max_abs_error:.2e}, allowed {self.allowed_error:.2e})"
            )
        if not self.max_batch_difference <= self.allowed_error:
            yield (
                f"{self.graph} at {self.case}: {self.role} of a text alone and in the batch differ by "
                f"{self.max_batch_difference:.2e} (allowed {self.allowed_error:.2e})"
            )


@dataclass(frozen=True)
class Invariants:
    """What holds for any encoder, for one graph on one input shape.

    Attributes:
        graph: the ONNX file.
        case: the input shape.
        finite: whether no output, at padded positions either, has a NaN or an infinity.
        row_sum_error: the largest |sum - 1| of an attention row of a live token.
        masked_weight: the largest attention weight on a token that is padding, later (in a causal encoder),
            or outside of the window (in a local layer).
        empty_row_weight: the largest attention weight in a text without live tokens.
    """

    graph: str
    case: Case
    finite: bool
    row_sum_error: float
    masked_weight: float
    empty_row_weight: float

    def failures(self, row_sum_tolerance: float = TOLERANCE) -> Iterator[str]:
        """Yield a line for each invariant that does not hold."""
        where = f"{self.graph} at {self.case}"
        if not self.finite:
            yield f"{where}: an output has a NaN or an infinity"
        if not self.row_sum_error <= row_sum_tolerance:
            yield f"{where}: an attention row sums to 1 only within {self.row_sum_error:.2e}"
        if self.masked_weight != 0:
            yield f"{where}: a masked token has the attention weight {self.masked_weight:.2e} instead of 0"
        if self.empty_row_weight != 0:
            yield f"{where}: a text of padding has attention weight {self.empty_row_weight:.2e} instead of 0"


@dataclass(frozen=True)
class ParityResult:
    """All measurements over the grid.

    Attributes:
        cases: the input shapes.
        measurements: one for each graph, shape and role.
        invariants: one for each graph and shape.
        reference_name: where the weights of the PyTorch encoder came from.
        max_tokens: the longest input that the encoder takes.
    """

    cases: tuple[Case, ...]
    measurements: tuple[Measurement, ...]
    invariants: tuple[Invariants, ...]
    reference_name: str
    max_tokens: int

    @property
    def passed(self) -> bool:
        """Whether every gate held, and something was measured at all."""
        return bool(self.measurements) and not self.failures()

    def failures(self) -> list[str]:
        """Return a line for each gate that did not hold, the worst first."""
        by_excess = sorted(self.measurements, key=lambda measurement: -measurement.excess)
        lines = [line for measurement in by_excess for line in measurement.failures()]
        return lines + [line for invariants in self.invariants for line in invariants.failures()]

    def left_out(self) -> list[tuple[str, Case]]:
        """Return the graphs and shapes that were not compared: maps too large to hold."""
        measured = {(found.graph, found.case) for found in self.invariants}
        graphs = dict.fromkeys(found.graph for found in self.invariants)
        return [(graph, case) for graph in graphs for case in self.cases if (graph, case) not in measured]

    def describe_lengths(self) -> str:
        """Return one line: the longest input that was compared, of each role where they differ."""
        longest: dict[str, int] = {}
        for measurement in self.measurements:
            longest[measurement.role] = max(longest.get(measurement.role, 0), measurement.case.length)
        named = ", ".join(f"{role} {length}" for role, length in longest.items())
        lengths = set(longest.values())
        tokens = str(lengths.pop()) if len(lengths) == 1 else named
        return f"longest input compared, in tokens: {tokens}; the encoder takes {self.max_tokens}"

    def by_role(self) -> dict[tuple[str, str], list[Measurement]]:
        """Return the measurements by graph and role."""
        groups: dict[tuple[str, str], list[Measurement]] = {}
        for measurement in self.measurements:
            groups.setdefault((measurement.graph, measurement.role), []).append(measurement)
        return groups

    def gates(self) -> list[Gate]:
        """Return the gates of each role of each graph."""
        return [gate for group in self.by_role().values() for gate in gates(group)]

    def figures(self) -> list[ParityFigure]:
        """Return the worst figures of each role of each graph."""
        return [summarize(group) for group in self.by_role().values()]


def gates(group: Sequence[Measurement]) -> list[Gate]:
    """Return the gates of one role of one graph, each of the case that came nearest to its limit."""
    found = []
    for kind, name in (
        (GateKind.GATE_KIND_MAX_ABS_ERROR, "max_abs_error"),
        (GateKind.GATE_KIND_MAX_BATCH_DIFFERENCE, "max_batch_difference"),
    ):
        used = [np.nan_to_num(getattr(each, name) / each.allowed_error, nan=np.inf) for each in group]
        nearest = group[int(np.argmax(used))]
        gate = Gate(kind=kind, limit=nearest.allowed_error, value=getattr(nearest, name))
        gate.graph, gate.role = graph_id(nearest.graph), role_number(nearest.role)
        found.append(gate)
    return found


def summarize(group: Sequence[Measurement]) -> ParityFigure:
    """Return the worst figures of one role of one graph; a NaN is worse than any number."""
    return worst_figures(group, max(measurement.case.length for measurement in group))


def worst_figures(group: Sequence[Errors], longest_input_tokens: int) -> ParityFigure:
    """Return the worst errors of a group; a NaN is worse than any number."""
    counts = [errors.num_elements for errors in group]
    return ParityFigure(
        graph=graph_id(group[0].graph),
        role=role_number(group[0].role),
        max_abs_error=max_or_nan(errors.max_abs_error for errors in group),
        max_abs_error_float64=max_or_nan(errors.max_abs_error_float64 for errors in group),
        torch_max_abs_error_float64=max_or_nan(errors.torch_max_abs_error_float64 for errors in group),
        mean_abs_error=float(np.average([errors.mean_abs_error for errors in group], weights=counts)),
        p99_abs_error=max_or_nan(errors.p99_abs_error for errors in group),
        min_cosine=-max_or_nan(-errors.min_cosine for errors in group),
        longest_input_tokens=longest_input_tokens,
    )


def worst(group: Sequence[Measurement]) -> Measurement:
    """Return the measurement with the largest error against PyTorch fp32."""
    return max(group, key=lambda measurement: float(np.nan_to_num(measurement.max_abs_error, nan=np.inf)))


def max_or_nan(values: Iterable[float]) -> float:
    """Return the largest value, or NaN if there is one: `max` would depend on the order."""
    return float(np.max(np.fromiter(values, np.float64)))
