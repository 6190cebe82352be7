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
        max_batch_difference: Maximum difference between a score of the shortest text in the batch and of the
            same text alone, divided by |d|.
        embedding_error: |p - q| / |q|, where q is made of the token vectors of the graph of embeddings.
        padding_score: the largest score of a token of padding, which must be 0.
        is_finite: whether no output has a NaN or an infinity.
    """

    case: str
    incompleteness: float
    max_batch_difference: float
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
        if not self.max_batch_difference <= LIMIT:
            lines.append(
                f"{where}: a score of a text alone and in the batch differ by "
                f"{self.max_batch_difference:.2e} |d|, {LIMIT:g} is allowed"
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
class HeadGates:
    """Measurements with gates of heads that are not 1, on one text.

    Attributes:
        case: Input shape.
        slope_error: For each layer, scores and baseline are added up twice: with its gates at 1, and with
            random gates, half of them 0, in the sweep alone. The change must be what the heads of the layer
            contribute. Largest difference, divided by |d|.
        ablated_incompleteness: `Completeness.incompleteness` with random heads of all layers removed.
        ablated_error: max |ONNX - PyTorch fp32| of the embedding, scaled to length 1, with the same heads
            removed.
        ablated_limit: Limit on `ablated_error`.
    """

    case: str
    slope_error: float
    ablated_incompleteness: float
    ablated_error: float
    ablated_limit: float

    def failures(self) -> list[str]:
        """Return a line for each gate that does not hold."""
        where = f"{CONTRIBUTIONS_PATH} at {self.case}"
        lines = []
        if not self.slope_error <= LIMIT:
            lines.append(
                f"{where}: head contributions miss the change that closed heads make by "
                f"{self.slope_error:.2e} |d|, {LIMIT:g} is allowed"
            )
        if not self.ablated_incompleteness <= LIMIT:
            lines.append(
                f"{where} without some heads: scores and baseline miss d . p by "
                f"{self.ablated_incompleteness:.2e} |d| |p|, {LIMIT:g} is allowed"
            )
        if not self.ablated_error <= self.ablated_limit:
            lines.append(
                f"{where} without some heads: the embedding differs from PyTorch by {self.ablated_error:.2e} "
                f"|p|, {self.ablated_limit:.2e} is allowed"
            )
        return lines


@dataclass(frozen=True)
class ContributionsResult(GraphResult):
    """All measurements of the graph of contributions.

    Attributes:
        cases: one for each input shape.
        heads: Measurements with other gates than 1. None if not measured.
    """

    name: ClassVar[str] = "contributions"
    path: ClassVar[str] = CONTRIBUTIONS_PATH

    cases: tuple[Completeness, ...]
    heads: HeadGates | None = None

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
        lines = [line for case in by_error for line in case.failures()]
        return lines + (self.heads.failures() if self.heads else [])

    def figures(self) -> list[ParityFigure]:
        """Return nothing: PyTorch computes no contributions, and the gates say it all."""
        return []

    def gates(self) -> list[Gate]:
        """Return completeness, what a batch changes, and the gates of heads."""
        tokens = OutputRole.OUTPUT_ROLE_TOKEN_CONTRIBUTIONS
        incompleteness = GateKind.GATE_KIND_MAX_INCOMPLETENESS
        complete = max_or_nan(case.incompleteness for case in self.cases)
        alone = max_or_nan(case.max_batch_difference for case in self.cases)
        found = [
            (tokens, incompleteness, LIMIT, complete),
            (tokens, GateKind.GATE_KIND_MAX_BATCH_DIFFERENCE, LIMIT, alone),
        ]
        if self.heads is not None:
            heads, embedding = OutputRole.OUTPUT_ROLE_HEAD_CONTRIBUTIONS, OutputRole.OUTPUT_ROLE_EMBEDDING
            error = self.heads.ablated_error
            found += [
                (heads, incompleteness, LIMIT, self.heads.slope_error),
                (embedding, GateKind.GATE_KIND_MAX_ABS_ERROR, self.heads.ablated_limit, error),
            ]
        return [
            Gate(graph=graph_id(self.path), role=role, kind=kind, limit=limit, value=value)
            for role, kind, limit, value in found
        ]

    def describe(self, graph: Graph) -> None:
        """State nothing: the gates and the graph's file say it all."""

    def as_json(self) -> dict[str, Any]:
        """Return the limit and every measurement."""
        heads = None if self.heads is None else finite(asdict(self.heads))
        return {"limit": LIMIT, "cases": [finite(asdict(case)) for case in self.cases], "heads": heads}

    def table(self) -> Table:
        """Return remarks alone."""
        caption = (
            f"{len(self.cases)} input shapes: scores of tokens and a baseline, each computed by itself, must "
            "add up to the product of a direction and the embedding"
        )
        worst = max_or_nan(case.incompleteness for case in self.cases)
        alone = max_or_nan(case.max_batch_difference for case in self.cases)
        remark = (
            f"contributions: scores and baseline add up within {worst:.1e} |d| |p|; alone and in a batch "
            f"they differ by {alone:.1e} |d|; {LIMIT:g} is allowed"
        )
        if self.heads is None:
            return Table(caption, remarks=(remark,))
        of_heads = (
            f"heads: contributions are the change that closed heads make within {self.heads.slope_error:.1e} "
            f"|d|, {LIMIT:g} is allowed; without some heads the embedding is within "
            f"{self.heads.ablated_error:.1e} |p| of PyTorch's"
        )
        return Table(caption, remarks=(remark, of_heads))
