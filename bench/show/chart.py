"""The result as a picture: rates in-process, rates of servers, and latency."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from bench.cases import Row
from bench.contestants import EAGER
from bench.field import MANY
from bench.show.targets import Rows

PLAIN = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}  # over the line of the ceiling
OURS, THEIRS = "#1f6f8b", "#b4bcc2"
WHATS = {
    "embed": ("embeddings", "#1f6f8b"),
    "tokens": ("token vectors", "#6a994e"),
    "attention": ("all attention maps", "#bc4749"),
    "attention mean": ("one layer's head mean", "#e09f3e"),
}


def draw_chart(result: Mapping[str, Any], path: Path) -> None:
    """Draw three panels: rates in-process, rates served, and latency against the rate of arrivals."""
    figure = Figure(figsize=(15, 5.6), layout="constrained")
    in_process, served, latency = figure.subplots(1, 3, width_ratios=[1.1, 1.1, 1])
    draw_in_process(in_process, result["rows"])
    draw_served(served, result["rows"])
    draw_latency(latency, result["open_loop"])
    for axes in (in_process, served, latency):
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_size(10)
        axes.tick_params(labelsize=8, which="both")
    machine = f"{result['machine']['processor']}, {result['threads']} threads"
    figure.suptitle(f"{result['model']} on {machine}", fontsize=10, color="dimgray")
    figure.savefig(path, dpi=120)


def draw_in_process(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw tokens per second on passages as bars, and the rate of ONNX Runtime's own MatMul as a line."""
    chosen = [
        row
        for row in rows
        if (row["what"], row["workload"], row["clients"], row["failure"]) == ("embed", "passages", None, "")
    ]
    draw_bars(axes, chosen, [f"{row['name']}\n{row['precision']}" for row in chosen], "tokens_per_s")
    axes.set_title("Embeddings of passages, in-process: tokens/s", pad=20)
    ceiling = Rows(rows).ceiling()
    if ceiling is not None and chosen:
        flop_per_token = chosen[0]["gflop_per_s"]["median"] / chosen[0]["tokens_per_s"]["median"]
        limit = ceiling["gflop_per_s"]["median"] / flop_per_token
        axes.axvline(limit, color="black", linestyle=":", linewidth=1)
        above: dict[str, Any] = {
            "transform": axes.get_xaxis_transform(),
            "ha": "center",
            "va": "bottom",
            "fontsize": 8,
        }
        axes.text(limit, 1.0, "at the rate of an fp32 MatMul", **above)


def draw_served(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw texts per second for 64 clients as bars, beside PyTorch's attention in-process."""
    measured = [row for row in rows if not row["failure"] and row["workload"] != "passages"]
    chosen = [row for row in measured if row["clients"] == MANY or row["name"] == EAGER]
    chosen.sort(key=lambda row: (list(WHATS).index(row["what"]), not row["name"].startswith("attnlens")))
    labels = [
        f"{row['name']} {row['precision']}{'' if row['clients'] else ' (in-process)'}\n"
        f"{WHATS[row['what']][0]}, {row['workload']} texts"
        for row in chosen
    ]
    draw_bars(axes, chosen, labels, "texts_per_s")
    axes.set_title(f"{MANY} clients, one text a request: texts/s", pad=20)


def draw_bars(axes: Axes, rows: Sequence[Row], labels: Sequence[str], unit: str) -> None:
    """Draw a horizontal bar a row, the median, with the extremes as a whisker."""
    rates = [row[unit] for row in rows]
    whiskers = [
        [rate["median"] - rate["min"] for rate in rates],
        [rate["max"] - rate["median"] for rate in rates],
    ]
    colors = [OURS if row["name"].startswith("attnlens") else THEIRS for row in rows]
    medians, error_style = [rate["median"] for rate in rates], {"elinewidth": 1, "capsize": 2}
    axes.barh(range(len(rows)), medians, xerr=whiskers, color=colors, error_kw=error_style)
    for position, rate in enumerate(rates):
        axes.text(1.02 * rate["max"], position, f"{rate['median']:,.0f}", va="center", fontsize=8, bbox=PLAIN)
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:,.0f}"))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.invert_yaxis()
    axes.margins(x=0.15)


def draw_latency(axes: Axes, points: Sequence[Row]) -> None:
    """Draw median and 99th centile over the rate of arrivals, a colour for each kind of request."""
    answered = [point for point in points if point["latency_ms"]]
    for what in dict.fromkeys(point["what"] for point in answered):
        of_what = [point for point in answered if point["what"] == what]
        rates = [point["rate"] for point in of_what]
        label, color = WHATS[what]
        style: dict[str, Any] = {"color": color, "marker": "o", "markersize": 3}
        axes.plot(rates, [point["latency_ms"]["p50"] for point in of_what], "-", label=label, **style)
        axes.plot(rates, [point["latency_ms"]["p99"] for point in of_what], "--", **style)
    axes.set_yscale("log")
    for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        which(FuncFormatter(lambda ms, _: f"{ms:g}" if f"{ms:g}"[0] in "125" else ""))
    axes.set_xlabel("texts arriving per second", fontsize=8)
    axes.set_title("Open loop, ms: p50, and p99 dashed", pad=20)
    if answered:
        axes.legend(frameon=False, fontsize=8)
