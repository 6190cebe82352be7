"""Explanations and comparisons in the terminal: scores with bars, sums, caveats and pair matrices."""

import math
from collections.abc import Mapping

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from attnlens.explanations import LOW_FAITHFULNESS
from attnlens_cli.printable import counted, printable
from attnlens_cli.show.as_json import VERIFIER, verify_scores
from attnlens_cli.show.attention_map import SOURCE_MARKS, word_names
from attnlens_client import Comparison, Explanation, TokenScores
from attnlens_client.results import Array

_BASELINE_LABEL = "(baseline)"
_BAR_WIDTH = 30
_MAX_ROWS, _NUM_LARGEST = 40, 20  # of more than _MAX_ROWS scores, only the largest are shown
# Blue and vermilion of Okabe and Ito, which most color-blind people can distinguish.
_POSITIVE, _NEGATIVE = Style(color="rgb(0,114,178)"), Style(color="rgb(213,94,0)")
_RANKING_ONLY = ("rollout", "received_attention", "contribution_norm")
_CAVEATS = {
    "contributions": "exact sums, with the attention weights held constant.",
    "output_share": "based on the last layer's token vectors, each of which depends on the whole text.",
    "leave_one_out": "measures one token at a time, not the joint effect of several tokens.",
    "rollout": "computed from attention weights alone, independent of the target.",
    "received_attention": "computed from attention weights alone, independent of the target.",
    "contribution_norm": "a token's share of the embedding, independent of the target.",
}
SOURCES = {
    "text": "text",
    "second_text": "second text",
    "prompt": "prompt",
    "special": "special tokens",
    "ids": "token ids",
    "baseline": "baseline",
}
_WEAK = "its ranking of tokens is a weak guide."
_MIN_CELL_WIDTH, _GAP = 6, 2
_NUM_PAIRS = 10
_MEANINGS = {
    "output": "Similarities of the last layer's token vectors, which add up to {similarity:.4f}.",
    "interaction": "Drop in similarity without both tokens, minus the drops without each of them.",
    "input": "Joint contributions of input tokens, which add up to {similarity:.4f} with the baselines.",
}


def _labels(explanation: Explanation, texts: Mapping[str, str]) -> list[str]:
    """Return the labels of tokens or words, marked if they belong to a prompt or a second text.

    Args:
        explanation: Explanation of a text.
        texts: Texts by `Token.source`, for the spelling of words.
    """
    spelled = word_names(explanation.units, texts) if explanation.unit_ids else explanation.labels
    return [
        printable(label) + SOURCE_MARKS.get(unit[0].source, "")
        for label, unit in zip(spelled, explanation.units, strict=True)
    ]


def print_scores(
    console: Console, explanation: Explanation, *, texts: Mapping[str, str], top: int | None, verify: bool
) -> None:
    """Print the scores of all methods in the order of the text, with bars for the first method.

    Args:
        console: Console to print to.
        explanation: Explanation of a text.
        texts: Texts by `Token.source`.
        top: Number of scores to print, the largest of the first method first. If None, all, or the largest of
            more than 40 scores.
        verify: Whether to compare the other methods with the last one, leave-one-out.
    """
    count = len(explanation.units)
    first = explanation.scores[0]
    if top is None and count > _MAX_ROWS:
        top = _NUM_LARGEST
    order = np.arange(count)
    if top is not None:
        order = np.argsort(-np.abs(np.nan_to_num(first.values)), kind="stable")[:top]
    console.print(_table(explanation, _labels(explanation, texts), order))
    if len(order) < count:
        rest = float(np.nansum(np.delete(first.values, order), dtype=np.float64))
        unit = "more word" if explanation.unit_ids else "more token"
        console.print(f"{counted(count - len(order), unit)}: {rest:+.4f}")
    _print_sums_of_scores(console, explanation)
    for scores in explanation.scores:
        if scores.method != VERIFIER:
            caution = "" if scores.faithfulness is None else _caution(scores.faithfulness, _WEAK)
            console.print(f"{scores.method}: {faithfulness_text(scores)}{caution}")
    if verify:
        for scores in explanation.scores[:-1]:
            console.print(_comparison_line(explanation, scores))


