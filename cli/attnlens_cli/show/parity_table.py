"""How parity with PyTorch is shown."""

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.table import Table

    from attnlens.v1.manifest_pb2 import ParityFigure
    from attnlens_export.parity.result import ParityResult


def parity_table(parity: "ParityResult", title: str) -> "Table":
    """Show the worst errors of each output of each graph."""
    from rich.box import SIMPLE  # noqa: PLC0415 - heavy
    from rich.markup import escape  # noqa: PLC0415 - heavy
    from rich.table import Table  # noqa: PLC0415 - heavy

    from attnlens_export.parity.result import summarize  # noqa: PLC0415 - heavy

    table = Table(
        title=f"{escape(title)}, {len(parity.cases)} input shapes",
        title_justify="left",
        box=SIMPLE,
        pad_edge=False,
        padding=(0, 0, 0, 1),
    )
    table.add_column("output of graph", no_wrap=True)
    for heading in ("vs\ntorch", "vs\nfloat64", "torch vs\nfloat64", "p99", "1 -\ncosine", "verdict"):
        table.add_column(heading, justify="right", no_wrap=True)
    last_graph = ""
    for (graph, output), group in parity.by_output().items():
        if graph != last_graph:
            table.add_row(graph.rpartition("/")[2])  # the table fits 80 columns
            last_graph = graph
        figure = summarize(group)
        table.add_row(
            f"  {output}",
            *_cells(figure),
            _verdict(passed=all(each.passed for each in group)),
        )
    if parity.half is not None:
        figure = parity.half.figure()
        table.add_row(figure.graph.rpartition("/")[2])
        table.add_row(f"  {figure.output}", *_cells(figure), _verdict(passed=not parity.half.failures()))
    table.caption, table.caption_justify = parity.describe_lengths(), "left"
    if parity.half is not None:
        table.caption += f"\n{parity.half.describe()}"
    left_out = parity.left_out()
    if left_out:
        table.caption += (
            f"\nnot compared, too large: {', '.join(f'{graph} at {case}' for graph, case in left_out)}"
        )
    return table


def _cells(figure: "ParityFigure") -> list[str]:
    errors = (
        figure.max_abs_error,
        figure.max_abs_error_float64,
        figure.torch_abs_error_float64,
        figure.p99_abs_error,
    )
    return [*(f"{error:.1e}" for error in errors), f"{1 - figure.min_cosine:.0e}"]


def _verdict(*, passed: bool) -> str:
    return "[green]passed[/]" if passed else "[red]FAILED[/]"


def raise_failures(parity: "ParityResult") -> None:
    """Raise ClickException with the worst failure if parity failed."""
    from attnlens_export.bundle import describe_failure  # noqa: PLC0415 - heavy

    if not parity.passed:
        raise click.ClickException(describe_failure(parity))
