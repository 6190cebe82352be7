"""Results of the comparison with the publisher's pipeline."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from attnlens.v1.manifest_pb2 import PublisherComparison, PublisherFigure
from attnlens_export.json_files import finite

_MAX_NAMED_CHARS = 100


@dataclass(frozen=True)
class Comparison:
    """One kind of result, compared over all texts.

    Attributes:
        result: `prompts`, `default prompt`, `similarity`, `token ids`, `token types`, `hidden states`,
            `embeddings`, `similarities`, `logits`, `scores` or `labels`, with the prompt if it is not the
            default.
        num_texts: Number of texts compared.
        max_abs_error: Largest absolute difference, or the number of texts that differ.
        limit: Largest error that passes. 0 for a number of texts.
        worst_text: Text with the largest error.
        values: What the bundle returns for it, and what the publisher's pipeline returns.
    """

    result: str
    num_texts: int
    max_abs_error: float
    limit: float
    worst_text: str
    values: tuple[str, str]

    @property
    def passed(self) -> bool:
        """Whether the error is within its limit. A NaN is not."""
        return self.max_abs_error <= self.limit

    def describe_failure(self) -> str:
        """Return a line with the text and both values."""
        ours, theirs = self.values
        size = (
            f"differ by {self.max_abs_error:.2e} (allowed {self.limit:.2e})"
            if self.limit
            else f"differ for {self.max_abs_error:.0f} of {self.num_texts} texts"
        )
        text = (
            self.worst_text
            if len(self.worst_text) <= _MAX_NAMED_CHARS
            else self.worst_text[:_MAX_NAMED_CHARS] + "..."
        )
        return f"{self.result} {size}: for {text!r}, the bundle has {ours}, but the publisher {theirs}"


@dataclass(frozen=True)
class PublisherResult:
    """All comparisons with one implementation.

    Attributes:
        library: `sentence-transformers` or `transformers`. Empty if nothing was compared.
        versions: Versions by package name.
        comparisons: One per kind of result and prompt, in the order of the pipeline. Vectors are not compared
            if tokens differ.
        not_compared: Results that were not compared, with the reason. If nothing was, the first entry is the
            reason.
        longest_tokens: Number of tokens of the longest text whose vectors were compared.
    """

    library: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    comparisons: tuple[Comparison, ...] = ()
    not_compared: tuple[str, ...] = ()
    longest_tokens: int = 0

    @property
    def implementation(self) -> str:
        """Name and version, for example `sentence-transformers 6.2.0`."""
        return f"{self.library} {self.versions.get(self.library, '')}"

    def failures(self) -> list[str]:
        """Return a line per comparison that failed, in the order of the pipeline."""
        return [found.describe_failure() for found in self.comparisons if not found.passed]

    def to_message(self) -> PublisherComparison:
        """Return the entry of the manifest."""
        return PublisherComparison(
            library=self.library,
            versions=self.versions,
            figures=[
                PublisherFigure(
                    result=found.result,
                    num_texts=found.num_texts,
                    max_abs_error=found.max_abs_error,
                    limit=found.limit,
                )
                for found in self.comparisons
            ],
            not_compared=self.not_compared,
            longest_tokens=self.longest_tokens,
        )

    def as_json(self) -> dict[str, Any]:
        """Return every comparison as JSON values."""
        rows = [finite({**asdict(found), "passed": found.passed}) for found in self.comparisons]
        return {
            "library": self.library,
            "versions": dict(self.versions),
            "passed": not self.failures(),
            "longest_tokens": self.longest_tokens,
            "comparisons": rows,
            "not_compared": list(self.not_compared),
        }
