"""Result types of all checks: figures, their limits, and how they become gates, messages and tables."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from attnlens.v1.manifest_pb2 import Gate, GateKind, Graph, OutputRole, ParityFigure
from attnlens_export.graph.names import graph_id

# Avoids a division by zero if the limit is 0, or 1 for a lower limit.
_SMALLEST_ALLOWED_ERROR = 1e-12
_LOWER_LIMITS = frozenset(
    {GateKind.GATE_KIND_MIN_COSINE, GateKind.GATE_KIND_MEAN_COSINE, GateKind.GATE_KIND_MIN_RANK_AGREEMENT}
)


@dataclass(frozen=True)
class Figure:
    """A measured number and its limit.

    Attributes:
        graph: Path of the ONNX file in the bundle.
        value: The measured number. NaN fails.
        limit: Lower limit if `kind` is a cosine or rank agreement, otherwise upper limit.
        failure: Message for a figure that does not meet its limit.
        kind: Kind of gate in the manifest. Unspecified if the manifest does not list the figure.
        role: Role of the graph outputs.
        text_kind: Kind of texts, such as `prose`. Empty if not measured on texts.
    """

    graph: str
    value: float
    limit: float
    failure: str
    kind: GateKind.ValueType = GateKind.GATE_KIND_UNSPECIFIED
    role: OutputRole.ValueType = OutputRole.OUTPUT_ROLE_UNSPECIFIED
    text_kind: str = ""

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


class FigureSet(ABC):
    """Measurements that are judged by their figures."""

    @abstractmethod
    def figures(self) -> list[Figure]:
        """Return every figure that has a limit."""

    @property
    def passed(self) -> bool:
        """Whether something was measured and every figure meets its limit."""
        return bool(self.figures()) and not self.failures()

    def failures(self) -> list[str]:
        """Return one line per failed figure: gates of the manifest first, the worst of them at the top."""
        failed = [figure for figure in self.figures() if not figure.passed]
        # A cosine of NaN comes after an infinite value, which is its cause.
        failed.sort(
            key=lambda figure: (-figure.used_share if figure.kind else 0.0, figure.kind in _LOWER_LIMITS)
        )
        return [figure.failure for figure in failed]

    def gates(self) -> list[Gate]:
        """Return the manifest's gates: of all figures of one kind, the one closest to its limit."""
        groups: dict[tuple[object, ...], list[Figure]] = {}
        for figure in self.figures():
            if figure.kind:
                groups.setdefault((figure.graph, figure.role, figure.kind, figure.text_kind), []).append(
                    figure
                )
        return [max(group, key=lambda figure: figure.used_share).to_gate() for group in groups.values()]


@dataclass(frozen=True)
class Table:
    """A table for the report and the terminal.

    Attributes:
        caption: What was measured, and on which inputs.
        headings: Column headings. Empty if the remarks contain everything.
        rows: One cell per heading.
        remarks: Lines below the table.
    """

    caption: str
    headings: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    remarks: tuple[str, ...] = ()


class CheckResult(FigureSet):
    """Result of one check of a bundle."""

    def interruptions(self) -> Mapping[str, str]:
        """Return the reasons why measurements of graphs were interrupted, by graph path."""
        return {}

    def failures(self) -> list[str]:
        """Return one line per interrupted graph, then one per failed figure."""
        return [
            *(f"{graph}: {reason}" for graph, reason in self.interruptions().items()),
            *super().failures(),
        ]

    def manifest_figures(self) -> list[ParityFigure]:
        """Return the errors against PyTorch that the manifest lists."""
        return []

    @abstractmethod
    def to_json(self) -> Any:  # noqa: ANN401 - JSON values
        """Return all measurements as JSON values. Non-finite numbers become None."""


class GraphResult(CheckResult):
    """Result of the check of one further graph: contributions, or embeddings in a lower precision.

    Attributes:
        name: Key in `report.json`: `contributions` or the precision.
        path: Path of the graph in the bundle.
        title: Heading in the report.
    """

    name: ClassVar[str]
    path: ClassVar[str]
    title: ClassVar[str]

    def describe(self, graph: Graph) -> None:
        """Add measurements to the manifest entry of the graph. By default there are none."""

    @abstractmethod
    def table(self) -> Table:
        """Return the result for the report and the terminal."""


def max_or_nan(values: Iterable[float]) -> float:
    """Return the largest value, or NaN if there is one. The built-in `max` would depend on the order."""
    return float(np.max(np.fromiter(values, np.float64)))