def faithfulness_text(scores: TokenScores) -> str:
    """Return the measured agreement of a method with leave-one-out."""
    if scores.faithfulness is None:
        return "agreement with leave-one-out not measured for this question."
    return f"Spearman {scores.faithfulness:.2f} with leave-one-out, measured for this model."


def _print_sums_of_scores(console: Console, explanation: Explanation) -> None:
    for scores in explanation.scores:
        console.print(_sum_line(scores))
        if scores.baseline:
            console.print(_baseline_line(scores.baseline, explanation.target_value))
    if explanation.sums_by_source is not None:
        console.print(f"By source: {sums_text(explanation)}.", highlight=False)


def sums_text(explanation: Explanation, names: Mapping[str, str] = SOURCES) -> str:
    """Return the sums of the contributions by source, such as "text +0.1, special tokens +0.2"."""
    sources = {token.source for token in explanation.tokens} | {"baseline"}
    sums = explanation.sums_by_source or {}
    return ", ".join(f"{names[name]} {value:+.4f}" for name, value in sums.items() if name in sources)


def print_caveat(console: Console, method: str, hint: str = "") -> None:
    """Print the limits of a method.

    Args:
        console: Console to print to.
        method: Name of the method.
        hint: How to measure the effect of leaving out words. Printed for contributions only.
    """
    caveat = f"{_CAVEATS[method]} {hint if method == 'contributions' else ''}".rstrip()
    console.print(f"Note on {method}: {caveat}", style=Style(dim=True))


