"""What was found of the graph of contributions, and whether that is good enough."""

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np

from attnlens.v1.manifest_pb2 import Gate, GateKind, Graph, OutputRole, ParityFigure
from attnlens_export.graph.names import CONTRIBUTIONS_PATH, graph_id
from attnlens_export.json_files import finite
from attnlens_export.parity.result import max_or_nan
from attnlens_export.precision import GraphResult, Table

LIMIT = 1e-5


@dataclass(frozen=True)
class Completeness:
    """What was found on one input shape, the worst of its texts.

    Attributes:
        case: the input shape.
        incompleteness: |sum of scores + baseline - d . p / |p|| / |d|.
        alone_error: the largest difference between a score of the shortest text in the batch and of the same
            text alone, divided by |d|.
        embedding_error: |p - q| / |q|, where q is made of the token vectors of the graph of embeddings.
        padding_score: the largest score of a token of padding, which must be 0.
        is_finite: whether no output has a NaN or an infinity.
    """

    case: str
    incompleteness: float
    alone_error: float
    embedding_error: float
    padding_score: float
    is_finite: bool

    def failures(self) -> list[str]:
        """Return a line for each gate that does not hold."""
        where = f"{CONTRIBUTIONS_PATH} at {self.case}"
        lines = [] if self.is_finite else [f"{where}: an output has a NaN or an infinity"]
        if not self.incompleteness <= LIMIT:
            lines.append(
                f"{where}: scores and baseline miss d . p by {self.incompleteness:.2e} |d| |p|, "
                f"{LIMIT:g} is allowed"
            )
        if not self.alone_error <= LIMIT:
            lines.append(
                f"{where}: a score of a text alone and in the batch differ by {self.alone_error:.2e} |d|, "
                f"{LIMIT:g} is allowed"
            )
        if not self.embedding_error <= LIMIT:
            lines.append(
                f"{where}: its embedding is {self.embedding_error:.2e} |p| from that of the token vectors, "
                f"{LIMIT:g} is allowed"
            )
        if self.padding_score != 0:
            lines.append(f"{where}: a token of padding has the score {self.padding_score:.2e} instead of 0")
        return lines


@dataclass(frozen=True)
class ContributionsResult(GraphResult):
    """All measurements of the graph of contributions.

    Attributes:
        cases: one for each input shape.
    """

    name: ClassVar[str] = "contributions"
    path: ClassVar[str] = CONTRIBUTIONS_PATH

    cases: tuple[Completeness, ...]

    @property
    def title(self) -> str:
        """The heading above it in the report."""
        return "Contributions of tokens"

    @property
    def passed(self) -> bool:
        """Whether every gate held, and something was measured at all."""
        return bool(self.cases) and not self.failures()

    def failures(self) -> list[str]:
        """Return a line for each gate that did not hold, the worst first."""
        by_error = sorted(self.cases, key=lambda case: -np.nan_to_num(case.incompleteness, nan=np.inf))
        return [line for case in by_error for line in case.failures()]

    def figures(self) -> list[ParityFigure]:
        """Return nothing: PyTorch computes no contributions, and the gates say it all."""
        return []

    def gates(self) -> list[Gate]:
        """Return completeness, and what a batch changes."""
        found = {
            GateKind.GATE_KIND_MAX_INCOMPLETENESS: max_or_nan(case.incompleteness for case in self.cases),
            GateKind.GATE_KIND_MAX_ALONE_ERROR: max_or_nan(case.alone_error for case in self.cases),
        }
        role = OutputRole.OUTPUT_ROLE_TOKEN_CONTRIBUTIONS
        return [
            Gate(graph=graph_id(self.path), role=role, kind=kind, limit=LIMIT, found=value)
            for kind, value in found.items()
        ]

    def describe(self, graph: Graph) -> None:
        """State nothing: the gates and the graph's file say it all."""

    def as_json(self) -> dict[str, Any]:
        """Return the limit and every measurement."""
        return {"limit": LIMIT, "cases": [finite(asdict(case)) for case in self.cases]}

    def table(self) -> Table:
        """Return remarks alone."""
        caption = (
            f"{len(self.cases)} input shapes: scores of tokens and a baseline, each computed by itself, must "
            "add up to the product of a direction and the embedding"
        )
        worst = max_or_nan(case.incompleteness for case in self.cases)
        alone = max_or_nan(case.alone_error for case in self.cases)
        remark = (
            f"contributions: scores and baseline add up within {worst:.1e} |d| |p|; alone and in a batch "
            f"they differ by {alone:.1e} |d|; {LIMIT:g} is allowed"
        )
        return Table(caption, remarks=(remark,))
