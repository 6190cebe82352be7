"""How parity with PyTorch is shown."""

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.table import Table

    from attnlens.v1.manifest_pb2 import ParityFigure
    from attnlens_export.contents import Verdict


def parity_table(verdict: "Verdict", title: str) -> "Table":
    """Show the worst errors of each output of each graph."""
    from rich.box import SIMPLE  # noqa: PLC0415 - heavy
    from rich.markup import escape  # noqa: PLC0415 - heavy
    from rich.table import Table  # noqa: PLC0415 - heavy

    from attnlens_export.graph.names import role_name  # noqa: PLC0415 - heavy
    from attnlens_export.parity.measure import summarize  # noqa: PLC0415 - heavy

    parity = verdict.parity
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
    for (graph, role), group in parity.by_role().items():
        if graph != last_graph:
            table.add_row(graph.rpartition("/")[2])  # the table fits 80 columns
            last_graph = graph
        figure = summarize(group)
        table.add_row(
            f"  {role}",
            *_cells(figure),
            _verdict(passed=all(error.passed for error in group)),
        )
    for result in verdict.precisions:
        for figure in result.manifest_figures():
            table.add_row(result.path.rpartition("/")[2])
            table.add_row(f"  {role_name(figure.role)}", *_cells(figure), _verdict(passed=result.passed))
    table.caption, table.caption_justify = parity.describe_lengths(), "left"
    if verdict.long_context:
        table.caption += f"\n{verdict.long_context.describe()}"
    if verdict.repeats:
        table.caption += f"\n{verdict.repeats.describe()}"
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
        figure.torch_max_abs_error_float64,
        figure.p99_abs_error,
    )
    return [*(f"{error:.1e}" for error in errors), f"{1 - figure.min_cosine:.0e}"]


def _verdict(*, passed: bool) -> str:
    return "[green]passed[/]" if passed else "[red]FAILED[/]"


def raise_failures(verdict: "Verdict") -> None:
    """Raise ClickException with the worst failure if a gate did not hold."""
    if not verdict.passed:
        raise click.ClickException(verdict.describe_failure())
