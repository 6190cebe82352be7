"""Prints an explanation: a table of scores with bars, their sum, and the caveats of each method."""

import math
from collections.abc import Mapping

import numpy as np
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from attnlens.explanations import LOW_FAITHFULNESS, rank_correlation
from attnlens_cli.show.attention.map import word_names
from attnlens_cli.show.printable import counted, printable
from attnlens_client import Explanation, TokenScores

VERIFIER = "leave_one_out"
BASELINE_LABEL = "(baseline)"

_BAR_WIDTH = 30
_MOST_ROWS, _TOP = 40, 20
_MARKS = {"prompt": " (prompt)", "second_text": " (second)"}
# Blue and vermilion of Okabe and Ito, which most colour-blind people can tell apart.
_POSITIVE, _NEGATIVE = Style(color="rgb(0,114,178)"), Style(color="rgb(213,94,0)")
_RANKING_ONLY = ("rollout", "received_attention", "contribution_norm")
_CAVEATS = {
    "contributions": "exact sums, with the attention weights held constant.",
    "output_share": "about the last layer's vectors, each of which depends on the whole text.",
    "leave_one_out": "measures one token at a time. The joint effect of two is not in it.",
    "rollout": "computed from attention weights alone, independent of the target.",
    "received_attention": "computed from attention weights alone, independent of the target.",
    "contribution_norm": "how much of the vector a token contributes, independent of the target.",
}


def labels_of(explanation: Explanation, texts: Mapping[str, str]) -> list[str]:
    """Return the label of each token or word, marked if it is from a prompt or the second text of a pair.

    Args:
        explanation: Of a text.
        texts: The text of each `Token.source`. Words are spelled as in the text if it is given here.
    """
    spelled = word_names(explanation.units, texts) if explanation.unit_ids else explanation.labels
    return [
        printable(label) + _MARKS.get(unit[0].source, "")
        for label, unit in zip(spelled, explanation.units, strict=True)
    ]


def print_scores(
    console: Console, explanation: Explanation, *, texts: Mapping[str, str], top: int | None, verify: bool
) -> None:
    """Print the scores of all methods in the order of the text, with bars for the first method.

    Args:
        console: Where to print.
        explanation: Of a text.
        texts: See `labels_of`.
        top: Number of scores to print, the largest of the first method first. If None, all unless there are
            many.
        verify: Whether to compare the other methods with the last one, which is leave-one-out.
    """
    count = len(explanation.units)
    first = explanation.scores[0]
    if top is None and count > _MOST_ROWS:
        top = _TOP
    order = np.arange(count)
    if top is not None:
        order = np.argsort(-np.abs(np.nan_to_num(first.values)), kind="stable")[:top]
    console.print(_table(explanation, labels_of(explanation, texts), order))
    if len(order) < count:
        left = np.delete(first.values, order)
        rest = float(np.nansum(left, dtype=np.float64))
        what = "more word" if explanation.unit_ids else "more token"
        console.print(f"{counted(count - len(order), what)}: {rest:+.4f}")
    for scores in explanation.scores:
        console.print(sum_line(scores))
        if scores.baseline:
            console.print(_baseline_line(scores.baseline, explanation.target_value))
    for scores in explanation.scores:
        if scores.faithfulness is not None and scores.method != VERIFIER:
            console.print(
                f"{scores.method}: Spearman {scores.faithfulness:.2f} with leave-one-out, measured for this "
                f"model.{_caution(scores.faithfulness, 'its ranking of tokens is a weak guide.')}"
            )
    if verify:
        for scores in explanation.scores[:-1]:
            console.print(_comparison_line(explanation, scores))


def print_caveat(console: Console, method: str, hint: str = "") -> None:
    """Print what scores of a method do not say.

    Args:
        console: Where to print.
        method: Its name.
        hint: How to measure the effect of leaving out words, printed for contributions.
    """
    caveat = f"{_CAVEATS[method]} {hint if method == 'contributions' else ''}".rstrip()
    console.print(f"Note on {method}: {caveat}", style=Style(dim=True))


def _table(
    explanation: Explanation, labels: list[str], order: "np.ndarray[tuple[int], np.dtype[np.intp]]"
) -> Table:
    table = Table(box=None, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    is_alone = len(explanation.scores) == 1
    table.show_header = not is_alone
    table.add_column("", no_wrap=True)
    for scores in explanation.scores:
        table.add_column(scores.method, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    first = explanation.scores[0]
    drawn = [float(value) for value in first.values]
    largest = max((abs(value) for value in drawn if math.isfinite(value)), default=1.0) or 1.0
    for place in order:
        cells = [_number(float(scores.values[place])) for scores in explanation.scores]
        table.add_row(labels[place], *cells, _bar(drawn[place], largest))
    if first.baseline is not None and first.method == "contributions":
        table.add_row(BASELINE_LABEL, *[_number(scores.baseline) for scores in explanation.scores])
    return table


def _number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:+.4f}"


def _bar(value: float, largest: float) -> Text:
    """Return a bar: full blocks above 0, hatched ones below."""
    if not math.isfinite(value):
        return Text("")
    length = round(_BAR_WIDTH * abs(value) / largest)
    return Text("█" * length, _POSITIVE) if value >= 0 else Text("▒" * length, _NEGATIVE)


def sum_line(scores: TokenScores) -> str:
    """Return a line about the sum of a method's scores."""
    if scores.method in _RANKING_ONLY:
        return f"{scores.method}: ranking only; the scores do not add up to the target."
    if scores.baseline is None or scores.expected_sum is None:
        return f"{scores.method}: sum {scores.sum:.4f}; these need not add up to anything."
    target = scores.expected_sum
    error = abs(scores.sum - target)
    return f"{scores.method}: sum {scores.sum:.6f}, the target is {target:.6f} (off by {error:.1e})."


def _baseline_line(baseline: float, target: float) -> str:
    """Return the baseline's share of the target in words, or both numbers if the target is close to 0."""
    belongs = "The baseline, which belongs to no token, is"
    if abs(baseline) > 10 * abs(target):
        return f"{belongs} {baseline:+.4f}, the target {target:+.4f}."
    return f"{belongs} {100 * baseline / target:.0f} % of the target."


def verified(explanation: Explanation, scores: TokenScores) -> float:
    """Return Spearman's rank correlation of scores with leave-one-out, which must be there, too."""
    return rank_correlation(scores.values, explanation.by(VERIFIER).values)


def _comparison_line(explanation: Explanation, scores: TokenScores) -> str:
    """Return the rank correlation of a method with leave-one-out on this text."""
    found, effects = verified(explanation, scores), explanation.by(VERIFIER).values
    units = counted(int(np.isfinite(effects).sum()), "word" if explanation.unit_ids else "token")
    if math.isnan(found):
        return f"{scores.method}: no rank correlation, because {units} of this text can be left out."
    return (
        f"{scores.method}: Spearman {found:.2f} with leave-one-out over {units} of this text."
        f"{_caution(found, 'trust leave_one_out instead.')}"
    )


def _caution(correlation: float, consequence: str) -> str:
    if correlation >= LOW_FAITHFULNESS:
        return ""
    return f" Caution: that is {'negative' if correlation < 0 else 'low'}, {consequence}"
