"""Output of `attnlens check --against`."""

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from attnlens_export.publisher import PublisherResult


def show_publisher(result: "PublisherResult") -> None:
    """Print a row per kind of result, then what was not compared and why."""
    from rich.box import SIMPLE  # noqa: PLC0415 - heavy
    from rich.markup import escape  # noqa: PLC0415 - heavy
    from rich.table import Table  # noqa: PLC0415 - heavy

    from attnlens_cli.show.console import make_console  # noqa: PLC0415 - heavy

    table = Table(
        title=f"Served bundle against {result.implementation}",
        title_justify="left",
        box=SIMPLE,
        pad_edge=False,
    )
    table.add_column("result", no_wrap=True)
    for heading in ("texts", "largest difference", "allowed", "verdict"):
        table.add_column(heading, justify="right", no_wrap=True)
    for found in result.comparisons:
        if found.result.startswith("token ids"):
            numbers = (f"{found.max_abs_error:.0f} texts", "0 texts")
        else:
            numbers = (f"{found.max_abs_error:.1e}", f"{found.limit:.1e}")
        verdict = "[green]passed[/]" if found.passed else "[red]FAILED[/]"
        table.add_row(escape(found.result), str(found.num_texts), *numbers, verdict)
    click.echo()
    make_console(markup=True).print(table)
    for line in result.not_compared:
        click.echo(f"not compared: {line}")


def raise_publisher_failures(result: "PublisherResult") -> None:
    """Raise ClickException with the first failure, if there is one."""
    failures = result.failures()
    if failures:
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        raise click.ClickException(f"the bundle is not what its publisher computes: {failures[0]}{more}")