def _table(
    explanation: Explanation, labels: list[str], order: "np.ndarray[tuple[int], np.dtype[np.intp]]"
) -> Table:
    table = Table(box=None, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.show_header = len(explanation.scores) > 1
    table.add_column("", no_wrap=True)
    for scores in explanation.scores:
        table.add_column(scores.method, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    first = explanation.scores[0]
    values = [float(value) for value in first.values]
    largest = max((abs(value) for value in values if math.isfinite(value)), default=1.0) or 1.0
    for index in order:
        cells = [_number(float(scores.values[index])) for scores in explanation.scores]
        table.add_row(labels[index], *cells, _bar(values[index], largest))
    if first.baseline is not None and first.method == "contributions":
        table.add_row(_BASELINE_LABEL, *[_number(scores.baseline) for scores in explanation.scores])
    return table


def _number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:+.4f}"


def _bar(value: float, largest: float) -> Text:
    """Return a bar of full blocks for a positive value, of hatched blocks for a negative one."""
    if not math.isfinite(value):
        return Text("")
    length = round(_BAR_WIDTH * abs(value) / largest)
    return Text("█" * length, _POSITIVE) if value >= 0 else Text("▒" * length, _NEGATIVE)


def _sum_line(scores: TokenScores) -> str:
    if scores.method in _RANKING_ONLY:
        return f"{scores.method}: ranking only; the scores do not add up to the target."
    if scores.baseline is None or scores.expected_sum is None:
        return f"{scores.method}: sum {scores.sum:.4f}; the scores do not add up to the target."
    target = scores.expected_sum
    error = abs(scores.sum - target)
    return f"{scores.method}: sum {scores.sum:.6f}, the target is {target:.6f} (off by {error:.1e})."


def _baseline_line(baseline: float, target: float) -> str:
    """Return the baseline's share of the target, or both numbers if the target is close to 0."""
    subject = "The baseline, which belongs to no token, is"
    if abs(baseline) > 10 * abs(target):
        return f"{subject} {baseline:+.4f}, the target {target:+.4f}."
    return f"{subject} {100 * baseline / target:.0f} % of the target."


def _comparison_line(explanation: Explanation, scores: TokenScores) -> str:
    """Return the rank correlation of a method with leave-one-out on this text."""
    correlation, effects = verify_scores(explanation, scores), explanation.by(VERIFIER).values
    units = counted(int(np.isfinite(effects).sum()), "word" if explanation.unit_ids else "token")
    if math.isnan(correlation):
        return f"{scores.method}: no rank correlation, because {units} of this text can be left out."
    return (
        f"{scores.method}: Spearman {correlation:.2f} with leave-one-out over {units} of this text."
        f"{_caution(correlation, 'trust leave_one_out instead.')}"
    )


def _caution(correlation: float, consequence: str) -> str:
    if correlation >= LOW_FAITHFULNESS:
        return ""
    return f" Caution: that is {'negative' if correlation < 0 else 'low'}, {consequence}"


def print_matrix(console: Console, comparison: Comparison, texts: tuple[str, str], kind: str) -> None:
    """Print the matrix of a comparison, or its largest pairs if it does not fit the terminal.

    Rows are units of the first text, columns units of the second text. Baselines are last.
    """
    console.print(f"{kind}: {_MEANINGS[kind].format(similarity=comparison.similarity)}")
    rows, columns = (
        _labels(side, {"text": text}) for side, text in zip((comparison.a, comparison.b), texts, strict=True)
    )
    cells = _with_baselines(comparison)
    rows += [_BASELINE_LABEL] * (len(cells) - len(rows))
    columns += [_BASELINE_LABEL] * (cells.shape[1] - len(columns))
    widths = [max(_MIN_CELL_WIDTH, cell_len(label)) for label in columns]
    needed = max(map(cell_len, rows)) + sum(width + _GAP for width in widths)
    if needed > console.width:
        _print_largest_pairs(console, comparison)
    else:
        _print_cells(console, rows, columns, cells)
    if kind == "input":
        _print_sums(console, comparison, cells)


def _with_baselines(comparison: Comparison) -> Array:
    """Return the matrix. Baselines of an input matrix become the last row and column."""
    assert comparison.matrix is not None  # noqa: S101 - requested by the caller
    row, column, corner = comparison.baseline_row, comparison.baseline_column, comparison.baseline
    if row is None or column is None or corner is None:
        return comparison.matrix
    last = np.append(row, corner)
    return np.vstack([np.column_stack([comparison.matrix, column]), last])


def _print_cells(console: Console, rows: list[str], columns: list[str], cells: Array) -> None:
    table = Table(box=None, show_edge=False, pad_edge=False, padding=(0, _GAP, 0, 0))
    table.add_column("", style=Style(bold=True), no_wrap=True)
    for label in columns:
        table.add_column(label, justify="right", no_wrap=True)
    for label, row in zip(rows, cells, strict=True):
        table.add_row(label, *("" if math.isnan(value) else f"{value:.3f}" for value in row))
    console.print(table)


def _print_sums(console: Console, comparison: Comparison, cells: Array) -> None:
    assert comparison.matrix is not None  # noqa: S101 - requested by the caller
    tokens, total = (float(part.sum(dtype=np.float64)) for part in (comparison.matrix, cells))
    label = f"the {comparison.function_label} is {comparison.similarity:.6f}"
    console.print(
        f"input: pairs {tokens:.6f}, baselines {total - tokens:+.6f}, sum {total:.6f}, {label} "
        f"(off by {abs(total - comparison.similarity):.1e}).",
        soft_wrap=True,
    )


def _print_largest_pairs(console: Console, comparison: Comparison) -> None:
    table = Table(box=None, show_header=False, show_edge=False, pad_edge=False, padding=(0, _GAP, 0, 0))
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for first, second, value in comparison.top_pairs(_NUM_PAIRS):
        table.add_row(f"{value:+.4f}", f"{first} - {second}")
    console.print(table)
