"""Description of the comparison of a bundle with its publisher's pipeline."""

from collections.abc import Mapping, Sequence
from typing import Protocol

OLDER = "not compared: exported by an older version of attnlens"
ON_REQUEST = "on request, by --without-comparison"
"""Reason in the manifest of a bundle whose export was told not to compare it."""


class _Figure(Protocol):
    @property
    def num_texts(self) -> int: ...


class Comparison(Protocol):
    """The fields of `attnlens.v1.PublisherComparison`."""

    @property
    def library(self) -> str:
        """Package of the pipeline. Empty if nothing was compared."""

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions by package name."""

    @property
    def figures(self) -> Sequence[_Figure]:
        """Comparisons."""

    @property
    def not_compared(self) -> Sequence[str]:
        """Results that were not compared, with the reason."""

    @property
    def longest_tokens(self) -> int:
        """Number of tokens of the longest text whose vectors were compared."""


_TOKENIZERS = {
    "published": "token ids of the checkpoint's tokenizer.json, not those of transformers, which differ",
    "transformers": "token ids of transformers, not those of the checkpoint's tokenizer.json, which differ",
}


def describe_tokenizer(choice: str) -> str:
    """Return one line on `Manifest.tokenizer_choice`. Empty without a choice."""
    return _TOKENIZERS.get(choice, "")


def describe_comparison(comparison: Comparison | None) -> str:
    """Return one line: what was compared, or why not. None means that the bundle does not state it."""
    if comparison is None:
        return OLDER
    reasons = "; ".join(comparison.not_compared)
    if not comparison.library:
        return f"not compared: {reasons}"
    num_texts = max((figure.num_texts for figure in comparison.figures), default=0)
    version = comparison.versions.get(comparison.library, "")
    line = (
        f"equal to {comparison.library} {version}: {len(comparison.figures)} results of {num_texts} texts of "
        f"up to {comparison.longest_tokens} tokens"
    )
    return f"{line}; not compared: {reasons}" if reasons else line
