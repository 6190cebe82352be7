"""Options of a reduction, with the names and fields of `attnlens.v1.AttentionReduction`."""

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from attnlens.short_repr import short_repr
from attnlens.signatures import checks_arguments

Level: TypeAlias = Literal["tokens", "words"]
SpecialTokens: TypeAlias = Literal["keep", "drop"]
LayerChoice: TypeAlias = Literal["none", "mean", "rollout"]
Problem: TypeAlias = tuple[str, str]
"""Path of an invalid field, and a description of the defect."""

DEFAULT_RESIDUAL = 0.5
MAX_ROWS = 1 << 14
_MAX_INT32 = 2**31 - 1


@checks_arguments
@dataclass(frozen=True, slots=True)
class TopK:
    """Keeps the k largest weights of each row, see `TopKWeights`."""

    k: int


@checks_arguments
@dataclass(frozen=True, slots=True)
class Threshold:
    """Keeps weights of at least `threshold`, see `SparseWeights`."""

    threshold: float


@checks_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Replaces weights by statistics of rows and columns, see `RowStatistics`.

    Attributes:
        received: Whether to return column sums over the rows of all units that are not special.
        entropy: Whether to return the entropy of each row in nats.
        all_rows: Whether `received` includes the rows of special tokens.
    """

    received: bool = False
    entropy: bool = False
    all_rows: bool = False


@dataclass(frozen=True, slots=True)
class SqrtUint8:
    """Quantizes each weight A to 8 bits, round(255 sqrt(A))."""


Form: TypeAlias = TopK | Threshold | Statistics | SqrtUint8


@short_repr
@checks_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionReduction:
    """Reduction of attention weights between the tokens of a text.

    Steps run in the order of the attributes. The mean over heads, if the view of the query is "head_mean",
    comes after `special_tokens`.

    Attributes:
        level: "words" merges tokens into words: the sum over the tokens of a key word, and the mean over the
            tokens of a query word.
        special_tokens: "drop" removes special tokens and divides each row by its remaining sum.
        layers: "mean" averages the selected layers, "rollout" computes their attention rollout from the mean
            over heads, and "none" returns each layer.
        rollout_residual: Residual weight of a rollout, at least 0 and less than 1. If None, 0.5.
        mean_over_rows: Whether to return the mean over all rows, with an axis of length 1.
        rows: Indices of the rows to return, after the previous steps. Negative indices count from the end. If
            empty, all rows.
        form: Form of the result. If None, dense weights.

    Raises:
        TypeError: A row is not an integer.
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
        """Residual weight of a rollout."""
        return DEFAULT_RESIDUAL if self.rollout_residual is None else self.rollout_residual

    @property
    def joins_layers(self) -> bool:
        """Whether all layers are combined into one result."""
        return self.layers != "none"

    @property
    def has_units(self) -> bool:
        """Whether rows and columns differ from the tokens of the text."""
        return self.level == "words" or self.special_tokens == "drop"

    @property
    def needs_text(self) -> bool:
        """Whether the reduction needs the words or special tokens of the text."""
        return self.has_units or self.sums_content_rows

    @property
    def sums_content_rows(self) -> bool:
        """Whether column sums exclude the rows of special tokens."""
        return isinstance(self.form, Statistics) and self.form.received and not self.form.all_rows

    @property
    def needs_distributions(self) -> Problem | None:
        """First field that requires rows with a sum of 1, and the reason; None if there is no such field."""
        if self.special_tokens == "drop":
            return "special_tokens", "because rows are rescaled to sum to 1"
        if self.layers == "rollout":
            return "layers", "because a rollout multiplies distributions"
        if isinstance(self.form, Statistics) and self.form.entropy:
            return "statistics.entropy", "because entropy is defined for distributions"
        return None

    def problems(self) -> Iterator[Problem]:
        """Yield each defect that does not depend on the model or text."""
        for name, value, choices in (
            ("level", self.level, Level),
            ("special_tokens", self.special_tokens, SpecialTokens),
            ("layers", self.layers, LayerChoice),
        ):
            if value not in get_args(choices):
                yield name, f"is {value!r}: choose one of {', '.join(get_args(choices))}"
        if self.rollout_residual is not None:
            if self.layers != "rollout":
                yield "rollout_residual", "is only used for a rollout: omit it, or set layers to a rollout"
            elif not 0 <= self.rollout_residual < 1:
                yield (
                    "rollout_residual",
                    f"is {self.rollout_residual:g}: it must be at least 0 and less than 1",
                )
        if len(self.rows) > MAX_ROWS:
            yield "rows", f"has more than {MAX_ROWS} entries: omit it to return all rows"
            return
        if self.mean_over_rows and self.rows:
            yield "rows", "cannot be combined with mean_over_rows: omit one of them"
        if len(set(self.rows)) < len(self.rows):
            yield "rows", "contains a row twice: list each row once"
        if any(abs(row) > _MAX_INT32 for row in self.rows):
            yield "rows", f"contains an index beyond {_MAX_INT32}: no text has that many rows"
        yield from self._form_problems()

    def _form_problems(self) -> Iterator[Problem]:
        match self.form:
            case TopK(k) if not 1 <= k <= _MAX_INT32:
                yield "top_k.k", f"is {k}: use 1 to {_MAX_INT32}"
            case Threshold(threshold) if not 0 < threshold <= 1:
                description = (
                    f"is {threshold:g}: it must be greater than 0 and at most 1. To get all weights, omit it"
                )
                yield "threshold.threshold", description
            case Statistics() as statistics:
                if not statistics.received and not statistics.entropy:
                    yield "statistics", "is empty: set received or entropy"
                if statistics.all_rows and not statistics.received:
                    yield "statistics.all_rows", "is only used for received: omit it, or set received"
                if statistics.received and self.rows:
                    yield "rows", "cannot be combined with statistics.received: omit one of them"
                if self.mean_over_rows:
                    yield "mean_over_rows", "cannot be combined with statistics: omit one of them"


def resolve_rows(rows: Sequence[int], num_units: int) -> tuple[int, ...]:
    """Convert negative row indices of a map with U = `num_units` rows. The result can contain duplicates.

    Raises:
        IndexError: A row does not exist. The exception's argument is its position in `rows`.
    """
    for position, row in enumerate(rows):
        if not -num_units <= row < num_units:
            raise IndexError(position)
    return tuple(row + num_units if row < 0 else row for row in rows)


def max_entries(threshold: float, num_units: int, *, is_distribution: bool) -> int:
    """Return an upper bound for the number of weights in a row of U = `num_units` that reach a threshold."""
    if not is_distribution:
        return num_units
    return min(num_units, math.floor(1.001 / threshold))  # allows for rounding errors in row sums
