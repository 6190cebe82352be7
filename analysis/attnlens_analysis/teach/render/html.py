"""Renders a lesson as a static, self-contained HTML page that is also well-formed XML."""

from collections.abc import Iterator
from html import escape

from attnlens_analysis import svg
from attnlens_analysis.page import as_page
from attnlens_analysis.teach.content import Bars, Diagram, Grid, Lesson, Step, Table


def as_html(lesson: Lesson) -> str:
    """Render a lesson as an HTML page."""
    body = [f"<p>{escape(paragraph)}</p>" for paragraph in lesson.introduction]
    for number, step in enumerate(lesson.steps, 1):
        body += [
            f"<section id='{step.key}'><h2>{number}. {escape(step.title)}</h2>",
            *_step(step),
            "</section>",
        ]
    return as_page(lesson.title, "\n".join(body))


def picture(chart: Bars | Grid | Diagram) -> str:
    """Render a chart or diagram as SVG."""
    if isinstance(chart, Diagram):
        return chart.svg
    if isinstance(chart, Bars):
        return svg.bars(chart.title, chart.labels, chart.values, chart.marked, chart.figures)
    return svg.grid(chart.title, chart.rows, chart.columns, chart.values)


def _table(content: Table) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in content.headings)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in content.rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _step(step: Step) -> Iterator[str]:
    yield f"<p>{escape(step.explanation)}</p>"
    yield f"<pre>{escape(step.formula)}</pre>"
    yield from (f"<p>{escape(paragraph)}</p>" for paragraph in step.text)
    if step.table is not None:
        yield _table(step.table)
    kind = type(step.picture).__name__.lower()
    yield f"<figure class='{kind}'>{picture(step.picture)}</figure>"
    if step.caveat:
        yield f"<p class='note'><b>Note:</b> {escape(step.caveat)}</p>"
    suggestion, *code = step.to_try
    yield f"<p class='try'><b>Try:</b> {escape(suggestion)}</p>"
    if code:
        yield f"<pre>{escape(chr(10).join(code))}</pre>"
