"""How `attnlens check --engine` shows what it measured."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from attnlens_cli.show.printable import counted

if TYPE_CHECKING:
    from attnlens.v1.manifest_pb2 import EngineCheck, Gate, GateKind, Manifest, OutputRole
    from attnlens_export.engines.measure import EngineSummary

# Failures that are shown: a wrong graph is wrong on every shape.
_MAX_LINES = 3


def show_engines(summary: "EngineSummary") -> None:
    """Print the errors of the grid, the cosines of texts, what failed and what was not measured."""
    checks = [result.to_message() for result in summary.results]
    if checks:
        _show_grid(checks)
        if any(check.num_texts for check in checks):
            _show_texts(checks)
    for missing in summary.not_measured:
        click.echo(f"{missing.precision} was not measured: {missing.reason}")
    failures = summary.failures()
    for line in failures[:_MAX_LINES]:
        click.echo(line)
    if len(failures) > _MAX_LINES:
        click.echo(f"{len(failures) - _MAX_LINES} more failures, see --json")
    if checks:
        click.echo("The bundle's report and manifest state these figures now.")


def _show_grid(checks: Sequence["EngineCheck"]) -> None:
    from rich.box import SIMPLE  # noqa: PLC0415 - heavy
    from rich.markup import escape  # noqa: PLC0415 - heavy
    from rich.table import Table  # noqa: PLC0415 - heavy

    from attnlens_cli.show.console import make_console  # noqa: PLC0415 - heavy
    from attnlens_export.engines.measure import precision_name  # noqa: PLC0415 - heavy

    first = checks[0]
    where = escape(f"{first.engine} {first.version} on {first.device}, {first.processor}")
    table = Table(
        title=f"{where}:\nlargest error against PyTorch, {counted(first.num_cases, 'input shape')}",
        title_justify="left",
        box=SIMPLE,
        pad_edge=False,
        padding=(0, 0, 0, 1),
    )
    table.add_column("embeddings\nin", no_wrap=True)
    headings = (
        "model\nhidden",
        "1 -\ncosine",
        "att.\nhidden",
        "layer\noutputs",
        "contr.\nsum",
        "alone\n= batch",
    )
    for heading in (*headings, "\nverdict"):
        table.add_column(heading, justify="right", no_wrap=True)
    for check in checks:
        verdict = "[green]passed[/]" if check.passed else "[red]FAILED[/]"
        table.add_row(precision_name(check.precision), *_cells(check), verdict)
    click.echo()
    make_console(markup=True).print(table)


def _cells(check: "EngineCheck") -> list[str]:
    from attnlens.v1.manifest_pb2 import GateKind, OutputRole  # noqa: PLC0415 - heavy

    hidden, embedding = OutputRole.OUTPUT_ROLE_LAST_HIDDEN_STATE, OutputRole.OUTPUT_ROLE_EMBEDDING
    errors = {(figure.graph, figure.role): figure for figure in check.figures}
    model, attention = (errors.get((graph, hidden)) for graph in ("embeddings", "attention"))
    layers = [
        figure.max_abs_error
        for (graph, role), figure in errors.items()
        if graph == "attention" and role != hidden
    ]
    found = [
        model and model.max_abs_error,
        model and 1 - model.min_cosine,
        attention and attention.max_abs_error,
        max(layers, default=None),
        _found(check.gates, GateKind.GATE_KIND_MAX_INCOMPLETENESS),
        _found(check.gates, GateKind.GATE_KIND_MAX_BATCH_DIFFERENCE, embedding),
    ]
    return ["-" if value is None else f"{value:.1e}" for value in found]


def _found(
    gates: Sequence["Gate"],
    kind: "GateKind.ValueType",
    role: "OutputRole.ValueType | None" = None,
    text_kind: str = "",
) -> float | None:
    """Return what was found of a gate; None where there is none."""
    values = [
        gate.value
        for gate in gates
        if (gate.kind, gate.text_kind) == (kind, text_kind) and role in (None, gate.role)
    ]
    return values[0] if values else None


def _show_texts(checks: Sequence["EngineCheck"]) -> None:
    """Print mean and smallest cosine of each kind of text, two columns for each precision."""
    from rich.box import SIMPLE  # noqa: PLC0415 - heavy
    from rich.table import Table  # noqa: PLC0415 - heavy

    from attnlens.v1.manifest_pb2 import GateKind  # noqa: PLC0415 - heavy
    from attnlens_cli.show.console import make_console  # noqa: PLC0415 - heavy
    from attnlens_export.engines.measure import precision_name  # noqa: PLC0415 - heavy

    kinds = (GateKind.GATE_KIND_MEAN_COSINE, GateKind.GATE_KIND_MIN_COSINE)
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column("cosine\nwith fp32", no_wrap=True)
    for check in checks:
        table.add_column(f"{precision_name(check.precision)}\nmean", justify="right", no_wrap=True)
        table.add_column("\nsmallest", justify="right", no_wrap=True)
    names = dict.fromkeys(gate.text_kind for check in checks for gate in check.gates if gate.text_kind)
    for name in names:
        found = [_found(check.gates, kind, text_kind=name) for check in checks for kind in kinds]
        table.add_row(name, *("-" if value is None else f"{value:.6f}" for value in found))
    limits = [_limit(check.gates, kind) for check in checks for kind in kinds]
    table.add_row("gate, for each", *(f"{limit:g}" for limit in limits))
    make_console(markup=True).print(table)


def _limit(gates: Sequence["Gate"], kind: "GateKind.ValueType") -> float:
    [limit, *_] = [gate.limit for gate in gates if gate.kind == kind and gate.text_kind] or [float("nan")]
    return limit


def show_stated(manifest: "Manifest") -> None:
    """Print a line for what the manifest says of engines that were measured before."""
    from attnlens_export.engines.measure import precision_name  # noqa: PLC0415 - heavy

    for check in manifest.engine_checks:
        verdict = "passed" if check.passed else "FAILED"
        click.echo(
            f"stated of {check.engine} {check.version} on {check.device} in "
            f"{precision_name(check.precision)}, not measured again: {verdict}"
        )


def engines_as_json(summary: "EngineSummary") -> dict[str, Any]:
    """Return what was measured, and what was not, as JSON values."""
    return {
        "engine_checks": [result.to_json() for result in summary.results],
        "precisions_not_measured": [
            {"precision": missing.precision, "reason": missing.reason} for missing in summary.not_measured
        ],
    }


def raise_engine_failures(summary: "EngineSummary") -> None:
    """Raise ClickException with the first failure and what it means for a server."""
    failures = summary.failures()
    if failures:
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        raise click.ClickException(f"failed in {failures[0]}{more}; a server with that refuses to start")
