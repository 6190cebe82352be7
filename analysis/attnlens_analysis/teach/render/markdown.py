"""Renders a lesson as Markdown, with charts as text in code blocks."""

import re
from collections.abc import Iterator

from attnlens_analysis.teach.content import Lesson, Step, Table
from attnlens_analysis.teach.render.text import picture_lines

# Special characters of Markdown and of HTML, which Markdown passes through.
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#+!|~$&])")
_WIDTH = 90


def as_markdown(lesson: Lesson) -> str:
    """Render a lesson as GitHub-flavored Markdown."""
    lines = [f"# {_escape(lesson.title)}", ""]
    for paragraph in lesson.introduction:
        lines += [_escape(paragraph), ""]
    for number, step in enumerate(lesson.steps, 1):
        lines += [f"## {number}. {_escape(step.title)}", "", *_step(step)]
    return "\n".join(lines).rstrip() + "\n"


def _step(step: Step) -> Iterator[str]:
    """Yield the lines of a step without its title. Each block is followed by an empty line."""
    yield from (_escape(step.explanation), "")
    yield from _code([step.formula])
    for paragraph in step.text:
        yield from (_escape(paragraph), "")
    if step.table is not None:
        yield from (*_table(step.table), "")
    yield from _code(picture_lines(step.picture, _WIDTH))
    if step.caveat:
        yield from (f"**Note:** {_escape(step.caveat)}", "")
    suggestion, *code = step.to_try
    yield from (f"**Try:** {_escape(suggestion)}", "")
    if code:
        yield from _code(code)


def _table(table: Table) -> Iterator[str]:
    yield f"| {' | '.join(_escape(heading) for heading in table.headings)} |"
    yield f"|{'---|' + '---:|' * (len(table.headings) - 1)}"
    for row in table.rows:
        yield f"| {' | '.join(_escape(cell) for cell in row)} |"


def _escape(text: str) -> str:
    """Escape text for Markdown and join it to one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))


def _code(lines: list[str]) -> Iterator[str]:
    """Yield a code block with a fence longer than any in its content."""
    longest = max((len(run) for line in lines for run in re.findall(r"`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    yield from (fence, *lines, fence, "")
