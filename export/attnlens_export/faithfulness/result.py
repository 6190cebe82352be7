"""What was measured of the methods, and how it is kept in a bundle."""

import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from attnlens.bundle import read_manifest
from attnlens.explanations import ExplainMethod
from attnlens.v1.explanation_pb2 import ExplainMethod as ExplainMethodNumber
from attnlens.v1.explanation_pb2 import Faithfulness
from attnlens.v1.manifest_pb2 import Manifest
from attnlens_export.json_files import finite
from attnlens_export.report import add_section

_KEY = "faithfulness"
_HEADING = "## Faithfulness of explanations"


class Control(StrEnum):
    """What is ranked beside the methods and explains nothing."""

    RANDOM = "random numbers"
    TOKEN_LENGTH = "length of the token"  # noqa: S105 - no secret


@dataclass(frozen=True)
class Measured:
    """One method, or one control.

    Attributes:
        method: The method or control.
        rank_correlation: The mean over texts.
        interval_low: The lower end of its 95 % confidence interval, by bootstrap over texts.
        interval_high: The upper end.
        num_texts: Number of texts with a rank correlation.
        deletion_difference: The mean over texts. NaN if not measured.
    """

    method: ExplainMethod | Control
    rank_correlation: float
    interval_low: float
    interval_high: float
    num_texts: int
    deletion_difference: float

    @property
    def number(self) -> ExplainMethodNumber.ValueType:
        """What the protocol calls the method; unspecified for a control."""
        if isinstance(self.method, Control):
            return ExplainMethodNumber.EXPLAIN_METHOD_UNSPECIFIED
        return ExplainMethodNumber.Value(f"EXPLAIN_METHOD_{self.method.name}")

    @property
    def name(self) -> str:
        """The name that people read."""
        return (
            self.method.value
            if isinstance(self.method, Control)
            else self.method.name.lower().replace("_", " ")
        )

    @property
    def interval(self) -> str:
        """The confidence interval, for tables."""
        return f"{self.interval_low:.3f} to {self.interval_high:.3f}"

    @property
    def deletion(self) -> str:
        """The deletion difference, for tables. Empty if not measured."""
        return "" if math.isnan(self.deletion_difference) else f"{self.deletion_difference:.3f}"


@dataclass(frozen=True)
class FaithfulnessResult:
    """All of them.

    Attributes:
        texts: where the texts are from.
        num_texts: how many there are.
        mean_tokens: of a text, special tokens counted.
        methods: the best rank correlation first, as `sorted` gives them.
    """

    texts: str
    num_texts: int
    mean_tokens: float
    methods: tuple[Measured, ...]

    def sorted(self) -> list[Measured]:
        """Return the methods, the largest rank correlation first."""
        return sorted(self.methods, key=lambda measured: -np.nan_to_num(measured.rank_correlation, nan=-2))

    def messages(self) -> list[Faithfulness]:
        """Return what the manifest states: methods whose rank correlation is known on two texts or more.

        Figures are rounded, so that a rounding error of a graph does not change the manifest.
        """
        return [
            Faithfulness(
                method=measured.number,
                control=measured.method.value if isinstance(measured.method, Control) else "",
                rank_correlation=round(measured.rank_correlation, 3),
                interval_low=round(measured.interval_low, 3),
                interval_high=round(measured.interval_high, 3),
                num_texts=measured.num_texts,
                deletion_difference=round(measured.deletion_difference, 3),
            )
            for measured in self.sorted()
            if math.isfinite(measured.interval_low)
        ]

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON values; a NaN becomes None."""
        rows = [
            {
                "method": measured.name,
                "rank_correlation": measured.rank_correlation,
                "interval_low": measured.interval_low,
                "interval_high": measured.interval_high,
                "num_texts": measured.num_texts,
                "deletion_difference": measured.deletion_difference,
            }
            for measured in self.sorted()
        ]
        return {
            "texts": self.texts,
            "num_texts": self.num_texts,
            "mean_tokens": self.mean_tokens,
            "methods": [finite(row) for row in rows],
        }

    def page(self) -> str:
        """Return a section of the report."""
        rows = [
            f"| {measured.name} | {measured.rank_correlation:.3f} | {measured.interval} "
            f"| {measured.num_texts} | {measured.deletion} |"
            for measured in self.sorted()
        ]
        head = (
            f"{self.num_texts} texts ({self.texts}), {self.mean_tokens:.1f} tokens each. The rank\n"
            "correlation is Spearman's with leave-one-out, with its 95 % bootstrap confidence interval.\n"
            "The deletion difference, measured by `attnlens check --faithfulness`, is how much more the\n"
            "embedding moves when the best 10 to 50 % of tokens are left out than when the worst are."
        )
        titles = "| method | rank correlation | 95 % interval | texts | deletion difference |"
        table = [titles, "|---|---|---|---|---|", *rows]
        return f"{_HEADING}\n\n{head}\n\n" + "\n".join(table) + "\n"


def record(directory: Path, result: FaithfulnessResult) -> Manifest:
    """Write the measurements into the bundle's report and manifest, replacing earlier ones.

    Returns:
        The new manifest. With it, the version of the model that a server reports changes.
    """
    manifest = read_manifest(directory)
    del manifest.faithfulness[:]
    manifest.faithfulness.extend(result.messages())
    add_section(directory, manifest, _KEY, result.as_json(), result.page())
    return manifest
