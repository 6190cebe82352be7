"""A lesson, and its pictures, in characters."""

import textwrap
from collections.abc import Iterator

from attnlens_analysis.teach.content import Bars, Grid, Lesson, Step, Table

# The shade of a number below each limit.
_SHADES = {0.02: " ", 0.1: "·", 0.25: "░", 0.5: "▒", 0.75: "▓"}
_DARKEST = "█"
_EIGHTHS = " ▏▎▍▌▋▊▉"
_MAX_LABEL = 16


def as_text(lesson: Lesson, width: int) -> str:
    """Return the lesson for a terminal of `width` columns."""
    lines = [lesson.title, "=" * min(len(lesson.title), width)]
    for paragraph in lesson.introduction:
        lines += [*_wrapped(paragraph, width), ""]
    for place, step in enumerate(lesson.steps, 1):
        lines += [*step_lines(place, step, width), ""]
    return "\n".join(lines)


def picture_lines(picture: Bars | Grid, width: int) -> list[str]:
    """Return a picture, its title first, in lines of at most `width` characters where labels allow."""
    if isinstance(picture, Bars):
        return [picture.title, *_bars(picture, width)]
    return [picture.title, *_grid(picture)]


def table_lines(table: Table) -> list[str]:
    """Return a table with aligned columns."""
    cells = [table.headings, *table.rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(table.headings))]
    return [
        "  ".join(
            cell.ljust(size) if column == 0 else cell.rjust(size)
            for column, (cell, size) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def step_lines(place: int, step: Step, width: int, *, with_picture: bool = True) -> Iterator[str]:
    """Yield a step, its number and title first."""
    yield f"{place}. {step.title}"
    yield f"   {step.formula}"
    yield ""
    for paragraph in step.text:
        yield from _wrapped(paragraph, width)
    if step.table is not None:
        yield from ("", *(f"  {line}" for line in table_lines(step.table)))
    if with_picture:
        yield from ("", *(f"  {line}" for line in picture_lines(step.picture, width - 2)))
    yield ""
    if step.caveat:
        yield from _wrapped(f"Mind: {step.caveat}", width)
    what, *code = step.to_try
    yield from _wrapped(f"Try: {what}", width)
    yield from (f"  {line}" for line in code)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def short(label: str) -> str:
    """Return a label cut to what fits before a bar."""
    return label if len(label) <= _MAX_LABEL else label[: _MAX_LABEL - 1] + "…"


def _bars(picture: Bars, width: int) -> Iterator[str]:
    labels = [short(label) for label in picture.labels]
    figures = picture.figures
    label_width, figure_width = max(map(len, labels)), max(map(len, figures))
    room = max(8, min(40, width - label_width - figure_width - 4))
    top = max((abs(value) for value in picture.values), default=0.0) or 1.0
    for place, (label, value, figure) in enumerate(zip(labels, picture.values, figures, strict=True)):
        mark = " <" if place in picture.marked else ""
        bar = _bar(abs(value) / top * room, negative=value < 0)
        yield f"{label.rjust(label_width)} {figure.rjust(figure_width)} {bar}{mark}".rstrip()


def _bar(eighths: float, *, negative: bool) -> str:
    if negative:
        return "-" * round(eighths)
    whole, rest = divmod(round(eighths * 8), 8)
    return "█" * whole + (_EIGHTHS[rest] if rest else "")


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
