"""What was measured of the methods, and how it is kept in a bundle."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from attnlens.bundle import read_manifest
from attnlens.explanations import ExplainMethod
from attnlens.v1.explanation_pb2 import ExplainMethod as ExplainMethodNumber
from attnlens.v1.explanation_pb2 import Faithfulness
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
        method: which.
        rank_correlation: the mean over texts.
        standard_error: of that mean.
        deletion_difference: the mean over texts.
    """

    method: ExplainMethod | Control
    rank_correlation: float
    standard_error: float
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
        return sorted(self.methods, key=lambda measured: -measured.rank_correlation)

    def messages(self) -> list[Faithfulness]:
        """Return what the manifest states."""
        return [
            Faithfulness(
                method=measured.number,
                control=measured.method.value if isinstance(measured.method, Control) else "",
                rank_correlation=measured.rank_correlation,
                num_texts=self.num_texts,
                deletion_difference=measured.deletion_difference,
            )
            for measured in self.sorted()
        ]

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON values; a NaN becomes None."""
        rows = [
            {
                "method": measured.name,
                "rank_correlation": measured.rank_correlation,
                "standard_error": measured.standard_error,
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
            f"| {measured.name} | {measured.rank_correlation:.3f} | {measured.standard_error:.3f} "
            f"| {measured.deletion_difference:.3f} |"
            for measured in self.sorted()
        ]
        head = (
            f"{self.num_texts} texts ({self.texts}), {self.mean_tokens:.1f} tokens each. The rank\n"
            "correlation is Spearman's with leave-one-out. The deletion difference is how much more the\n"
            "embedding moves when the best 10 to 50 % of tokens are left out than when the worst are."
        )
        titles = "| method | rank correlation | standard error | deletion difference |"
        table = [titles, "|---|---|---|---|", *rows]
        return f"{_HEADING}\n\n{head}\n\n" + "\n".join(table) + "\n"


def record(directory: Path, result: FaithfulnessResult) -> None:
    """Write the measurements into the bundle's report and manifest, in place of earlier ones.

    The manifest changes, and with it the version of the model that a server states.
    """
    manifest = read_manifest(directory)
    del manifest.faithfulness[:]
    manifest.faithfulness.extend(result.messages())
    add_section(directory, manifest, _KEY, result.as_json(), result.page())
