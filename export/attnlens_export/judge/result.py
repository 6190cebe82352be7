"""Result of the comparison with the publisher's pipeline."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from attnlens.v1.manifest_pb2 import PublisherComparison, PublisherFigure
from attnlens_export.results import Comparison, Result

DIFFERENCE = "difference of "
"""Beginning of the names of figures. The rest is the name of the result in the manifest."""


@dataclass(frozen=True)
class PublisherResult(Result):
    """All comparisons with one implementation, in the order of the pipeline.

    Figures are the largest difference of any text, or the number of texts that differ, whose limit is 0.
    Vectors are not compared if tokens differ.

    Attributes:
        library: `sentence-transformers` or `transformers`. Empty if nothing was compared.
        versions: Versions by package name.
        not_compared: Results that were not compared, with the reason. If nothing was, the first entry is the
            reason.
        longest_tokens: Number of tokens of the longest text whose vectors were compared.
    """

    may_be_empty: ClassVar[bool] = True

    library: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    not_compared: tuple[str, ...] = ()
    longest_tokens: int = 0

    @property
    def implementation(self) -> str:
        """Name and version, for example `sentence-transformers 6.2.0`."""
        return f"{self.library} {self.versions.get(self.library, '')}"

    def failures(self) -> list[str]:
        """Return a line per comparison that failed, in the order of the pipeline."""
        return [found.failure for found in self.comparisons if not found.passed]

    def to_message(self) -> PublisherComparison:
        """Return the entry of the manifest."""
        return PublisherComparison(
            library=self.library,
            versions=self.versions,
            figures=[_to_figure(found) for found in self.comparisons],
            not_compared=self.not_compared,
            longest_tokens=self.longest_tokens,
        )

    def to_json(self) -> dict[str, Any]:
        """Return all comparisons as JSON values. Non-finite numbers become None."""
        return {
            "library": self.library,
            "versions": dict(self.versions),
            "longest_tokens": self.longest_tokens,
            "not_compared": list(self.not_compared),
            **super().to_json(),
        }


def _to_figure(found: Comparison) -> PublisherFigure:
    result = found.what.removeprefix(DIFFERENCE)
    return PublisherFigure(
        result=result, num_texts=found.num_texts, max_abs_error=found.value, limit=found.limit
    )
