"""One way to measure: comparisons of a subject with its reference, and the result of a check.

A `Comparison` is one figure of a subject on some inputs, with its limit, the verdict, and the location of the
worst value. Its message, its row in tables, its JSON values and its entry in the manifest are defined here.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np

from attnlens.v1.manifest_pb2 import Gate, GateKind, OutputRole, ParityFigure
from attnlens_export.graph.names import graph_id, role_name, role_number
from attnlens_export.json_files import finite

# Avoids a division by zero if the limit is 0, or 1 for a lower limit.
_SMALLEST_ALLOWED_ERROR = 1e-12
_LOWER_LIMITS = frozenset(
    {GateKind.GATE_KIND_MIN_COSINE, GateKind.GATE_KIND_MEAN_COSINE, GateKind.GATE_KIND_MIN_RANK_AGREEMENT}
)
_MAXIMA = (
    "max_abs_error",
    "max_abs_error_float64",
    "torch_max_abs_error_float64",
    "p99_abs_error",
)
HEADINGS = ("graph", "figure", "inputs", "value", "limit", "verdict")


@dataclass(frozen=True)
class Comparison:
    """A figure of a subject on some inputs, compared with its reference.

    Attributes:
        graph: Path of the ONNX file in the bundle. Empty for the whole bundle.
        inputs: The inputs, such as `8x16 middle`.
        value: The measured number. NaN fails.
        limit: Lower limit if `kind` is a cosine or rank agreement, otherwise upper limit. Infinite for a
            figure without a limit.
        kind: Kind of gate in the manifest. Unspecified if the manifest does not list the figure.
        role: Role of the graph outputs.
        worst: Location of the value, and what subject and reference have there. Empty if unknown.
        text_kind: Kind of texts, such as `prose`. Empty if not measured on texts.
        num_texts: Number of texts, in place of `inputs`.
        what: The figure in words, if `kind` and `role` do not describe it.
    """

    graph: str
    inputs: str
    value: float
    limit: float
    kind: GateKind.ValueType = GateKind.GATE_KIND_UNSPECIFIED
    role: OutputRole.ValueType = OutputRole.OUTPUT_ROLE_UNSPECIFIED
    worst: str = ""
    text_kind: str = ""
    num_texts: int = 0
    what: str = ""

    @property
    def passed(self) -> bool:
        """Whether the value is within the limit."""
        return self.value >= self.limit if self.kind in _LOWER_LIMITS else self.value <= self.limit

    @property
    def used_share(self) -> float:
        """The share of the allowed error that is used up, above 1 for a failure. Infinite for NaN."""
        is_lower = self.kind in _LOWER_LIMITS
        error, allowed = (1 - self.value, 1 - self.limit) if is_lower else (self.value, self.limit)
        return float(np.nan_to_num(error / max(allowed, _SMALLEST_ALLOWED_ERROR), nan=np.inf, posinf=np.inf))

    @property
    def name(self) -> str:
        """The figure in words, such as `max abs error of last_hidden_state`."""
        kind = kind_name(self.kind).replace("_", " ")
        return self.what or (f"{kind} of {role_name(self.role)}" if self.role else kind)

    @property
    def where(self) -> str:
        """The inputs for tables and messages. Empty if unknown."""
        kind = f" ({self.text_kind})" if self.text_kind else ""
        return self.inputs or (f"{self.num_texts} texts{kind}" if self.num_texts else "")

    @property
    def shown_value(self) -> str:
        """The value for tables and messages."""
        return f"{self.value:.6f}" if self.kind in _LOWER_LIMITS else _shorten(self.value)

    @property
    def shown_limit(self) -> str:
        """The limit for tables and messages."""
        return f"{self.limit:g}" if self.kind in _LOWER_LIMITS else _shorten(self.limit)

    @property
    def failure(self) -> str:
        """Message for a figure that does not meet its limit."""
        figure = f"{self.name} on {self.where}" if self.where else self.name
        worst = f": {self.worst}" if self.worst else ""
        prefix = f"{self.graph}: " if self.graph else ""
        return f"{prefix}{figure} is {self.shown_value} (limit {self.shown_limit}){worst}"

    def cells(self) -> tuple[str, ...]:
        """Return a table row with `HEADINGS`."""
        verdict = "passed" if self.passed else "FAILED"
        where = self.where or self.text_kind
        return self.graph, self.name, where, self.shown_value, self.shown_limit, verdict

    def to_gate(self) -> Gate:
        """Return the figure as an entry of the manifest."""
        return Gate(
            graph=graph_id(self.graph),
            role=self.role,
            kind=self.kind,
            limit=self.limit,
            value=self.value,
            text_kind=self.text_kind,
        )

    @classmethod
    def from_gate(cls, gate: Gate) -> Self:
        """Return an entry of a manifest as a figure. Its `graph` is the id, and its inputs are unknown."""
        return cls(gate.graph, "", gate.value, gate.limit, gate.kind, gate.role, text_kind=gate.text_kind)

    def to_json(self) -> dict[str, Any]:
        """Return the figure as JSON values. Non-finite numbers become None."""
        return {
            "graph": self.graph,
            "figure": self.name,
            "inputs": self.inputs,
            "text_kind": self.text_kind,
            "num_texts": self.num_texts,
            "value": finite(self.value),
            "limit": finite(self.limit),
            "worst": self.worst,
            "passed": self.passed,
        }


def _shorten(number: float) -> str:
    """Return a number with three digits, but integers with all of them."""
    return f"{number:g}" if number.is_integer() else f"{number:.3g}"


def kind_name(kind: GateKind.ValueType) -> str:
    """Return the name of a kind of gate, such as `max_abs_error`."""
    return GateKind.Name(kind).removeprefix("GATE_KIND_").lower()


def closest(comparisons: Iterable[Comparison], key: Callable[[Comparison], object]) -> list[Comparison]:
    """Return the comparison of each group that is closest to its limit. Groups have equal keys."""
    groups: dict[object, list[Comparison]] = {}
    for comparison in comparisons:
        groups.setdefault(key(comparison), []).append(comparison)
    return [max(group, key=lambda comparison: comparison.used_share) for group in groups.values()]


@dataclass(frozen=True)
class Errors:
    """Errors of the outputs of a graph with one role against PyTorch. Padding is excluded.

    Attributes:
        graph: Path of the ONNX file.
        role: Role of the outputs of all layers, such as `last_hidden_state` or `attention_weights`.
        num_tokens: Length of the longest input, including padding.
        max_abs_error: max |ONNX - PyTorch fp32|.
        max_abs_error_float64: max |ONNX - PyTorch float64|.
        torch_max_abs_error_float64: max |PyTorch fp32 - PyTorch float64|.
        mean_abs_error: mean |ONNX - PyTorch fp32|.
        p99_abs_error: 99th percentile of |ONNX - PyTorch fp32|, maximum over layers and inputs.
        min_cosine: Minimum cosine of a row of ONNX with the row of PyTorch fp32.
        num_elements: Number of compared elements.
        worst: Location of the largest error, and both values.
    """

    graph: str
    role: str
    num_tokens: int
    max_abs_error: float
    max_abs_error_float64: float
    torch_max_abs_error_float64: float
    mean_abs_error: float
    p99_abs_error: float
    min_cosine: float
    num_elements: int
    worst: str

    @classmethod
    def merged(cls, group: Sequence["Errors"]) -> "Errors":
        """Return the worst errors of several layers or inputs. NaN is worse than any number."""
        worst = max(group, key=lambda errors: float(np.nan_to_num(errors.max_abs_error, nan=np.inf)))
        counts = [errors.num_elements for errors in group]
        maxima: dict[str, Any] = {
            name: max_or_nan(getattr(errors, name) for errors in group) for name in _MAXIMA
        }
        return replace(
            worst,
            **maxima,
            num_tokens=max(errors.num_tokens for errors in group),
            mean_abs_error=float(np.average([errors.mean_abs_error for errors in group], weights=counts)),
            min_cosine=-max_or_nan(-errors.min_cosine for errors in group),
            num_elements=sum(counts),
        )

    def compare(self, inputs: str, limit: float, batch_difference: float) -> list[Comparison]:
        """Return the error, and the difference of a text alone and in a batch, which has the same limit."""
        role, kinds = role_number(self.role), GateKind
        return [
            Comparison(
                self.graph, inputs, self.max_abs_error, limit, kinds.GATE_KIND_MAX_ABS_ERROR, role, self.worst
            ),
            Comparison(
                self.graph, inputs, batch_difference, limit, kinds.GATE_KIND_MAX_BATCH_DIFFERENCE, role
            ),
        ]

    def compare_cosine(self, inputs: str, limit: float) -> Comparison:
        """Return the minimum cosine."""
        kind, role = GateKind.GATE_KIND_MIN_COSINE, role_number(self.role)
        return Comparison(self.graph, inputs, self.min_cosine, limit, kind, role, self.worst)

    def to_message(self) -> ParityFigure:
        """Return the errors as an entry of the manifest."""
        return ParityFigure(
            graph=graph_id(self.graph),
            role=role_number(self.role),
            max_abs_error=self.max_abs_error,
            max_abs_error_float64=self.max_abs_error_float64,
            torch_max_abs_error_float64=self.torch_max_abs_error_float64,
            mean_abs_error=self.mean_abs_error,
            p99_abs_error=self.p99_abs_error,
            min_cosine=self.min_cosine,
            longest_input_tokens=self.num_tokens,
        )


@dataclass(frozen=True)
class Result:
    """Comparisons of a subject with its reference.

    Attributes:
        title: Heading in the report.
        reference: What the subject was compared with.
        inputs: Inputs of all comparisons, such as `6 input shapes`.
        comparisons: Figures with their limits.
        errors: Errors against PyTorch, by input.
        remarks: Further lines for the report and the terminal.
        stops: Reason why the measurement of a graph was interrupted, by path.
        may_be_empty: Whether the check passes if there was nothing to compare.
    """

    may_be_empty: ClassVar[bool] = False

    title: str = ""
    reference: str = ""
    inputs: str = ""
    comparisons: tuple[Comparison, ...] = ()
    errors: tuple[Errors, ...] = ()
    remarks: tuple[str, ...] = ()
    stops: Mapping[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether something was measured and every figure meets its limit."""
        return bool(self.comparisons or self.may_be_empty) and not self.failures()

    def joined(self, others: Iterable["Result"]) -> Self:
        """Return this result with the measurements of others."""
        results: list[Result] = [self, *others]
        return replace(
            self,
            comparisons=tuple(comparison for result in results for comparison in result.comparisons),
            errors=tuple(errors for result in results for errors in result.errors),
            remarks=tuple(dict.fromkeys(remark for result in results for remark in result.remarks)),
            stops={path: reason for result in results for path, reason in result.stops.items()},
        )

    def failures(self) -> list[str]:
        """Return one line per interrupted graph, then one per failed figure.

        Gates of the manifest are first, the worst of them at the top.
        """
        failed = [comparison for comparison in self.comparisons if not comparison.passed]
        # A cosine of NaN comes after an infinite value, which is its cause.
        failed.sort(
            key=lambda figure: (-figure.used_share if figure.kind else 0.0, figure.kind in _LOWER_LIMITS)
        )
        stops = [f"{graph}: {reason}" for graph, reason in self.stops.items()]
        return stops + [comparison.failure for comparison in failed]

    def worst(self) -> list[Comparison]:
        """Return the comparison of each figure that is closest to its limit."""
        return closest(self.comparisons, lambda found: (found.graph, found.name, found.text_kind))

    def gates(self) -> list[Gate]:
        """Return the manifest's gates: of all figures of one kind, the one closest to its limit."""
        gates = [comparison for comparison in self.comparisons if comparison.kind]
        key = lambda gate: (gate.graph, gate.role, gate.kind, gate.text_kind)  # noqa: E731 - one line
        return [gate.to_gate() for gate in closest(gates, key)]

    def worst_errors(self) -> list[Errors]:
        """Return the worst errors of each role of each graph."""
        groups: dict[tuple[str, str], list[Errors]] = {}
        for errors in self.errors:
            groups.setdefault((errors.graph, errors.role), []).append(errors)
        return [Errors.merged(group) for group in groups.values()]

    def figures(self) -> list[ParityFigure]:
        """Return the errors that the manifest lists."""
        figures = [errors.to_message() for errors in self.worst_errors()]
        values = [c for c in self.comparisons if c.kind == GateKind.GATE_KIND_MAX_FP16_VALUE]
        for figure in figures:
            if values:
                figure.max_fp16_value = max_or_nan(comparison.value for comparison in values)
        return figures

    def to_json(self) -> dict[str, Any]:
        """Return all measurements as JSON values. Non-finite numbers become None."""
        return {
            "reference": self.reference,
            "inputs": self.inputs,
            "passed": self.passed,
            "failures": self.failures(),
            "stops": dict(self.stops),
            "comparisons": [comparison.to_json() for comparison in self.comparisons],
            "errors": [finite(asdict(errors)) for errors in self.worst_errors()],
            "remarks": list(self.remarks),
        }


def max_or_nan(values: Iterable[float]) -> float:
    """Return the largest value, or NaN if there is one. The built-in `max` would depend on the order."""
    return float(np.max(np.fromiter(values, np.float64)))


def describe_first(failures: Sequence[str]) -> str:
    """Return the first of several failures and the number of others."""
    return f"{failures[0]} (and {len(failures) - 1} more)" if failures[1:] else failures[0]
