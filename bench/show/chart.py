"""Result chart: speed against accuracy, server throughput, single-text latency and open-loop latency."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from bench.accuracy import rank
from bench.cases import MINILM, Row
from bench.contestants import EAGER, ONE_BY_ONE
from bench.field import MANY
from bench.setting import BASE
from bench.show.scatter import OURS, THEIRS, draw_scatter, short_name
from bench.show.targets import Rows, is_ours

PLAIN = {
    "facecolor": "white",
    "edgecolor": "none",
    "pad": 1.0,
}  # background of labels that overlap an error bar
TASKS = {
    "embed": ("embeddings", "#1f6f8b"),
    "tokens": ("token vectors", "#6a994e"),
    "attention": ("all attention maps", "#bc4749"),
    "attention mean": ("one layer's head mean", "#e09f3e"),
}


def draw_chart(result: Mapping[str, Any], path: Path) -> None:
    """Draw all panels and write the image to `path`."""
    figure = Figure(figsize=(19, 12.5), layout="constrained")
    grid = figure.add_gridspec(2, 1, height_ratios=[1.1, 1])
    top_row, bottom_row = (figure.add_subfigure(grid[half]).subplots(1, 3) for half in range(2))
    rows = Rows(result["rows"])
    panels = (
        (f"{MINILM}, passages", "passages", MINILM),
        (f"{MINILM}, texts of 257 to 512 tokens", "long", MINILM),
        (f"{BASE}, random weights, passages", "passages", BASE),
    )
    for axes, (title, workload, model) in zip(top_row, panels, strict=True):
        draw_scatter(axes, rows, workload, model)
        axes.set_title(f"{title}: tokens/s in-process", pad=20)
    served, single, latency = bottom_row
    draw_served(served, result["rows"])
    draw_single(single, result["rows"])
    draw_latency(latency, result["open_loop"])
    for axes in (*top_row, *bottom_row):
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_size(10)
        axes.tick_params(labelsize=8, which="both")
    machine = f"{result['machine']['processor']}, {result['threads']} threads"
    legend = "blue: attnlens; gray: others; genai: openvino-genai; ST: sentence-transformers"
    figure.suptitle(f"{machine}; {legend}", fontsize=10, color="dimgray")
    figure.savefig(path, dpi=100)


def draw_served(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw server throughput with 64 clients, and PyTorch's in-process attention for comparison."""
    measured = [row for row in rows if not row["failure"] and row["workload"] != "passages"]
    chosen = [row for row in measured if row["clients"] == MANY or row["name"] == EAGER]
    chosen.sort(key=lambda row: (list(TASKS).index(row["what"]), rank(row), not is_ours(row)))
    labels = [
        f"{short_name(row)}{'' if row['clients'] else ' (in-process)'}{tier_label(row)}\n"
        f"{TASKS[row['what']][0]}, {row['workload']} texts"
        for row in chosen
    ]
    draw_bars(axes, chosen, labels, [row["texts_per_s"] for row in chosen])
    axes.set_title(f"{MANY} clients, one text per request: texts/s", pad=20)


def draw_single(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw the median latency of one short text, with an error bar up to the 95th percentile."""
    chosen = [
        row
        for row in rows
        if not row["failure"]
        and (row["what"] == ONE_BY_ONE or (row["clients"], row["workload"]) == (1, "sentences"))
    ]
    chosen.sort(key=lambda row: (rank(row), row["latency_ms"]["p50"]))
    labels = [
        f"{short_name(row)}{', over gRPC' if row['clients'] else ''}{tier_label(row)}" for row in chosen
    ]
    latencies = [row["latency_ms"] for row in chosen]
    bars = [{"median": each["p50"], "min": each["p50"], "max": each["p95"]} for each in latencies]
    draw_bars(axes, chosen, labels, bars)
    axes.set_title("One short text at a time, ms: p50, with p95 as error bar", pad=20)


def tier_label(row: Row) -> str:
    """Return the tier of a row in brackets, or an empty string for fp32."""
    tier = row.get("accuracy", {}).get("tier", "fp32")
    return "" if tier == "fp32" else f" [{tier}]"


def draw_bars(
    axes: Axes, rows: Sequence[Row], labels: Sequence[str], figures: Sequence[Mapping[str, float]]
) -> None:
    """Draw a horizontal bar with the median of each row, and error bars from minimum to maximum."""
    error_bars = [
        [figure["median"] - figure["min"] for figure in figures],
        [figure["max"] - figure["median"] for figure in figures],
    ]
    colors = [OURS if is_ours(row) else THEIRS for row in rows]
    medians, error_style = [figure["median"] for figure in figures], {"elinewidth": 1, "capsize": 2}
    axes.barh(range(len(rows)), medians, xerr=error_bars, color=colors, error_kw=error_style)
    for position, figure in enumerate(figures):
        text = f"{figure['median']:,.0f}" if figure["median"] >= 100 else f"{figure['median']:.3g}"
        axes.text(1.02 * figure["max"], position, text, va="center", fontsize=8, bbox=PLAIN)
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.invert_yaxis()
    axes.margins(x=0.15)


def draw_latency(axes: Axes, points: Sequence[Row]) -> None:
    """Draw median and 99th percentile latency over the arrival rate, one color per task."""
    answered = [point for point in points if point["latency_ms"]]
    for what in dict.fromkeys(point["what"] for point in answered):
        selected = [point for point in answered if point["what"] == what]
        rates = [point["rate"] for point in selected]
        label, color = TASKS[what]
        style: dict[str, Any] = {"color": color, "marker": "o", "markersize": 3}
        axes.plot(rates, [point["latency_ms"]["p50"] for point in selected], "-", label=label, **style)
        axes.plot(rates, [point["latency_ms"]["p99"] for point in selected], "--", **style)
    axes.set_yscale("log")
    for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        set_formatter(FuncFormatter(lambda ms, _: f"{ms:g}" if f"{ms:g}"[0] in "125" else ""))
    axes.set_xlabel("texts arriving per second", fontsize=8)
    axes.set_title("Open loop, ms: p50, and p99 dashed", pad=20)
    if answered:
        axes.legend(frameon=False, fontsize=8)
