"""What was found in an engine in one precision, and whether that is good enough."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from attnlens.v1.manifest_pb2 import EngineCheck, Gate, GateKind, OutputRole, ParityFigure, Precision
from attnlens_export.engines.engine import NotMeasured
from attnlens_export.graph.names import role_name
from attnlens_export.json_files import finite

_AT_LEAST = frozenset({GateKind.GATE_KIND_MIN_COSINE, GateKind.GATE_KIND_MEAN_COSINE})
_KIND = "GATE_KIND_"
_PRECISION = "PRECISION_"


class Part(NamedTuple):
    """What one measurement says of an engine."""

    gates: tuple[Gate, ...] = ()
    figures: tuple[ParityFigure, ...] = ()
    failures: tuple[str, ...] = ()
    """A line for each gate that did not hold, the worst first."""


@dataclass(frozen=True)
class EngineResult:
    """One precision.

    Attributes:
        check: what the manifest states.
        failures: a line for each gate that did not hold.
    """

    check: EngineCheck
    failures: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return all of it as JSON values; a NaN or an infinity becomes None."""
        check = self.check
        head = {
            "engine": check.engine,
            "version": check.version,
            "precision": precision_name(check.precision),
            "device": check.device,
            "processor": check.processor,
            "passed": check.passed,
            "failures": list(self.failures),
            "num_cases": check.num_cases,
            "num_texts": check.num_texts,
        }
        gates = [finite(_gate_as_json(gate)) for gate in check.gates]
        figures = [finite(_figure_as_json(figure)) for figure in check.figures]
        return head | {"gates": gates, "figures": figures}


@dataclass(frozen=True)
class EngineSummary:
    """Every precision that was to be measured.

    Attributes:
        results: of those that were, which may have failed.
        not_measured: the others.
    """

    results: tuple[EngineResult, ...]
    not_measured: tuple[NotMeasured, ...]

    def failures(self) -> list[str]:
        """Return a line for each gate that did not hold, with its precision."""
        return [
            f"{result.check.engine} in {precision_name(result.check.precision)}: {line}"
            for result in self.results
            for line in result.failures
        ]


def join(check: EngineCheck, parts: Iterable[Part]) -> EngineResult:
    """Return a check with what its parts found; it passed if there is no failure, and any gate at all."""
    joined = list(parts)
    failures = tuple(line for part in joined for line in part.failures)
    check.gates.extend(gate for part in joined for gate in part.gates)
    check.figures.extend(figure for part in joined for figure in part.figures)
    check.passed = not failures and bool(check.gates)
    return EngineResult(check, failures)


def broken(where: str, gates: Sequence[Gate]) -> tuple[str, ...]:
    """Return a line for each gate that does not hold. `where`: what it is about, such as a file."""
    return tuple(
        f"{where}: {_measured(gate)} is {gate.value:.6g}, {_relation(gate)} {gate.limit:g} is allowed"
        for gate in gates
        if not holds(gate)
    )


def holds(gate: Gate) -> bool:
    """Whether what was found is within the limit; a NaN never is."""
    return gate.value >= gate.limit if gate.kind in _AT_LEAST else gate.value <= gate.limit


def precision_name(precision: Precision.ValueType) -> str:
    """Return the name that options have for a precision, such as `bf16`."""
    return Precision.Name(precision).removeprefix(_PRECISION).lower()


def precision_number(name: str) -> Precision.ValueType:
    """Return what the manifest calls a precision."""
    return Precision.Value(f"{_PRECISION}{name.upper()}")


def _relation(gate: Gate) -> str:
    return "at least" if gate.kind in _AT_LEAST else "at most"


def _measured(gate: Gate) -> str:
    of_kind = f", {gate.text_kind}," if gate.text_kind else ""
    vectors = "embeddings" if gate.role == OutputRole.OUTPUT_ROLE_EMBEDDING else "tokens' vectors"
    match gate.kind:
        case GateKind.GATE_KIND_MEAN_COSINE:
            return f"the mean cosine of {vectors} with those in fp32{of_kind}"
        case GateKind.GATE_KIND_MIN_COSINE:
            return f"the smallest cosine of {vectors} with those in fp32{of_kind}"
        case GateKind.GATE_KIND_MAX_BATCH_DIFFERENCE:
            return f"the largest difference of {vectors} between a text alone and in a batch{of_kind}"
    return GateKind.Name(gate.kind)


def _gate_as_json(gate: Gate) -> dict[str, Any]:
    return {
        "graph": gate.graph,
        "role": role_name(gate.role),
        "kind": GateKind.Name(gate.kind).removeprefix(_KIND).lower(),
        "text_kind": gate.text_kind,
        "limit": gate.limit,
        "value": gate.value,
    }


def _figure_as_json(figure: ParityFigure) -> dict[str, Any]:
    return {
        "graph": figure.graph,
        "role": role_name(figure.role),
        "max_abs_error": figure.max_abs_error,
        "max_abs_error_float64": figure.max_abs_error_float64,
        "torch_max_abs_error_float64": figure.torch_max_abs_error_float64,
        "mean_abs_error": figure.mean_abs_error,
        "p99_abs_error": figure.p99_abs_error,
        "min_cosine": figure.min_cosine,
        "longest_input_tokens": figure.longest_input_tokens,
    }
