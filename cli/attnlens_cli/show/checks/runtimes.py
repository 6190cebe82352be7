"""How `attnlens check --runtime` shows what it measured."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from attnlens_export.check import CheckSummary
    from attnlens_export.runtimes import RuntimeResult


# Failures that are shown of one runtime: a wrong graph is wrong on every shape.
_MAX_LINES = 3


def show_runtimes(summary: "CheckSummary") -> None:
    """Print a row for each runtime and precision, then what failed and what is not installed."""
    from attnlens_runtimes import FP32  # noqa: PLC0415 - heavy

    exact = [result for result in summary.runtimes if result.precision == FP32]
    reduced = [result for result in summary.runtimes if result.precision != FP32]
    if exact:
        _show_table(
            "In other runtimes, in fp32: largest error against PyTorch",
            ("runtime", "version"),
            [(result.name, result.version, *_cells(result)) for result in exact],
        )
    if reduced:
        _show_table(
            "In lower precision: 1 - smallest cosine with PyTorch",
            ("runtime", "version", "in"),
            [(result.name, result.version, result.precision, *_reduced_cells(result)) for result in reduced],
        )
    for result in summary.runtimes:
        failures = result.failures()
        for line in failures[:_MAX_LINES]:
            click.echo(line)
        if len(failures) > _MAX_LINES:
            click.echo(f"{result.label}: {len(failures) - _MAX_LINES} more failures, see --json")
    for missing in summary.missing:
        click.echo(missing.reason)


def _show_table(title: str, names: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich.box import SIMPLE  # noqa: PLC0415 - heavy
    from rich.table import Table  # noqa: PLC0415 - heavy

    from attnlens_cli.show.console import make_console  # noqa: PLC0415 - heavy

    table = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False, padding=(0, 0, 0, 1))
    for name in names:
        table.add_column(f"\n{name}", no_wrap=True)
    for heading in ("model\nhidden", "att.\nhidden", "att.\nweights", "contr.\nsum", "\nshapes", "\nverdict"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    click.echo()
    make_console(markup=True).print(table)


def _cells(result: "RuntimeResult") -> list[str]:
    errors = [*result.worst_errors(), result.incompleteness]
    return [*("-" if error is None else f"{error:.1e}" for error in errors), *_outcome(result)]


def _reduced_cells(result: "RuntimeResult") -> list[str]:
    cosines = ["-" if cosine is None else f"{1 - cosine:.1e}" for cosine in result.min_cosines()]
    missed = result.incompleteness
    return [*cosines, "-" if missed is None else f"{missed:.1e}", *_outcome(result)]


def _outcome(result: "RuntimeResult") -> list[str]:
    done = f"{result.num_cases}/{len(result.parity.cases)}"
    verdict = "[green]passed[/]" if result.passed else "[red]FAILED[/]"
    return [done, verdict]


def runtimes_as_json(summary: "CheckSummary") -> dict[str, Any]:
    """Return the measurements in other runtimes as JSON values; nothing if none was asked for."""
    if not summary.runtimes and not summary.missing:
        return {}
    results = [result.to_json() for result in summary.runtimes]
    missing = [{"name": runtime.name, "reason": runtime.reason} for runtime in summary.missing]
    return {"runtimes": results, "missing_runtimes": missing}


def raise_runtime_failures(summary: "CheckSummary") -> None:
    """Raise ClickException that names the runtimes that failed."""
    failed = [result for result in summary.runtimes if not result.passed]
    if failed:
        names = ", ".join(result.label for result in failed)
        [first, *_] = [*failed[0].failures(), f"{failed[0].label}: nothing was measured"]
        raise click.ClickException(f"failed in {names}: {first}")
