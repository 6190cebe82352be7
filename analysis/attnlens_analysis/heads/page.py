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
    yield _list([*data_sentences(report), *report.notes])
    yield "<h2>Labels</h2>"
    yield _table(LABEL_TITLES, label_rows(report))
    yield _list(CAVEATS)
    yield "<h2>Layers and heads</h2>"
    yield (
        "<p>Rows are layers and columns are heads, both counted from 0: L2H8 is layer 2, head 8. The tables "
        "below list the numbers.</p>"
    )
    yield '<div class="grids">'
    yield from (_grid(report, column) for column in columns)
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


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    kinds = [' class="words"' if title in _TEXT_COLUMNS else "" for title in titles]
    head = "".join(
        f'<th scope="col"{kind}><button>{escape(title)}</button></th>'
        for title, kind in zip(titles, kinds, strict=True)
    )
    body = "".join(
        f"<tr>{''.join(f'<td{kind}>{escape(cell)}</td>' for cell, kind in zip(row, kinds, strict=True))}</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _grid(report: HeadReport, column: Measure) -> str:
    """Render a measure as an SVG grid with one square per head, shaded by magnitude."""
    layers = sorted({head.layer for head in report.heads})
    maximum = float(np.nanmax(np.abs(column.values), initial=0.0)) or 1.0
    squares = []
    for head, value in zip(report.heads, column.values, strict=True):
        if np.isnan(value):
            continue
        color = "--high" if value >= 0 else "--negative"
        x, y = _MARGIN + head.head * _CELL, _MARGIN + layers.index(head.layer) * _CELL
        squares.append(
            f'<rect x="{x}" y="{y}" width="{_CELL - 1}" height="{_CELL - 1}" style="fill:color-mix(in oklab, '
            f'var({color}) {100 * abs(value) / maximum:.0f}%, var(--low))"><title>{head}: '
            f"{value:.{column.digits}f}</title></rect>"
        )
    num_heads = max(head.head for head in report.heads) + 1
    axis_labels = [
        *(f'<text x="{_MARGIN + n * _CELL + 2}" y="{_MARGIN - 4}">{n}</text>' for n in range(num_heads)),
        *(f'<text x="2" y="{_MARGIN + n * _CELL + 11}">{layer}</text>' for n, layer in enumerate(layers)),
    ]
    width, height = _MARGIN + num_heads * _CELL, _MARGIN + len(layers) * _CELL
    baseline = "" if column.baseline is None else f"; uniform: {column.baseline:.3f}"
    highest = report.heads[int(np.nanargmax(np.abs(column.values)))]
    return (
        f"<figure><figcaption>{escape(column.title)}<small>{escape(column.meaning)}; largest {highest}: "
        f"{column.values[report.heads.index(highest)]:.{column.digits}f}{baseline}</small></figcaption>"
        f'<svg width="{width}" height="{height}" role="img" aria-label="{escape(column.title)} by layer and '
        f'head">{"".join(axis_labels + squares)}</svg></figure>'
    )
