"""The tables, and the commands to copy."""

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from attnlens_cli.show.bench.commands import ServeCommand
from attnlens_cli.show.console import make_console
from attnlens_cli.show.printable import counted
from attnlens_server.config import DEFAULT_DEVICE
from attnlens_server.tuning import EXACT, Comparison, Offer, Report, Workload

MIB = 1 << 20


def show_report(report: Report, workload: Workload, model_name: str, commands: list[ServeCommand]) -> None:
    """Print the tables and the commands to copy."""
    console = make_console()
    console.print(f"{model_name}, {_describe(workload)}", soft_wrap=True)
    if report.comparison is not None:
        _show_comparison(console, report.comparison)
    for table in (_graph_table(report), _settings_table(report, workload), _loads_table(report)):
        console.print()
        console.print(table)
    console.print(
        "Measured in the engine: gRPC, tokenization and pooling come on top. Among settings within 3 % of "
        "the best, the one with the smallest batches and the fewest copies of the weights is chosen. "
        "Serve with:"
    )
    for command in commands:
        _show_command(console, command)


def _show_comparison(console: Console, comparison: Comparison) -> None:
    console.print()
    console.print(_comparison_table(comparison))
    sample = comparison.sample
    console.print(
        f"relative: median of the ratios within each round. cosine: of embeddings with those of "
        f"{comparison.rows[0].variant}, {sample.description}. alone: one text of "
        f"{counted(comparison.alone_tokens, 'token')}. MiB: memory of a process with this engine alone."
    )
    if not sample.are_real:
        console.print("Random ids are no real texts: give --texts FILE for cosines that tell about yours.")
    by_reason: dict[str, list[str]] = {}
    for left_out in comparison.left_out:
        by_reason.setdefault(left_out.reason, []).append(str(left_out.variant))
    for reason, variants in by_reason.items():
        console.print(f"Not measured: {', '.join(variants)}: {reason}")


def _comparison_table(comparison: Comparison) -> Table:
    headings = (
        "engine",
        "precision",
        "tokens/s",
        "relative",
        "mean\ncosine",
        "smallest\ncosine",
        "ms\nalone",
    )
    table = _table("Engines and precisions, with default settings", (*headings, "MiB"), num_words=2)
    for row in comparison.rows:
        memory = f"{row.memory_bytes / MIB:,.0f}" if row.memory_bytes is not None else "-"
        table.add_row(
            row.variant.engine if row.device == DEFAULT_DEVICE else f"{row.variant.engine} on {row.device}",
            row.variant.precision,
            f"{row.tokens_per_s:,.0f}",
            f"{row.speed_relative_to(comparison.rows[0]):.2f}",
            f"{row.accuracy.mean_cosine:.5f}",
            f"{row.accuracy.smallest_cosine:.5f}",
            f"{row.alone_ms:.1f}",
            memory,
        )
    return table


def _show_command(console: Console, command: ServeCommand) -> None:
    if command.offer is not None:
        console.print(f"\n{_expectation(command.offer, is_tuned=command.is_tuned)}")
    console.print()
    if command.check is not None:
        console.print(f"    {command.check}  # once: the bundle has no check of this engine", soft_wrap=True)
    console.print(f"    {command.command}", soft_wrap=True)


def _expectation(offer: Offer, *, is_tuned: bool) -> str:
    """Return what to expect of a server that is started so, to stand before the line to copy."""
    row = offer.measured
    parts = [str(row.variant)]
    if offer.tier is not EXACT:
        parts.append(f"{offer.relative_speed:.2f} times as fast")
        parts.append(f"cosine {row.accuracy.mean_cosine:.5f} in the mean")
        parts.append(f"{row.accuracy.smallest_cosine:.5f} at least")
    if not is_tuned:
        parts.append("default settings")
    return f"{offer.tier.name if offer.tier else 'as asked'}: {', '.join(parts)}"


def _describe(workload: Workload) -> str:
    cut = f"; {workload.num_cut:,} longer ones were cut" if workload.num_cut else ""
    p50, p90, longest = (workload.quantile_tokens(share) for share in (0.5, 0.9, 1))
    return f"{workload.description}: tokens median {p50:,}, p90 {p90:,}, longest {longest:,}{cut}"


def _table(title: str, headings: tuple[str, ...], *, num_words: int = 0) -> Table:
    """Return an empty table of numbers, with words in the first columns."""
    table = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False, padding=(0, 0, 0, 1))
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < num_words else "right", no_wrap=True)
    return table


def _graph_table(report: Report) -> Table:
    thread_counts = sorted({cell.threads for cell in report.grid})
    headings = ["length", "batch"]
    for threads in thread_counts:
        on_cpu = f"{threads} thread{'s' if threads > 1 else ''}"
        headings += [f"ms on\n{on_cpu if report.device == DEFAULT_DEVICE else report.device}", "tokens/s"]
    cells = {(cell.length, cell.batch, cell.threads): cell for cell in report.grid}
    table = _table(f"The graph alone, {report.variant} on {report.device}", tuple(headings))
    for length, batch in dict.fromkeys((cell.length, cell.batch) for cell in report.grid):
        row = [f"{length:,}", f"{batch:,}"]
        for threads in thread_counts:
            cell = cells[length, batch, threads]
            row += [f"{cell.ms:,.1f}", f"{cell.tokens_per_s:,.0f}"]
        table.add_row(*row)
    return table


def _settings_table(report: Report, workload: Workload) -> Table:
    headings = ("threads", "lanes", "batch\ntokens", "texts/s", "tokens/s", "spread", "padding", "times", "")
    table = _table(
        f"The engine, {report.variant}, {counted(report.num_in_flight, 'text')} waiting or running", headings
    )
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
