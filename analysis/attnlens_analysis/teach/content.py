"""Content of a lesson. All texts are plain text, which renderers escape for their format."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Bars:
    """A bar chart.

    Attributes:
        title: Title, including the unit.
        labels: Labels of the bars.
        values: Values of the bars. Negative bars have a different color.
        marked: Indices of highlighted bars.
        decimals: Decimal places of the figures. If None, `number` formats them.
    """

    title: str
    labels: Sequence[str]
    values: Sequence[float]
    marked: Sequence[int] = ()
    decimals: int | None = None

    @property
    def figures(self) -> list[str]:
        """The formatted values."""
        if self.decimals is None:
            return [number(value) for value in self.values]
        return [f"{value:,.{self.decimals}f}" for value in self.values]


@dataclass(frozen=True, slots=True)
class Grid:
    """A heat map of values between 0 and 1.

    Attributes:
        title: Title.
        rows: Row labels.
        columns: Column labels.
        values: Values by row.
    """

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Diagram:
    """A drawing of a computation.

    Attributes:
        title: Title.
        lines: The drawing as text.
        svg: The drawing as SVG.
    """

    title: str
    lines: Sequence[str]
    svg: str


@dataclass(frozen=True, slots=True)
class Table:
    """A table.

    Attributes:
        headings: Column headings. The first column is text, all others are numeric.
        rows: Cells by row.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a lesson.

    Attributes:
        key: Stable identifier, such as "softmax".
        title: Short title.
        explanation: Paragraph on the general idea, shown before the numbers.
        formula: One-line formula.
        text: Paragraphs with the numbers of the token.
        picture: Chart of the values, or diagram.
        to_try: Suggested experiment. The first item is text, the others are lines of code.
        caveat: Common misinterpretation, if any.
        table: Additional numbers, if any.
    """

    key: str
    title: str
    explanation: str
    formula: str
    text: Sequence[str]
    picture: Bars | Grid | Diagram
    to_try: Sequence[str]
    caveat: str = ""
    table: Table | None = None


@dataclass(frozen=True, slots=True)
class Lesson:
    """A lesson on one token in one head.

    Attributes:
        title: Page title.
        introduction: Introductory paragraphs.
        steps: Steps in order.
    """

    title: str
    introduction: Sequence[str]
    steps: Sequence[Step] = field(default_factory=tuple)


def number(value: float) -> str:
    """Format a number with four decimals, or in scientific notation if it is smaller than 0.001."""
    small = value != 0 and abs(value) < 0.001  # noqa: PLR2004 - four decimals would show one digit
    return f"{value:.2e}" if small else f"{value:.4f}"


def numbers(values: Sequence[float]) -> str:
    """Format numbers as a comma-separated list."""
    return ", ".join(number(value) for value in values)


def percent(share: float) -> str:
    """Format a share as a percentage such as `8.0 %`, rounding half up."""
    return f"{math.floor(1000 * share + 0.5) / 10:.1f} %"
