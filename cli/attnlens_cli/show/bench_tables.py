"""How `attnlens bench` shows what it measured."""

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from attnlens_cli.show.printable import counted
from attnlens_server.tuning import Report, Workload


def show_report(report: Report, workload: Workload, model_name: str, command: str) -> None:
    """Print the three tables and the command to copy."""
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(f"{model_name} on {report.provider}, {_describe(workload)}", soft_wrap=True)
    for table in (_graph_table(report), _settings_table(report, workload), _loads_table(report)):
        console.print()
        console.print(table)
    console.print(
        "Measured in the engine: gRPC, tokenization and pooling come on top. Among settings within 3 % of "
        "the best, the one with the smallest batches and the fewest copies of the weights is chosen. "
        "Serve with:"
    )
    console.print(f"\n    {command}", soft_wrap=True)


def _describe(workload: Workload) -> str:
    cut = f"; {workload.num_cut:,} longer ones were cut" if workload.num_cut else ""
    p50, p90, longest = (workload.quantile_tokens(share) for share in (0.5, 0.9, 1))
    return f"{workload.description}: tokens median {p50:,}, p90 {p90:,}, longest {longest:,}{cut}"


def _table(title: str, headings: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False, padding=(0, 0, 0, 1))
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _graph_table(report: Report) -> Table:
    thread_counts = sorted({cell.threads for cell in report.grid})
    headings = ["length", "batch"]
    for threads in thread_counts:
        on_cpu = f"{threads} thread{'s' if threads > 1 else ''}"
        headings += [f"ms on\n{on_cpu if report.provider == 'cpu' else 'CUDA'}", "tokens/s"]
    cells = {(cell.length, cell.batch, cell.threads): cell for cell in report.grid}
    table = _table("The graph alone, a batch of texts of one length", tuple(headings))
    for length, batch in dict.fromkeys((cell.length, cell.batch) for cell in report.grid):
        row = [f"{length:,}", f"{batch:,}"]
        for threads in thread_counts:
            cell = cells[length, batch, threads]
            row += [f"{cell.ms:,.1f}", f"{cell.tokens_per_s:,.0f}"]
        table.add_row(*row)
    return table


def _settings_table(report: Report, workload: Workload) -> Table:
    headings = ("threads", "lanes", "batch\ntokens", "texts/s", "tokens/s", "spread", "padding", "times", "")
    table = _table(f"The engine, {counted(report.num_in_flight, 'text')} waiting or running", headings)
    for speed in report.speeds:
        setting, rates = speed.setting, speed.tokens_per_s
        median = speed.median_tokens_per_s
        table.add_row(
            f"{setting.threads}",
            f"{setting.lanes}",
            f"{setting.max_batch_tokens:,}",
            f"{median / workload.mean_tokens:,.0f}",
            f"{median:,.0f}",
            f"{100 * (max(rates) - min(rates)) / median:.0f} %" if len(rates) > 1 else "",
            f"{100 * speed.padding_share:.1f} %",
            f"{len(rates)}",
            "<- best" if speed is report.best else "",
        )
    table.caption_justify = "left"
    table.caption = "tokens/s: median of all times; settings over 20 % slower than the best were not repeated"
    return table


def _loads_table(report: Report) -> Table:
    table = _table(
        "Latency with the best setting, ms from when a text was due",
        ("texts/s", "p50", "p95", "p99", "texts", "refused"),
    )
    for load in report.loads:
        percentiles = (load.p50_ms, load.p95_ms, load.p99_ms)
        table.add_row(
            f"{load.rate:,.0f}" if load.rate >= 10 else f"{load.rate:.2g}",  # noqa: PLR2004 - two digits
            *("-" if latency is None else f"{latency:,.1f}" for latency in percentiles),
            f"{load.num_texts:,}",
            f"{load.num_refused:,}",
        )
    return table
