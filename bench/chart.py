"""The result as a picture: who is how fast, and what a request waits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.field import MANY, SERVER
from bench.targets import Row, Rows

OURS, THEIRS = "#1f6f8b", "#b0b7bd"
WHATS = {
    "embed": "embeddings",
    "tokens": "token vectors",
    "attention": "all attention maps",
    "attention mean": "one layer's head mean",
}


def draw_chart(result: dict[str, Any], path: Path) -> None:
    """Draw three panels: in-process rates, served rates, latency against the rate of arrivals."""
    mpl.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    in_process, served, latency = figure.subplots(1, 3, width_ratios=[1.25, 1.25, 1])
    draw_in_process(in_process, result["rows"])
    draw_served(served, result["rows"])
    draw_latency(latency, result["open_loop"])
    figure.suptitle(f"{result['model']}, {result['threads']} threads, {result['machine']['processor']}")
    figure.savefig(path, dpi=130)


def draw_in_process(axes: Axes, rows: Sequence[Row]) -> None:
    """Bars of tokens per second on passages, and where ONNX Runtime's own MatMul would be."""
    chosen = [
        row
        for row in rows
        if (row["what"], row["workload"], row["clients"]) == ("embed", "passages", None)
        and "tokens_per_s" in row
    ]
    draw_bars(axes, chosen, [f"{row['name']} {row['precision']}" for row in chosen], "tokens_per_s")
    ceiling = Rows(rows).ceiling()
    if ceiling is not None and chosen:
        flops_per_token = chosen[0]["gflop_per_s"]["median"] / chosen[0]["tokens_per_s"]["median"]
        limit = ceiling["gflop_per_s"]["median"] / flops_per_token
        axes.axvline(limit, color="black", linestyle=":", linewidth=1)
        axes.annotate("fp32 MatMul alone", (limit, -0.6), rotation=0, ha="center", va="bottom", fontsize=8)
    axes.set_title("Passages, in-process: tokens/s", pad=16)


def draw_served(axes: Axes, rows: Sequence[Row]) -> None:
    """Bars of texts per second of servers with many clients; attention in-process elsewhere beside them."""
    chosen = [
        row
        for row in rows
        if "texts_per_s" in row
        and (row["clients"] == MANY or (row["what"] in WHATS and row["name"] == "transformers eager"))
        and row["workload"] != "passages"
    ]
    labels = []
    for row in chosen:
        where = f"{row['clients']} clients" if row["clients"] else "in-process"
        labels.append(
            f"{row['name']} {row['precision']}, {where}:\n{WHATS[row['what']]}, {row['workload']} texts"
        )
    draw_bars(axes, chosen, labels, "texts_per_s")
    axes.set_title("Served, one text a request: texts/s", pad=16)


def draw_bars(axes: Axes, rows: Sequence[Row], labels: Sequence[str], unit: str) -> None:
    """Draw a horizontal bar a row, the median, with the extremes as a whisker."""
    medians = [row[unit]["median"] for row in rows]
    below = [row[unit]["median"] - row[unit]["min"] for row in rows]
    above = [row[unit]["max"] - row[unit]["median"] for row in rows]
    colors = [OURS if row["name"].startswith("attnlens") else THEIRS for row in rows]
    axes.barh(labels, medians, xerr=[below, above], color=colors, error_kw={"elinewidth": 1, "capsize": 2})
    for position, row in enumerate(rows):
        axes.annotate(f" {row[unit]['median']:,.0f}", (row[unit]["max"], position), va="center", fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.14)


def draw_latency(axes: Axes, points: Sequence[Row]) -> None:
    """Draw median and 99th centile over the rate of arrivals, a colour for each kind of request."""
    for number, what in enumerate(WHATS):
        of_what = [point for point in points if point["what"] == what and point["latency_ms"]]
        if not of_what:
            continue
        rates = [point["rate"] for point in of_what]
        for centile, style in (("p50", "-"), ("p99", "--")):
            axes.plot(
                rates,
                [point["latency_ms"][centile] for point in of_what],
                style,
                color=f"C{number}",
                marker="o",
                markersize=3,
                label=WHATS[what] if centile == "p50" else None,
            )
    axes.set_yscale("log")
    axes.set_xlabel("texts arriving per second")
    axes.set_title(f"{SERVER}, open loop: ms until the answer\n(solid p50, dashed p99)")
    if points:
        axes.legend(frameon=False, fontsize=8)
