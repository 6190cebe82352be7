"""A lesson as one HTML file: no script, nothing loaded from elsewhere, and well-formed as XML."""

from collections.abc import Iterator
from html import escape

from attnlens_analysis import svg
from attnlens_analysis.page import as_page
from attnlens_analysis.teach.content import Bars, Grid, Lesson, Step, Table


def as_html(lesson: Lesson) -> str:
    """Return the page."""
    body = [f"<p>{escape(paragraph)}</p>" for paragraph in lesson.introduction]
    for place, step in enumerate(lesson.steps, 1):
        body += [f"<section><h2>{place}. {escape(step.title)}</h2>", *_step(step), "</section>"]
    return as_page(lesson.title, "\n".join(body))


def picture(drawn: Bars | Grid) -> str:
    """Return a picture as SVG."""
    if isinstance(drawn, Bars):
        return svg.bars(drawn.title, drawn.labels, drawn.values, drawn.marked, drawn.figures)
    return svg.grid(drawn.title, drawn.rows, drawn.columns, drawn.values)


def _table(content: Table) -> str:
    """Return a table."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in content.headings)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in content.rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _step(step: Step) -> Iterator[str]:
    yield f"<pre>{escape(step.formula)}</pre>"
    yield from (f"<p>{escape(paragraph)}</p>" for paragraph in step.text)
    if step.table is not None:
        yield _table(step.table)
    kind = "bars" if isinstance(step.picture, Bars) else "grid"
    yield f"<figure class='{kind}'>{picture(step.picture)}</figure>"
    if step.caveat:
        yield f"<p class='mind'><b>Mind:</b> {escape(step.caveat)}</p>"
    what, *code = step.to_try
    yield f"<p class='try'><b>Try:</b> {escape(what)}</p>"
    if code:
        yield f"<pre>{escape(chr(10).join(code))}</pre>"
