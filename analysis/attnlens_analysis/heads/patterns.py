"""Attention by position: previous, next, first and last token, the token itself, punctuation and duplicates.

All measures are means over the rows of the attention maps. Rows of special tokens are excluded, their columns
are included. Shapes: N heads, T tokens of a text, R rows of all texts.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from attnlens.reductions.forms import entropy
from attnlens_analysis.heads.maps import TextMaps

MIN_TOKENS = 8
"""Minimum length including special tokens. In shorter texts, all positions are close to each other."""

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Patterns:
    """Means over all rows. Arrays have the shape (N,).

    Attributes:
        num_texts: Number of texts.
        num_rows: Number of rows R.
        num_duplicate_rows: Number of rows whose token occurs more than once in the text.
        previous: Mean weight on the previous token, 0 in the row of the first token.
        next: Mean weight on the next token, 0 in the row of the last token.
        first: Mean weight on the first token, which may be a special token.
        last: Mean weight on the last token.
        self: Mean weight on the token itself.
        punctuation: Mean weight on punctuation tokens.
        duplicate: Mean weight on other occurrences of the token, in rows where there are any.
        entropy: Mean entropy in nats.
        entropy_normalized: Mean of the entropy divided by ln T, 1 for uniform attention.
        distance: Mean distance to the attended tokens.
        diagonal_argmax: Share of rows whose largest weight is on the token itself.
        diagonal_chance: Expected `diagonal_argmax` if the largest weight were at a random position.
        duplicate_chance: `duplicate` of uniform attention.
        punctuation_share: `punctuation` of uniform attention.
    """

    num_texts: int
    num_rows: int
    num_duplicate_rows: int
    previous: Values
    next: Values
    first: Values
    last: Values
    self: Values
    punctuation: Values
    duplicate: Values
    entropy: Values
    entropy_normalized: Values
    distance: Values
    diagonal_argmax: Values
    diagonal_chance: float
    duplicate_chance: float
    punctuation_share: float


@dataclass(slots=True)
class PatternSums:
    """Accumulates the sums of `Patterns` over texts."""

    num_heads: int
    num_texts: int = 0
    num_rows: int = 0
    num_duplicate_rows: int = 0
    _sums: dict[str, Values] = field(default_factory=dict)
    _chances: dict[str, float] = field(default_factory=dict)

    def add(self, maps: TextMaps, is_punctuation: npt.NDArray[np.bool_]) -> None:
        """Add the rows of a text. `is_punctuation` (T,) selects the punctuation columns."""
        weights, rows = maps.weights, maps.content
        num_tokens = weights.shape[-1]
        self.num_texts += 1
        self.num_rows += len(rows)
        selected = weights[:, rows]  # (N, R, T)
        has_next = rows[rows + 1 < num_tokens]
        has_previous = rows[rows > 0]
        entropies = entropy(selected).sum(axis=-1)
        distances = np.abs(rows[:, None] - np.arange(num_tokens)).astype(np.float32)
        self._add("previous", weights[:, has_previous, has_previous - 1].sum(axis=-1))
        self._add("next", weights[:, has_next, has_next + 1].sum(axis=-1))
        self._add("first", selected[:, :, 0].sum(axis=-1))
        self._add("last", selected[:, :, -1].sum(axis=-1))
        self._add("self", weights[:, rows, rows].sum(axis=-1))
        self._add("punctuation", selected[:, :, is_punctuation].sum(axis=(1, 2)))
        self._add("entropy", entropies)
        self._add("entropy_normalized", entropies / np.log(num_tokens))
        self._add("distance", np.einsum("nrt,rt->n", selected, distances))
        self._add("diagonal_argmax", (selected.argmax(axis=-1) == rows).sum(axis=-1))
        self._add_chance("diagonal", len(rows) / num_tokens)
        self._add_chance("punctuation", is_punctuation.sum() / num_tokens * len(rows))
        self._add_duplicates(maps, rows)

    def _add_duplicates(self, maps: TextMaps, rows: npt.NDArray[np.intp]) -> None:
        ids, num_tokens = np.asarray(maps.tokens.ids), maps.weights.shape[-1]
        duplicates = np.zeros((num_tokens, num_tokens), dtype=np.bool_)
        duplicates[np.ix_(rows, rows)] = ids[rows, None] == ids[rows]
        np.fill_diagonal(duplicates, val=False)
        has_duplicate = np.flatnonzero(duplicates.any(axis=-1))
        self.num_duplicate_rows += len(has_duplicate)
        self._add("duplicate", (maps.weights[:, has_duplicate] * duplicates[has_duplicate]).sum(axis=(1, 2)))
        self._add_chance("duplicate", duplicates.sum() / num_tokens)

    def _add(self, name: str, values: npt.NDArray[np.floating | np.integer]) -> None:
        self._sums[name] = self._sums.get(name, np.zeros(self.num_heads)) + values

    def _add_chance(self, name: str, value: float) -> None:
        self._chances[name] = self._chances.get(name, 0.0) + float(value)

    def means(self) -> Patterns:
        """Return the means over all added rows.

        Raises:
            ValueError: No rows were added.
        """
        if not self.num_rows:
            raise ValueError(f"no text has at least {MIN_TOKENS} tokens. Use longer texts.")
        num_duplicates = max(self.num_duplicate_rows, 1)
        divisors = {"duplicate": num_duplicates}
        return Patterns(
            self.num_texts,
            self.num_rows,
            self.num_duplicate_rows,
            **{name: total / divisors.get(name, self.num_rows) for name, total in self._sums.items()},
            diagonal_chance=self._chances["diagonal"] / self.num_rows,
            duplicate_chance=self._chances["duplicate"] / num_duplicates,
            punctuation_share=self._chances["punctuation"] / self.num_rows,
        )
