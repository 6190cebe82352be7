"""Renders a lesson and its charts as plain text."""

import textwrap
from collections.abc import Iterator

from attnlens_analysis.teach.content import Bars, Diagram, Grid, Lesson, Step, Table

# Shades for values below each limit.
_SHADES = {0.02: " ", 0.1: "·", 0.25: "░", 0.5: "▒", 0.75: "▓"}
_DARKEST = "█"
_EIGHTHS = " ▏▎▍▌▋▊▉"
_MAX_LABEL = 16


def as_text(lesson: Lesson, width: int) -> str:
    """Render a lesson for a terminal with `width` columns."""
    lines = [lesson.title, "=" * min(len(lesson.title), width)]
    for paragraph in lesson.introduction:
        lines += [*_wrap(paragraph, width), ""]
    for number, step in enumerate(lesson.steps, 1):
        lines += [*step_lines(number, step, width), ""]
    return "\n".join(lines)


def picture_lines(picture: Bars | Grid | Diagram, width: int) -> list[str]:
    """Render a chart or diagram and its title in lines of up to `width` characters, if the labels permit."""
    if isinstance(picture, Bars):
        return [picture.title, *_bars(picture, width)]
    return [picture.title, *(picture.lines if isinstance(picture, Diagram) else _grid(picture))]


def table_lines(table: Table) -> list[str]:
    """Render a table with aligned columns."""
    cells = [table.headings, *table.rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(table.headings))]
    return [
        "  ".join(
            cell.ljust(size) if column == 0 else cell.rjust(size)
            for column, (cell, size) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def step_lines(
    number: int, step: Step, width: int, *, with_picture: bool = True, with_explanation: bool = True
) -> Iterator[str]:
    """Yield the lines of a step, starting with its number and title."""
    yield f"{number}. {step.title}"
    yield f"   {step.formula}"
    yield ""
    if with_explanation:
        yield from (*_wrap(step.explanation, width), "")
    for paragraph in step.text:
        yield from _wrap(paragraph, width)
    if step.table is not None:
        yield from ("", *(f"  {line}" for line in table_lines(step.table)))
    if with_picture:
        yield from ("", *(f"  {line}" for line in picture_lines(step.picture, width - 2)))
    yield ""
    if step.caveat:
        yield from _wrap(f"Note: {step.caveat}", width)
    suggestion, *code = step.to_try
    yield from _wrap(f"Try: {suggestion}", width)
    yield from (f"  {line}" for line in code)


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def short(label: str) -> str:
    """Truncate a label to the maximum width."""
    return label if len(label) <= _MAX_LABEL else label[: _MAX_LABEL - 1] + "…"


def _bars(picture: Bars, width: int) -> Iterator[str]:
    labels = [short(label) for label in picture.labels]
    figures = picture.figures
    label_width, figure_width = max(map(len, labels)), max(map(len, figures))
    bar_width = max(8, min(40, width - label_width - figure_width - 4))
    maximum = max((abs(value) for value in picture.values), default=0.0) or 1.0
    for index, (label, value, figure) in enumerate(zip(labels, picture.values, figures, strict=True)):
        mark = " <" if index in picture.marked else ""
        bar = _bar(abs(value) / maximum * bar_width, negative=value < 0)
        yield f"{label.rjust(label_width)} {figure.rjust(figure_width)} {bar}{mark}".rstrip()


def _bar(eighths: float, *, negative: bool) -> str:
    if negative:
        return "-" * round(eighths)
    whole, remainder = divmod(round(eighths * 8), 8)
    return "█" * whole + (_EIGHTHS[remainder] if remainder else "")


def _grid(picture: Grid) -> Iterator[str]:
    labels = [short(label) for label in picture.rows]
    width = max(map(len, labels))
    for label, row in zip(labels, picture.values, strict=True):
        yield f"{label.rjust(width)} |{''.join(_shade(value) * 2 for value in row)}|"
    yield f"{len(picture.columns)} columns: {' '.join(short(label) for label in picture.columns)}"
    limits = ", ".join(
        f"{shade if shade.strip() else 'blank'} below {limit}" for limit, shade in _SHADES.items()
    )
    yield f"shades: {limits}, {_DARKEST} above"


def _shade(value: float) -> str:
    return next((shade for limit, shade in _SHADES.items() if value < limit), _DARKEST)
