"""Scatter plot of speed over accuracy, with tiers as background bands."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from bench.accuracy import BELOW, FP32, INT8, NEAR_LOSSLESS, TIERS, Accuracy, Tier, of_row, rank
from bench.cases import Row
from bench.show.targets import Rows, is_ours

OURS, THEIRS = "#1f6f8b", "#8d979e"
FARTHEST = 1.0
NEAREST = 1e-7  # lower clip; smaller differences are summation-order noise
SHORT = {
    "attnlens engine": "attnlens",
    "openvino-genai": "genai",
    "sentence-transformers": "ST",
}
BANDS: tuple[tuple[Tier, str], ...] = (
    (FP32, "#eef3f5"),
    (NEAR_LOSSLESS, "#f8fafb"),
    (INT8, "#eef3f5"),
    (BELOW, "#fbeeee"),
)
_LIMITS = [NEAREST / 2, *(1 - tier.mean_cosine for tier, _ in BANDS[:-1]), FARTHEST]
BAND_EDGES = tuple(pairwise(_LIMITS))
LABEL_GAP = 0.034  # minimum distance between labels, as a fraction of the height


def draw_scatter(axes: Axes, rows: Rows, workload: str, model: str) -> None:
    """Plot tokens per second over 1 - mean cosine, with a line to 1 - minimum cosine."""
    chosen = sorted(rows.embedding(workload, model), key=lambda row: row["tokens_per_s"]["median"])
    chosen = [row for row in chosen if of_row(row) is not None]
    axes.set_xscale("log")
    axes.set_xlim(NEAREST / 2, FARTHEST)
    style: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "bottom"}
    for (left, right), (tier, color) in zip(BAND_EDGES, BANDS, strict=True):
        axes.axvspan(left, right, color=color, linewidth=0)
        axes.text((left * right) ** 0.5, 1.01, tier.name, fontsize=7.5, **style)
    axes.set_xlabel("1 - cosine with attnlens fp32: mean (point) to maximum (line)", fontsize=8)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:,.0f}"))
    if not chosen:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color="dimgray")
        return
    top = 1.12 * max(row["tokens_per_s"]["max"] for row in chosen)
    axes.set_ylim(0, top)
    for row in chosen:
        mean, largest, rate = *distances(row), row["tokens_per_s"]["median"]
        color = OURS if is_ours(row) else THEIRS
        axes.plot([mean, largest], [rate, rate], color=color, linewidth=1, alpha=0.6)
        # A hollow marker means that the minimum cosine misses the tier of the mean cosine.
        filling = color if rank(row) <= TIERS.index(band_of(mean)) else "white"
        axes.plot(mean, rate, "o", color=color, markerfacecolor=filling, markersize=6)
    # fp32 labels are laid out separately because their band has free space.
    for left, right in (BAND_EDGES[0], (BAND_EDGES[1][0], FARTHEST)):
        draw_labels(axes, [row for row in chosen if left <= distances(row)[0] < right], top)
    draw_ceiling(axes, rows, chosen[0], top)


def draw_labels(axes: Axes, rows: Sequence[Row], top: float) -> None:
    """Label the points, which are sorted by speed, without overlaps."""
    heights = spread_out([row["tokens_per_s"]["median"] / top for row in rows], LABEL_GAP)
    for row, height in zip(rows, heights, strict=True):
        mean, _ = distances(row)
        is_left = mean > 1 - INT8.mean_cosine  # no space on the right
        axes.annotate(
            f"{short_name(row)}  {row['tokens_per_s']['median']:,.0f}",
            (mean, row["tokens_per_s"]["median"]),
            (mean / 1.5 if is_left else mean * 1.5, height * top),
            ha="right" if is_left else "left",
            va="center",
            fontsize=7.5,
            color=OURS if is_ours(row) else "black",
            fontweight="bold" if is_ours(row) else "normal",
            arrowprops={"arrowstyle": "-", "color": "lightgray", "linewidth": 0.7},
        )


def spread_out(heights: Sequence[float], gap: float) -> list[float]:
    """Return ascending heights, moved so that neighbors are at least `gap` apart.

    Groups of overlapping neighbors keep their center.
    """
    groups: list[list[float]] = []
    for height in heights:
        groups.append([height])
        while len(groups) > 1 and lowest(groups[-1], gap) - highest(groups[-2], gap) < gap:
            groups[-2:] = [groups[-2] + groups[-1]]
    return [lowest(group, gap) + index * gap for group in groups for index in range(len(group))]


def lowest(group: Sequence[float], gap: float) -> float:
    return sum(group) / len(group) - (len(group) - 1) * gap / 2


def highest(group: Sequence[float], gap: float) -> float:
    return sum(group) / len(group) + (len(group) - 1) * gap / 2


def draw_ceiling(axes: Axes, rows: Rows, row: Row, top: float) -> None:
    """Draw a line at the rate of ONNX Runtime's fp32 MatMul."""
    ceiling = rows.ceiling(row["model"])
    if ceiling is None:
        return
    flop_per_token = row["gflop_per_s"]["median"] / row["tokens_per_s"]["median"]
    limit = ceiling["gflop_per_s"]["median"] / flop_per_token
    if limit < top:
        axes.axhline(limit, color="black", linestyle=":", linewidth=1)
        axes.text(FARTHEST, limit, "fp32 MatMul ", ha="right", va="bottom", fontsize=7.5)


def distances(row: Row) -> tuple[float, float]:
    """Return 1 - mean cosine and 1 - minimum cosine, clipped to [NEAREST, FARTHEST]."""
    accuracy = accuracy_of(row)
    mean, largest = (
        min(max(1 - cosine, NEAREST), FARTHEST) for cosine in (accuracy.mean_cosine, accuracy.min_cosine)
    )
    return mean, largest


def accuracy_of(row: Row) -> Accuracy:
    accuracy = of_row(row)
    assert accuracy is not None
    return accuracy


def band_of(distance: float) -> Tier:
    """Return the tier for a mean distance alone."""
    return next(
        tier
        for (_, right), (tier, _) in zip(BAND_EDGES, BANDS, strict=True)
        if distance < right or tier is BELOW
    )


def short_name(row: Row) -> str:
    """Return an abbreviated name with the precision."""
    name = f"{row['name']} {row['precision']}"
    for long, short in SHORT.items():
        name = name.replace(long, short)
    return name
