"""A lesson as Markdown; its pictures are blocks of characters, which every reader of Markdown shows."""

import re
from collections.abc import Iterator

from attnlens_analysis.teach.content import Lesson, Step, Table
from attnlens_analysis.teach.render.text import picture_lines

# Markdown's own characters, and those of HTML, which Markdown passes on.
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#+!|~$&])")
_WIDTH = 90


def as_markdown(lesson: Lesson) -> str:
    """Return the lesson as a page of GitHub's Markdown."""
    lines = [f"# {_escaped(lesson.title)}", ""]
    for paragraph in lesson.introduction:
        lines += [_escaped(paragraph), ""]
    for place, step in enumerate(lesson.steps, 1):
        lines += [f"## {place}. {_escaped(step.title)}", "", *_step(step)]
    return "\n".join(lines).rstrip() + "\n"


def _step(step: Step) -> Iterator[str]:
    """Yield a step without its title, each block followed by an empty line."""
    yield from _code([step.formula])
    for paragraph in step.text:
        yield from (_escaped(paragraph), "")
    if step.table is not None:
        yield from (*_table(step.table), "")
    yield from _code(picture_lines(step.picture, _WIDTH))
    if step.caveat:
        yield from (f"**Mind:** {_escaped(step.caveat)}", "")
    what, *code = step.to_try
    yield from (f"**Try:** {_escaped(what)}", "")
    if code:
        yield from _code(code)


def _table(table: Table) -> Iterator[str]:
    """Yield a table."""
    yield f"| {' | '.join(_escaped(heading) for heading in table.headings)} |"
    yield f"|{'---|' + '---:|' * (len(table.headings) - 1)}"
    for row in table.rows:
        yield f"| {' | '.join(_escaped(cell) for cell in row)} |"


def _escaped(text: str) -> str:
    """Return text that Markdown shows as it is, in one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))


def _code(lines: list[str]) -> Iterator[str]:
    """Yield a block of code, its fence longer than any in it."""
    longest = max((len(run) for line in lines for run in re.findall(r"`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    yield from (fence, *lines, fence, "")
