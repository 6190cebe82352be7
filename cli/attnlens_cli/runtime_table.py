"""How `attnlens check --runtime` shows what it measured."""

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from attnlens_export.check import CheckSummary
    from attnlens_export.runtime_parity import RuntimeResult


# Of failures of one runtime; a graph that is wrong is wrong on every shape.
_MAX_LINES = 3


def show_runtimes(summary: "CheckSummary") -> None:
    """Print a row for each runtime, then what failed and what is not installed."""
    from rich.box import SIMPLE  # noqa: PLC0415 - heavy
    from rich.console import Console  # noqa: PLC0415 - heavy
    from rich.table import Table  # noqa: PLC0415 - heavy

    table = Table(
        title="The same inputs in other runtimes, largest error against PyTorch",
        title_justify="left",
        box=SIMPLE,
        pad_edge=False,
        padding=(0, 0, 0, 1),
    )
    table.add_column("\nruntime", no_wrap=True)
    table.add_column("\nversion", no_wrap=True)
    headings = ("model\nhidden", "att.\nhidden", "att.\nweights", "\nshapes", "\nverdict")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for result in summary.runtimes:
        table.add_row(result.name, result.version, *_cells(result))
    click.echo()
    Console().print(table)
    for result in summary.runtimes:
        failures = result.failures()
        for line in failures[:_MAX_LINES]:
            click.echo(line)
        if len(failures) > _MAX_LINES:
            click.echo(f"{result.name}: {len(failures) - _MAX_LINES} more failures, see --json")
    for missing in summary.missing:
        click.echo(missing.reason)


def _cells(result: "RuntimeResult") -> list[str]:
    errors = ["-" if error is None else f"{error:.1e}" for error in result.worst_errors()]
    done = f"{result.num_cases}/{len(result.parity.cases)}"
    verdict = "[green]passed[/]" if result.passed else "[red]FAILED[/]"
    return [*errors, done, verdict]


def runtimes_as_json(summary: "CheckSummary") -> dict[str, Any]:
    """Return the measurements in other runtimes as JSON values; nothing if none was asked for."""
    if not summary.runtimes and not summary.missing:
        return {}
    results = [result.as_json() for result in summary.runtimes]
    missing = [{"name": each.name, "reason": each.reason} for each in summary.missing]
    return {"runtimes": results, "missing_runtimes": missing}


def raise_runtime_failures(summary: "CheckSummary") -> None:
    """Raise ClickException that names the runtimes that failed."""
    failed = [result for result in summary.runtimes if not result.passed]
    if failed:
        names = ", ".join(result.name for result in failed)
        [first, *_] = [*failed[0].failures(), f"{failed[0].name}: nothing was measured"]
        raise click.ClickException(f"failed in {names}: {first}")
