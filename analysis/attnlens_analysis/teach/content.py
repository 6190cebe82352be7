"""What a lesson is made of. Each text is plain: a renderer escapes it for its format."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Bars:
    """A picture: a bar for each label.

    Attributes:
        title: what is shown, with its unit.
        labels: of the bars.
        values: their lengths; negative ones are drawn otherwise.
        marked: the places of the bars that the text speaks of.
        decimals: of the figures beside the bars; None: as `number` writes them.
    """

    title: str
    labels: Sequence[str]
    values: Sequence[float]
    marked: Sequence[int] = ()
    decimals: int | None = None

    @property
    def figures(self) -> list[str]:
        """The values as text."""
        if self.decimals is None:
            return [number(value) for value in self.values]
        return [f"{value:,.{self.decimals}f}" for value in self.values]


@dataclass(frozen=True, slots=True)
class Grid:
    """A picture: a shaded cell for each number from 0 to 1.

    Attributes:
        title: what is shown.
        rows: labels.
        columns: labels.
        values: a row each.
    """

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Table:
    """Numbers by name.

    Attributes:
        headings: of the columns; the first column is text, the others are numbers.
        rows: the cells.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the way.

    Attributes:
        title: in a few words.
        formula: what is computed, in one line.
        text: what happens here with this token, a paragraph each.
        picture: of it.
        to_try: what the reader can do to see it change; the lines after the first are code.
        caveat: what is easily read into it, and wrong; empty: nothing.
        table: the numbers, where the text does not hold them all.
    """

    title: str
    formula: str
    text: Sequence[str]
    picture: Bars | Grid
    to_try: Sequence[str]
    caveat: str = ""
    table: Table | None = None


@dataclass(frozen=True, slots=True)
class Lesson:
    """All steps of one question.

    Attributes:
        title: of the page.
        introduction: a paragraph each.
        steps: in order.
    """

    title: str
    introduction: Sequence[str]
    steps: Sequence[Step] = field(default_factory=tuple)


def number(value: float) -> str:
    """Return a number with four decimals, or three digits where that shows none of them."""
    small = value != 0 and abs(value) < 0.001  # noqa: PLR2004 - four decimals would show one digit
    return f"{value:.2e}" if small else f"{value:.4f}"


def numbers(values: Sequence[float]) -> str:
    """Return several numbers in a row."""
    return ", ".join(number(value) for value in values)


def percent(share: float) -> str:
    """Return a share as `8.0 %`, halves rounded up."""
    return f"{math.floor(1000 * share + 0.5) / 10:.1f} %"
