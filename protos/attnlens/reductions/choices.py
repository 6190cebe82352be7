"""What may be asked of a reduction. Names and fields are those of `attnlens.v1.AttentionReduction`."""

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from attnlens.signatures import names_its_arguments

Level: TypeAlias = Literal["tokens", "words"]
SpecialTokens: TypeAlias = Literal["keep", "drop"]
LayerChoice: TypeAlias = Literal["none", "mean", "rollout"]
Problem: TypeAlias = tuple[str, str]
"""The path of a field, and what is wrong with it."""

DEFAULT_RESIDUAL = 0.5
MAX_ROWS = 1 << 14
_MAX_INT32 = 2**31 - 1


@names_its_arguments
@dataclass(frozen=True, slots=True)
class TopK:
    """The k largest weights of each row, see `sparse.top_weights`."""

    k: int


@names_its_arguments
@dataclass(frozen=True, slots=True)
class Threshold:
    """The weights that are at least `threshold`, see `sparse.weights_from`."""

    threshold: float


@names_its_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Numbers for each row and column, see `statistics`.

    Attributes:
        received: what each unit is given, by the rows that are not special.
        entropy: of each row, in nats.
        all_rows: for `received`, special tokens give, too.
    """

    received: bool = False
    entropy: bool = False
    all_rows: bool = False


@dataclass(frozen=True, slots=True)
class SqrtUint8:
    """8 bits for each weight, see `sqrt_uint8`."""


Form: TypeAlias = TopK | Threshold | Statistics | SqrtUint8


@names_its_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionReduction:
    """How to make less of the weights between the tokens of a text.

    The order is that of the fields: words, special tokens, the mean over heads (which the view of a query
    asks for), layers, the mean over rows or statistics, rows, and the form.

    Attributes:
        level: "words" makes rows and columns words: the sum over a word's tokens as key, the mean as query.
        special_tokens: "drop" leaves special tokens out and divides each row by what is left of it.
        layers: "mean" of the chosen ones, or their "rollout", of the mean over heads; "none": each by itself.
        rollout_residual: the share of a rollout that stays with the token itself. None: 0.5.
        mean_over_rows: the mean over all rows, as an axis of length 1.
        rows: the numbers of the rows to return, negative from the end; of what the steps before have left.
            Empty: all.
        form: how weights are returned. None: dense.

    Raises:
        TypeError: a row is no whole number.
    """

    level: Level = "tokens"
    special_tokens: SpecialTokens = "keep"
    layers: LayerChoice = "none"
    rollout_residual: float | None = None
    mean_over_rows: bool = False
    rows: Sequence[int] = ()
    form: Form | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple(operator.index(row) for row in self.rows))

    @property
    def residual(self) -> float:
        """The share of a rollout that stays with the token itself."""
        return DEFAULT_RESIDUAL if self.rollout_residual is None else self.rollout_residual

    @property
    def joins_layers(self) -> bool:
        """Whether one result comes of all layers."""
        return self.layers != "none"

    @property
    def has_units(self) -> bool:
        """Whether rows and columns are no longer the tokens of the text."""
        return self.level == "words" or self.special_tokens == "drop"

    @property
    def needs_text(self) -> bool:
        """Whether words and special tokens must be known."""
        return self.has_units or self.sums_content_rows

    @property
    def sums_content_rows(self) -> bool:
        """Whether it makes a difference which rows are special."""
        return isinstance(self.form, Statistics) and self.form.received and not self.form.all_rows

    @property
    def needs_distributions(self) -> Problem | None:
        """The first field that needs rows that sum to 1, and what it needs them for."""
        if self.special_tokens == "drop":
            return "special_tokens", "rows are scaled to sum to 1 again"
        if self.layers == "rollout":
            return "layers", "a rollout is a product of distributions"
        if isinstance(self.form, Statistics) and self.form.entropy:
            return "statistics.entropy", "only a distribution has an entropy"
        return None

    def problems(self) -> Iterator[Problem]:
        """Yield what is wrong, whatever the model and the text: the path of a field, and a description."""
        for name, value, known in (
            ("level", self.level, Level),
            ("special_tokens", self.special_tokens, SpecialTokens),
            ("layers", self.layers, LayerChoice),
        ):
            if value not in get_args(known):
                yield name, f"is {value!r}: choose one of {', '.join(get_args(known))}"
        if self.rollout_residual is not None:
            if self.layers != "rollout":
                yield "rollout_residual", "is for a rollout: leave it out, or ask for one in layers"
            elif not 0 <= self.rollout_residual < 1:
                yield "rollout_residual", f"is {self.rollout_residual:g}: it must be from 0 to less than 1"
        if len(self.rows) > MAX_ROWS:
            yield "rows", f"has more than {MAX_ROWS} numbers: leave it out for all rows"
            return
        if self.mean_over_rows and self.rows:
            yield "rows", "can't be chosen of a mean over all rows: leave out one of the two"
        if len(set(self.rows)) < len(self.rows):
            yield "rows", "has a number twice: each row may be asked for once"
        if any(abs(row) > _MAX_INT32 for row in self.rows):
            yield "rows", "has a number over 31 bits: no text has so many rows"
        yield from self._problems_of_form()

    def _problems_of_form(self) -> Iterator[Problem]:
        match self.form:
            case TopK(k) if not 1 <= k <= _MAX_INT32:
                yield "top_k.k", f"is {k}: it must be at least 1"
            case Threshold(threshold) if not 0 < threshold <= 1:
                text = f"is {threshold:g}: it must be over 0 and at most 1; for all weights ask for none"
                yield "threshold.threshold", text
            case Statistics() as asked:
                if not asked.received and not asked.entropy:
                    yield "statistics", "is empty: set received or entropy"
                if asked.all_rows and not asked.received:
                    yield "statistics.all_rows", "is for received: set that, too, or leave it out"
                if asked.received and self.rows:
                    yield "rows", "can't be chosen of what all rows give: leave out rows or received"
                if self.mean_over_rows:
                    yield "mean_over_rows", "can't go with statistics: leave out one of the two"


def resolve_rows(rows: Sequence[int], num_units: int) -> tuple[int, ...]:
    """Return the numbers of rows from 0, of U = `num_units`; two may be of the same row.

    Raises:
        IndexError: there is no such row; its argument is the place of the number in `rows`.
    """
    for place, row in enumerate(rows):
        if not -num_units <= row < num_units:
            raise IndexError(place)
    return tuple(row + num_units if row < 0 else row for row in rows)


def max_entries(threshold: float, num_units: int, *, is_distribution: bool) -> int:
    """Return how many weights of a row of U = `num_units` may reach a threshold."""
    if not is_distribution:
        return num_units
    return min(num_units, math.floor(1.001 / threshold))  # sums of rows are 1 but for rounding
