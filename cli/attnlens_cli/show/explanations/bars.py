"""The scores of a text as a table with bars, what they add up to, and what they do not say."""

import math

import numpy as np
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from attnlens.explanations import rank_correlation
from attnlens_cli.show.printable import counted, printable
from attnlens_client import Explanation, Scores

VERIFIER = "leave_one_out"
BASELINE_LABEL = "(baseline)"

_BAR_WIDTH = 30
_MOST_ROWS, _TOP = 40, 20
_MARKS = {"prompt": " (prompt)", "second_text": " (second)"}
# Blue and vermilion of Okabe and Ito, which most colour-blind people can tell apart.
_POSITIVE, _NEGATIVE = Style(color="rgb(0,114,178)"), Style(color="rgb(213,94,0)")
_CAVEATS = {
    "contributions": "exact sums, with the attention weights held as they are. What leaving out a word does, "
    "leave_one_out measures (--verify).",
    "output_share": "about the last layer's vectors, each of which holds the whole text already.",
    "leave_one_out": "measures one token at a time. What two do together is not in it.",
    "rollout": "made of attention weights alone, it knows nothing of the target.",
    "received_attention": "made of attention weights alone, it knows nothing of the target.",
}


def make_console() -> Console:
    """Return a console that takes text as it is."""
    return Console(highlight=False, markup=False, emoji=False)


def labels_of(explanation: Explanation) -> list[str]:
    """Return how to call each token or word, those of a prompt and of the second text of a pair marked."""
    return [
        printable(label) + _MARKS.get(unit[0].source, "")
        for label, unit in zip(explanation.labels, explanation.units, strict=True)
    ]


def print_scores(console: Console, explanation: Explanation, *, top: int | None, verify: bool) -> None:
    """Print the scores of all methods, bars for the first one, in the order of the text.

    Args:
        console: where to.
        explanation: of a text.
        top: how many to print, the largest of the first method first. None: all, unless they are many.
        verify: the last method is leave-one-out, asked for to compare the others with it.
    """
    count = len(explanation.units)
    first = explanation.scores[0]
    if top is None and count > _MOST_ROWS:
        top = _TOP
    order = np.arange(count)
    if top is not None:
        order = np.argsort(-np.abs(np.nan_to_num(first.values)), kind="stable")[:top]
    console.print(_table(explanation, order))
    if len(order) < count:
        left = np.delete(first.values, order)
        rest = float(np.nansum(left, dtype=np.float64))
        what = "more word" if explanation.word_of_token else "more token"
        console.print(f"{counted(count - len(order), what)}: {rest:+.4f}")
    for scores in explanation.scores:
        console.print(sum_line(scores))
    if verify:
        for scores in explanation.scores[:-1]:
            console.print(_verdict(explanation, scores))
    for scores in explanation.scores:
        if scores.faithfulness is not None:
            measured = f"Spearman {scores.faithfulness:.2f} with leave-one-out, as attnlens check measured it"
            console.print(f"{scores.method}: {measured}.")


def print_caveat(console: Console, method: str) -> None:
    """Say in one line what scores of a method are not."""
    console.print(f"Note on {method}: {_CAVEATS[method]}", style=Style(dim=True), soft_wrap=True)


def _table(explanation: Explanation, order: "np.ndarray[tuple[int], np.dtype[np.intp]]") -> Table:
    table = Table(box=None, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    is_alone = len(explanation.scores) == 1
    table.show_header = not is_alone
    table.add_column("", no_wrap=True)
    for scores in explanation.scores:
        table.add_column(scores.method, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    first = explanation.scores[0]
    drawn = [float(value) for value in first.values] + [first.baseline or 0.0]
    largest = max((abs(value) for value in drawn if math.isfinite(value)), default=1.0) or 1.0
    labels = labels_of(explanation)
    for place in order:
        cells = [_number(float(scores.values[place])) for scores in explanation.scores]
        table.add_row(labels[place], *cells, _bar(drawn[place], largest))
    if first.baseline is not None and first.method == "contributions":
        cells = [_number(scores.baseline) for scores in explanation.scores]
        table.add_row(BASELINE_LABEL, *cells, _bar(first.baseline, largest))
    return table


def _number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:+.4f}"


def _bar(value: float, largest: float) -> Text:
    """Return a bar: full blocks above 0, hatched ones below."""
    if not math.isfinite(value):
        return Text("")
    length = round(_BAR_WIDTH * abs(value) / largest)
    return Text("█" * length, _POSITIVE) if value >= 0 else Text("▒" * length, _NEGATIVE)


def sum_line(scores: Scores) -> str:
    """Say what the scores of a method add up to."""
    if scores.baseline is None and scores.expected is None:
        return f"{scores.method}: sum {scores.sum:.4f}; these need not add up to anything."
    parts = f"{scores.method}: sum {scores.sum:.6f}"
    if scores.expected is None:
        return f"{parts}."
    if scores.baseline is None:
        return f"{parts}, as it must be; the target is not in it."
    error = abs(scores.sum - scores.expected)
    return f"{parts}, the target is {scores.expected:.6f} (off by {error:.1e})."


def verified(explanation: Explanation, scores: Scores) -> float:
    """Return Spearman's rank correlation of scores with leave-one-out, which must be there, too."""
    return rank_correlation(scores.values, explanation.by(VERIFIER).values)


def _verdict(explanation: Explanation, scores: Scores) -> str:
    found, effects = verified(explanation, scores), explanation.by(VERIFIER).values
    count = int(np.isfinite(effects).sum())
    unit = "word" if explanation.word_of_token else "token"
    if math.isnan(found):
        return f"Not verified: {counted(count, unit)} of this text can be left out, too few to rank."
    what = f"{scores.method} ranks {counted(count, unit)} like leave-one-out, Spearman {found:.2f}"
    return f"Verified on this text: {what}."
