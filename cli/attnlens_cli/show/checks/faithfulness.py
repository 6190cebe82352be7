"""How `attnlens check --faithfulness` shows what it measured."""

from typing import TYPE_CHECKING

import click

from attnlens_cli.show.printable import counted

if TYPE_CHECKING:
    from attnlens_export.faithfulness.result import FaithfulnessResult


def show_faithfulness(result: "FaithfulnessResult") -> None:
    """Print a row for each method and control, the best rank correlation first."""
    from rich.box import SIMPLE  # noqa: PLC0415 - heavy
    from rich.console import Console  # noqa: PLC0415 - heavy
    from rich.table import Table  # noqa: PLC0415 - heavy

    table = Table(
        title=f"Faithfulness of explanations, {counted(result.num_texts, 'text')} of "
        f"{result.mean_tokens:.1f} tokens",
        title_justify="left",
        box=SIMPLE,
        pad_edge=False,
        padding=(0, 0, 0, 1),
    )
    table.add_column("method", no_wrap=True)
    for heading in ("rank correlation\nwith leave-one-out", "standard\nerror", "deletion\ndifference"):
        table.add_column(heading, justify="right", no_wrap=True)
    for measured in result.sorted():
        figures = (measured.rank_correlation, measured.standard_error, measured.deletion_difference)
        table.add_row(measured.name, *(f"{figure:.3f}" for figure in figures))
    click.echo()
    Console().print(table)
    click.echo(
        "The bundle's report and manifest state these figures now; an explanation repeats its method's."
    )
