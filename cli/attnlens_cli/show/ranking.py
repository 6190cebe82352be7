"""Explained results of `attnlens rerank` in the terminal: documents with tinted words, sums by source."""

from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.style import Style
from rich.text import Text

from attnlens.explanations import LOW_FAITHFULNESS
from attnlens_cli.printable import printable
from attnlens_cli.show.attention_map import word_names
from attnlens_cli.show.explanation import SOURCES, faithfulness_text, sums_text
from attnlens_client import Explanation, RankedDocument

_NAMES = SOURCES | {"text": "query", "second_text": "document"}
_NUM_WORDS = 5
_COLORS = {1: (0, 114, 178), -1: (213, 94, 0)}  # of Okabe and Ito, as in `show.explanation`
_MAX_TINT, _MIN_TINT = 0.55, 0.08  # black text remains readable on the tint


def print_ranking(console: Console, query: str, ranked: Sequence[RankedDocument]) -> None:
    """Print each document with its score, its words tinted by their contribution, and the sums by source.

    Args:
        console: Console to print to.
        query: Query.
        ranked: Results with explanations per word.
    """
    explained = [(result, result.explanation) for result in ranked if result.explanation is not None]
    largest = max((_largest(explanation) for _, explanation in explained), default=0.0) or 1.0
    for rank, (result, explanation) in enumerate(explained, 1):
        part = f", part {result.part + 1} of {result.num_parts}" if result.num_parts > 1 else ""
        head = f"\n{rank}. score {result.score:.4f}, logit {result.logit:+.4f}, row {result.index}{part}"
        console.print(head, style=Style(bold=True), highlight=False)
        console.print(_tinted(result.document, explanation, largest))
        console.print(f"   {sums_text(explanation, _NAMES)}", highlight=False)
        for source, text in (("text", query), ("second_text", result.document)):
            words = _words(explanation, source, text)
            if words:
                console.print(f"   {_NAMES[source]}: {words}", highlight=False)
    if explained:
        console.print(_note(explained[0][1]), style=Style(dim=True), highlight=False)


def _note(explanation: Explanation) -> str:
    note = "contributions: exact sums, with the attention weights held constant."
    [scores] = explanation.scores
    is_low = scores.faithfulness is not None and scores.faithfulness < LOW_FAITHFULNESS
    measured = faithfulness_text(scores)
    measured = measured[0].upper() + measured[1:]
    return f"\nNote on {note} {measured}{' Caution: that is low.' if is_low else ''}"


def _rows(explanation: Explanation, source: str) -> list[int]:
    return [row for row, unit in enumerate(explanation.units) if unit[0].source == source]


def _largest(explanation: Explanation) -> float:
    values = explanation.values[_rows(explanation, "second_text")]
    return float(np.abs(values).max(initial=0.0))


def _tinted(document: str, explanation: Explanation, largest: float) -> Text:
    """Return the document with tinted words. Words that are not part of the input have no tint."""
    tinted, position = Text("   "), 0
    units, values = explanation.units, explanation.values
    for row in _rows(explanation, "second_text"):
        start = min(token.char_start for token in units[row])
        end = max(token.char_end for token in units[row])
        if start < position:  # an overlapping or empty span
            continue
        tinted.append(printable(document[position:start]))
        tinted.append(printable(document[start:end]), _tint(float(values[row]) / largest))
        position = end
    return tinted.append(printable(document[position:]))


def _tint(share: float) -> Style:
    opacity = _MAX_TINT * abs(share)
    if opacity < _MIN_TINT:
        return Style()
    red, green, blue = (round(255 - opacity * (255 - channel)) for channel in _COLORS[1 if share > 0 else -1])
    return Style(color="black", bgcolor=f"rgb({red},{green},{blue})")


def _words(explanation: Explanation, source: str, text: str) -> str:
    """Return the words of a source with the largest contributions."""
    rows, values = _rows(explanation, source), explanation.values
    names = word_names([explanation.units[row] for row in rows], {source: text})
    order = np.argsort(-np.abs(values[rows]), kind="stable")[:_NUM_WORDS]
    return ", ".join(f"{printable(names[place])} {values[rows[place]]:+.4f}" for place in order)
