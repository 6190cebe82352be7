"""How `attnlens check --faithfulness` shows what it measured."""

from typing import TYPE_CHECKING

import click

from attnlens_cli.show.printable import counted

if TYPE_CHECKING:
    from attnlens_export.faithfulness.measure import FaithfulnessResult


def show_faithfulness(result: "FaithfulnessResult") -> None:
    """Print a row for each method and control, the best rank correlation first."""
    from rich.box import SIMPLE  # noqa: PLC0415 - heavy
    from rich.table import Table  # noqa: PLC0415 - heavy

    from attnlens_cli.show.console import make_console  # noqa: PLC0415 - heavy

    table = Table(
        title=f"Faithfulness of explanations, {counted(result.num_texts, 'text')} of "
        f"{result.mean_tokens:.1f} tokens",
        title_justify="left",
        box=SIMPLE,
        pad_edge=False,
        padding=(0, 0, 0, 1),
    )
    table.add_column("method", no_wrap=True)
    headings = ("rank correlation\nwith leave-one-out", "95 %\ninterval", "\ntexts", "deletion\ndifference")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for measured in result.sorted():
        table.add_row(
            measured.name,
            f"{measured.rank_correlation:.3f}",
            measured.interval,
            str(measured.num_texts),
            measured.deletion,
        )
    click.echo()
    make_console(markup=True).print(table)
    click.echo(
        "The bundle's report and manifest state these figures now; an explanation repeats its method's."
    )
