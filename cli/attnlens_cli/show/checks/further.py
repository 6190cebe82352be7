"""How the graph of contributions, and graphs in lower precisions, are shown."""

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from attnlens_export.contents import Verdict


def show_further(verdict: "Verdict") -> None:
    """Print what was measured of the graphs that are not in the table of parity: tables and lines."""
    from rich.box import SIMPLE  # noqa: PLC0415 - heavy
    from rich.table import Table  # noqa: PLC0415 - heavy

    from attnlens_cli.show.console import make_console  # noqa: PLC0415 - heavy

    for result in verdict.further:
        found = result.table()
        if found.headings:
            table = Table(box=SIMPLE, pad_edge=False, padding=(0, 0, 0, 1))
            for number, heading in enumerate(found.headings):
                table.add_column(heading, justify="right" if number else "left", no_wrap=True)
            for row in found.rows:
                table.add_row(*row)
            click.echo(found.caption)
            make_console(markup=True).print(table)
        for remark in found.remarks:
            click.echo(remark)
