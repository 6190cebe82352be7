"""Renders a report as a self-contained HTML page with sortable tables."""

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import numpy as np

from attnlens_analysis.heads.labels import CAVEATS, MIN_WORDS
from attnlens_analysis.heads.markdown import (
    LABEL_TITLES,
    RELATION_TITLES,
    data_sentences,
    label_rows,
    relation_cells,
)
from attnlens_analysis.heads.measures import Measure, measures
from attnlens_analysis.heads.report import HeadReport
from attnlens_analysis.heads.tables import TEXT_HEADINGS, interval_tables

_TEMPLATE = Path(__file__).with_name("page.html")
_CELL, _MARGIN = 16, 18  # pixels
_OWN_SCALE = frozenset({"ablation", "contribution", "task_change"})
"""Measures without a common scale that have a map."""
_UNBROKEN = frozenset({"label", "labels", "heads"})
_TEXT_COLUMNS = {
    *LABEL_TITLES,
    "head",
    "labels",
    "relation",
    "direction",
    *TEXT_HEADINGS,
}  # all other columns are numeric


def as_page(report: HeadReport) -> str:
    """Render the report as an HTML page."""
    title = escape(f"Attention heads of {report.model_name}")
    template = _TEMPLATE.read_text("utf-8")
    return template.replace("@TITLE@", title).replace("@BODY@", "\n".join(_body(report, title)))


def _body(report: HeadReport, title: str) -> Iterator[str]:
    columns = measures(report)
    yield f"<h1>{title}</h1>"
    yield (
        f"<p>{len(report.labeled)} of {len(report.heads)} heads have a label, measured on "
        f"{report.num_sentences:,} sentences. L2H8 is layer 2, head 8; both are counted from 0.</p>"
    )
    yield "<h2>Labels</h2>"
    yield _table(LABEL_TITLES, label_rows(report))
    yield "<h2>Layers and heads</h2>"
    yield (
        "<p>Rows are layers and columns are heads. Colors show the difference from uniform attention, on the "
        'same scale in all maps: <span class="scale"><span>-1</span><i></i><span>1</span></span> A map '
        "with another scale says so. The tables below list the numbers.</p>"
    )
    yield '<div class="grids">'
    yield from (_grid(report, column) for column in columns if column.is_share or column.name in _OWN_SCALE)
    yield "</div>"
    if report.syntax is not None:
        yield f"<h2>Syntax</h2><p>Relations with at least {MIN_WORDS} words.</p>"
        shown = [relation_cells(score) for score in report.syntax if score.num_scored >= MIN_WORDS]
        yield _table(RELATION_TITLES, shown)
    for table in interval_tables(report):
        yield f"<h2>{escape(table.title)}</h2><p>{escape(table.explanation)}</p>"
        yield _table(table.headings, table.rows)
    yield "<h2>Measures</h2>"
    yield _table(
        ("head", "labels", *(column.title for column in columns)),
        [
            (
                str(head),
                ", ".join(report.labels_of(head)),
                *(f"{column.values[index]:.{column.digits}f}" for column in columns),
            )
            for index, head in enumerate(report.heads)
        ],
    )
    yield from _explanations(report)


def _explanations(report: HeadReport) -> Iterator[str]:
    yield "<h2>What a label does not mean</h2>"
    yield _list(CAVEATS)
    yield "<h2>How it was measured</h2>"
    yield _list([*data_sentences(report), *report.notes])


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    kinds = [' class="words"' if title in _TEXT_COLUMNS else "" for title in titles]
    head = "".join(
        f'<th scope="col"{kind}><button>{escape(title)}</button></th>'
        for title, kind in zip(titles, kinds, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{kind}>{_cell(title, content)}</td>"
            for title, content, kind in zip(titles, row, kinds, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(title: str, content: str) -> str:
    """Return the HTML of a cell. Lines break between labels and heads, not within them."""
    if title not in _UNBROKEN:
        return escape(content)
    return ", ".join(f"<span>{escape(part)}</span>" for part in content.split(", "))


def _grid(report: HeadReport, column: Measure) -> str:
    """Render a measure as an SVG grid with one square per head, shaded by the difference from chance."""
    layers = sorted({head.layer for head in report.heads})
    chance = column.baseline or 0.0
    maximum = 1.0 if column.is_share else float(np.nanmax(np.abs(column.values), initial=0.0)) or 1.0
    squares = []
    for head, value in zip(report.heads, column.values, strict=True):
        if np.isnan(value):
            continue
        color = "--high" if value >= chance else "--negative"
        x, y = _MARGIN + head.head * _CELL, _MARGIN + layers.index(head.layer) * _CELL
        squares.append(
            f'<rect x="{x}" y="{y}" width="{_CELL - 1}" height="{_CELL - 1}" style="fill:color-mix(in oklab, '
            f'var({color}) {100 * abs(value - chance) / maximum:.0f}%, var(--low))"><title>{head}: '
            f"{value:.{column.digits}f}</title></rect>"
        )
    num_heads = max(head.head for head in report.heads) + 1
    axis_labels = [
        *(f'<text x="{_MARGIN + n * _CELL + 2}" y="{_MARGIN - 4}">{n}</text>' for n in range(num_heads)),
        *(f'<text x="2" y="{_MARGIN + n * _CELL + 11}">{layer}</text>' for n, layer in enumerate(layers)),
    ]
    width, height = _MARGIN + num_heads * _CELL, _MARGIN + len(layers) * _CELL
    baseline = "" if column.baseline is None else f"; uniform: {column.baseline:.3f}"
    baseline += "" if column.is_share else f"; darkest: {maximum:.{column.digits}f}"
    highest = report.heads[int(np.nanargmax(np.abs(column.values)))]
    return (
        f"<figure><figcaption>{escape(column.title)}<small>{escape(column.meaning)}; largest {highest}: "
        f"{column.values[report.heads.index(highest)]:.{column.digits}f}{baseline}</small></figcaption>"
        f'<svg width="{width}" height="{height}" role="img" aria-label="{escape(column.title)} by layer and '
        f'head">{"".join(axis_labels + squares)}</svg></figure>'
    )
