"""Where a head's attention goes by place: previous token, next, first, last, itself, punctuation, copies.

Every measure is a mean over rows, a row being what one token of the text gives to all tokens; the rows of
special tokens don't count, but their columns do. Letters: N heads, T tokens of a text, R rows of all texts.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from attnlens.reductions.statistics import entropy
from attnlens_analysis.heads.maps import TextMaps

MIN_TOKENS = 8
"""The shortest text that is measured, special tokens included: in shorter ones every place is near."""

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Patterns:
    """What was measured, a number for each of N heads where nothing else is said.

    Attributes:
        num_texts: how many texts.
        num_rows: R.
        num_duplicate_rows: rows of tokens that occur again in their text.
        previous: mean weight on the token before; 0 in the row of the first token.
        next: mean weight on the next token; 0 in the row of the last token.
        first: mean weight on the first token, which is the special one where a model has one there.
        last: mean weight on the last token.
        self: mean weight on the token itself.
        punctuation: mean weight on tokens of punctuation.
        duplicate: mean weight on other copies of the same token, in rows that have one.
        entropy: of a row, mean, in nats.
        entropy_normalised: of a row divided by ln T, mean: 1 is attention to all tokens alike.
        distance: mean number of tokens between a token and what it attends to.
        diagonal_argmax: share of rows in which the token itself has the largest weight.
        diagonal_chance: the same if the largest weight were anywhere; one number.
        duplicate_chance: `duplicate` of attention to all tokens alike; one number.
        punctuation_share: `punctuation` of attention to all tokens alike; one number.
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
    entropy_normalised: Values
    distance: Values
    diagonal_argmax: Values
    diagonal_chance: float
    duplicate_chance: float
    punctuation_share: float


@dataclass(slots=True)
class PatternSums:
    """Adds texts up. The names of the sums are those of `Patterns`."""

    num_heads: int
    num_texts: int = 0
    num_rows: int = 0
    num_duplicate_rows: int = 0
    _sums: dict[str, Values] = field(default_factory=dict)
    _chances: dict[str, float] = field(default_factory=dict)

    def add(self, maps: TextMaps, is_punctuation: npt.NDArray[np.bool_]) -> None:
        """Add the rows of a text; `is_punctuation` (T,) tells which columns are punctuation."""
        weights, rows = maps.weights, maps.content
        num_tokens = weights.shape[-1]
        self.num_texts += 1
        self.num_rows += len(rows)
        chosen = weights[:, rows]  # (N, R, T)
        behind = rows[rows + 1 < num_tokens]
        before = rows[rows > 0]
        entropies = entropy(chosen).sum(axis=-1)
        distances = np.abs(rows[:, None] - np.arange(num_tokens)).astype(np.float32)
        self._add("previous", weights[:, before, before - 1].sum(axis=-1))
        self._add("next", weights[:, behind, behind + 1].sum(axis=-1))
        self._add("first", chosen[:, :, 0].sum(axis=-1))
        self._add("last", chosen[:, :, -1].sum(axis=-1))
        self._add("self", weights[:, rows, rows].sum(axis=-1))
        self._add("punctuation", chosen[:, :, is_punctuation].sum(axis=(1, 2)))
        self._add("entropy", entropies)
        self._add("entropy_normalised", entropies / np.log(num_tokens))
        self._add("distance", np.einsum("nrt,rt->n", chosen, distances))
        self._add("diagonal_argmax", (chosen.argmax(axis=-1) == rows).sum(axis=-1))
        self._add_chance("diagonal", len(rows) / num_tokens)
        self._add_chance("punctuation", is_punctuation.sum() / num_tokens * len(rows))
        self._add_duplicates(maps, rows)

    def _add_duplicates(self, maps: TextMaps, rows: npt.NDArray[np.intp]) -> None:
        ids, num_tokens = np.asarray(maps.tokens.ids), maps.weights.shape[-1]
        copies = np.zeros((num_tokens, num_tokens), dtype=np.bool_)
        copies[np.ix_(rows, rows)] = ids[rows, None] == ids[rows]
        np.fill_diagonal(copies, val=False)
        with_copy = np.flatnonzero(copies.any(axis=-1))
        self.num_duplicate_rows += len(with_copy)
        self._add("duplicate", (maps.weights[:, with_copy] * copies[with_copy]).sum(axis=(1, 2)))
        self._add_chance("duplicate", copies.sum() / num_tokens)

    def _add(self, name: str, values: npt.NDArray[np.floating | np.integer]) -> None:
        self._sums[name] = self._sums.get(name, np.zeros(self.num_heads)) + values

    def _add_chance(self, name: str, value: float) -> None:
        self._chances[name] = self._chances.get(name, 0.0) + float(value)

    def means(self) -> Patterns:
        """Return the means over all rows so far.

        Raises:
            ValueError: no row was added.
        """
        if not self.num_rows:
            raise ValueError(f"no text has {MIN_TOKENS} tokens: give longer texts")
        num_copies = max(self.num_duplicate_rows, 1)
        divisors = {"duplicate": num_copies}
        return Patterns(
            self.num_texts,
            self.num_rows,
            self.num_duplicate_rows,
            **{name: total / divisors.get(name, self.num_rows) for name, total in self._sums.items()},
            diagonal_chance=self._chances["diagonal"] / self.num_rows,
            duplicate_chance=self._chances["duplicate"] / num_copies,
            punctuation_share=self._chances["punctuation"] / self.num_rows,
        )
