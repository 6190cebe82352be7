"""Attention to near and to distant tokens, compared with uniform attention on the same texts.

Special tokens are excluded as rows and columns, and the remaining weights of each row are divided by their
sum. In a text of C content tokens, `local` is the weight on tokens at a distance of up to
`MAX_LOCAL_DISTANCE`, including the token itself, and `long_range` is the weight on tokens at a distance of
more than C / `LONG_RANGE_DIVISOR`. Texts with fewer than `MIN_CONTENT_TOKENS` content tokens are excluded, so
that no token is both near and distant.

Shapes: N heads, C content tokens of a text, I texts, R rows of all texts.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from attnlens_analysis.heads.intervals import bootstrap_ratio
from attnlens_analysis.heads.maps import TextMaps, Weights

MAX_LOCAL_DISTANCE = 2
LONG_RANGE_DIVISOR = 4
MIN_CONTENT_TOKENS = 12
_MIN_WEIGHT = 1e-6  # rows with less weight on content tokens are excluded

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Share:
    """Share of the attention between content tokens in a range of distances.

    Attributes:
        share: (N,) mean over all rows. NaN for heads that do not attend to content tokens.
        uniform: The share for uniform attention on the same rows.
        ratio: (N,) `share` / `uniform`.
        interval: (2, N) 95 % bootstrap interval of `ratio` over texts.
    """

    share: Values
    uniform: float
    ratio: Values
    interval: Values


@dataclass(frozen=True, slots=True)
class Distances:
    """Attention by distance.

    Attributes:
        num_texts: Number of texts.
        num_rows: Number of rows R.
        content: (N,) mean weight on content tokens before the division.
        local: Attention to near tokens.
        long_range: Attention to distant tokens.
        content_uniform: `content` for uniform attention on the same rows.
    """

    num_texts: int
    num_rows: int
    content: Values
    local: Share
    long_range: Share
    content_uniform: float = 0.0


@dataclass(slots=True)
class _RangeSums:
    """Sums over the rows of each text for one range of distances, with a list item per text."""

    shares: list[Values] = field(default_factory=list)
    """(N,) shares of the attention."""
    expected: list[Values] = field(default_factory=list)
    """(N,) shares for uniform attention, in the rows in which the head attends to content tokens."""
    uniform: list[float] = field(default_factory=list)
    """Shares for uniform attention in all rows."""

    def add(self, weights: Weights, sums: Values, is_inside: npt.NDArray[np.bool_]) -> None:
        """Add a text with weights (N, C, C), their row sums (N, C) and the range as a mask (C, C)."""
        uniform, is_used = is_inside.mean(axis=-1), _is_used(sums)  # (C,), (N, C)
        inside = np.einsum("nij,ij->ni", weights, is_inside.astype(np.float32))  # (N, C)
        self.shares.append(np.where(is_used, inside / np.maximum(sums, _MIN_WEIGHT), 0).sum(axis=-1))
        self.expected.append(is_used @ uniform)
        self.uniform.append(float(uniform.sum()))

    def share(self, used_rows: Values, num_rows: int) -> Share:
        """Return the means, given the number of used rows of each head (N,) and of all rows."""
        shares, expected = np.array(self.shares), np.array(self.expected)  # (I, N)
        is_used = used_rows > 0
        return Share(
            np.where(is_used, shares.sum(axis=0) / np.maximum(used_rows, 1), np.nan),
            sum(self.uniform) / num_rows,
            np.where(is_used, shares.sum(axis=0) / np.where(is_used, expected.sum(axis=0), 1), np.nan),
            bootstrap_ratio(shares, expected),
        )


@dataclass(slots=True)
class DistanceSums:
    """Accumulates the sums of `Distances` over texts."""

    num_rows: list[int] = field(default_factory=list)
    _content: list[Values] = field(default_factory=list)
    _content_uniform: float = 0.0
    _used_rows: list[Values] = field(default_factory=list)
    _local: _RangeSums = field(default_factory=_RangeSums)
    _long_range: _RangeSums = field(default_factory=_RangeSums)

    def add(self, maps: TextMaps) -> None:
        """Add a text. It is ignored if it has fewer than `MIN_CONTENT_TOKENS` content tokens."""
        content = maps.content
        number = len(content)
        if number < MIN_CONTENT_TOKENS:
            return
        weights = maps.weights[:, content[:, None], content]  # (N, C, C)
        sums = weights.sum(axis=-1, dtype=np.float64)  # (N, C)
        distances = np.abs(content[:, None] - content)
        self.num_rows.append(number)
        self._content.append(sums.sum(axis=-1))
        self._content_uniform += number * number / maps.weights.shape[-1]
        self._used_rows.append(_is_used(sums).sum(axis=-1).astype(np.float64))
        self._local.add(weights, sums, distances <= MAX_LOCAL_DISTANCE)
        self._long_range.add(weights, sums, distances > number / LONG_RANGE_DIVISOR)

    def means(self) -> Distances | None:
        """Return the means over all rows and their intervals, or None if no text was used."""
        if not self.num_rows:
            return None
        total, used_rows = sum(self.num_rows), np.sum(self._used_rows, axis=0)
        return Distances(
            len(self.num_rows),
            total,
            np.sum(self._content, axis=0) / total,
            self._local.share(used_rows, total),
            self._long_range.share(used_rows, total),
            self._content_uniform / total,
        )


def _is_used(sums: Values) -> npt.NDArray[np.bool_]:
    """Return the rows with weight on content tokens, (N, C). Gates can set all weights of a row to 0."""
    return sums > _MIN_WEIGHT
