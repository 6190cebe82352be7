"""Output of `export`, `check` and `layout`: measurements of a bundle, failures, and what was written."""
# ruff: noqa: PLC0415 - rich and attnlens_export are imported by the functions, so that `--help` is fast

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from attnlens_cli.printable import counted

if TYPE_CHECKING:
    from rich.table import Table

    from attnlens.v1.manifest_pb2 import EngineCheck, Gate, GateKind, Manifest, OutputRole, ParityFigure
    from attnlens_export.check import CheckSummary
    from attnlens_export.contents import Verdict
    from attnlens_export.engines.measure import EngineSummary
    from attnlens_export.faithfulness.measure import FaithfulnessResult
    from attnlens_export.judge.result import PublisherResult
    from attnlens_export.layouts import LayoutSummary
    from attnlens_export.runtimes import RuntimeResult

_MAX_FAILURES = 3  # an invalid graph fails on every input shape
_MAX_NAMED = 3
_POOLER = re.compile(r"(^|\.)pooler\.")
# Does not match the last layer of a masked language model's head, which is also called decoder.
_DECODER = re.compile(r"(^|\.)decoder\.\w+\.")
_HEAD = re.compile(r"(^|\.)(cls|decoder|qa_outputs|vocab_\w+|\w*(classifier|head|predictions|projection))\.")


def show_verdict(verdict: "Verdict", title: str) -> None:
    """Print the parity of each graph output, and the measurements of additional graphs."""
    from attnlens_cli.show.console import make_console, make_table

    console = make_console(markup=True)
    console.print(_parity_table(verdict, title))
    for result in verdict.further:
        content = result.table()
        if content.headings:
            table = make_table("", content.headings[:1], content.headings[1:])
            for row in content.rows:
                table.add_row(*row)
            click.echo(content.caption)
            console.print(table)
        for remark in content.remarks:
            click.echo(remark)


def _parity_table(verdict: "Verdict", title: str) -> "Table":
    """Return the largest errors of each graph output."""
    from rich.markup import escape

    from attnlens_cli.show.console import make_table
    from attnlens_export.graph.names import role_name
    from attnlens_export.parity.measure import summarize

    parity = verdict.parity
    headings = ("vs\ntorch", "vs\nfloat64", "torch vs\nfloat64", "p99", "1 -\ncosine", "verdict")
    table = make_table(f"{escape(title)}, {len(parity.cases)} input shapes", ("output of graph",), headings)
    last_graph = ""
    for (graph, role), errors in parity.by_role().items():
        if graph != last_graph:
            table.add_row(graph.rpartition("/")[2])  # the file name, so that the table fits 80 columns
            last_graph = graph
        passed = all(error.passed for error in errors)
        table.add_row(f"  {role}", *_parity_cells(summarize(errors)), _verdict(passed=passed))
    for result in verdict.precisions:
        for figure in result.manifest_figures():
            table.add_row(result.path.rpartition("/")[2])
            cells = _parity_cells(figure)
            table.add_row(f"  {role_name(figure.role)}", *cells, _verdict(passed=result.passed))
    captions = [parity.describe_lengths()]
    if verdict.long_context:
        captions.append(verdict.long_context.describe())
    if verdict.repeats:
        captions.append(verdict.repeats.describe())
    if left_out := parity.left_out():
        cases = ", ".join(f"{graph} at {case}" for graph, case in left_out)
        captions.append(f"not compared, too large: {cases}")
    table.caption, table.caption_justify = "\n".join(captions), "left"
    return table


def _parity_cells(figure: "ParityFigure") -> list[str]:
    errors = (
        figure.max_abs_error,
        figure.max_abs_error_float64,
        figure.torch_max_abs_error_float64,
        figure.p99_abs_error,
    )
    return [*(f"{error:.1e}" for error in errors), f"{1 - figure.min_cosine:.0e}"]


def _verdict(*, passed: bool) -> str:
    return "[green]passed[/]" if passed else "[red]FAILED[/]"


def raise_parity_failure(verdict: "Verdict") -> None:
    """Raise ClickException with the worst failure if a gate was not met."""
    if not verdict.passed:
        raise click.ClickException(verdict.describe_failure())


def show_publisher(result: "PublisherResult") -> None:
    """Print the comparison with the publisher's pipeline, and what was not compared."""
    from rich.markup import escape

    from attnlens_cli.show.console import make_console, make_table

    if result.comparisons:
        headings = ("texts", "largest difference", "limit", "verdict")
        table = make_table(f"Served bundle against {result.implementation}", ("result",), headings)
        for comparison in result.comparisons:
            numbers = ("equal" if comparison.passed else f"{comparison.max_abs_error:.0f} differ", "equal")
            if comparison.limit:
                numbers = (f"{comparison.max_abs_error:.1e}", f"{comparison.limit:.1e}")
            texts, verdict = str(comparison.num_texts), _verdict(passed=comparison.passed)
            table.add_row(escape(comparison.result), texts, *numbers, verdict)
        click.echo()
        make_console(markup=True).print(table)
    for line in result.not_compared:
        click.echo(f"not compared with the publisher's results: {line}")


def raise_publisher_failure(result: "PublisherResult") -> None:
    """Raise ClickException with the first failure, if there is one."""
    if failures := result.failures():
        raise click.ClickException(f"the bundle differs from {result.implementation}: {_first(failures)}")


def raise_differences(differences: Sequence[str]) -> None:
    """Raise ClickException with the first field of the manifest that differs, if there is one."""
    if differences:
        raise click.ClickException(f"the manifest is wrong: {_first(differences)}. Export the bundle again")


def _first(failures: Sequence[str]) -> str:
    more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
    return f"{failures[0]}{more}"


def _print_failures(failures: Sequence[str], prefix: str = "") -> None:
    for line in failures[:_MAX_FAILURES]:
        click.echo(line)
    if len(failures) > _MAX_FAILURES:
        click.echo(f"{prefix}{len(failures) - _MAX_FAILURES} more failures, see --json")


def show_engines(summary: "EngineSummary") -> None:
    """Print errors on the parity grid, cosines of texts, failures, and precisions that were not measured."""
    checks = [result.to_message() for result in summary.results]
    if checks:
        _show_grid(checks)
        if any(check.num_texts for check in checks):
            _show_texts(checks)
    for missing in summary.not_measured:
        click.echo(f"{missing.precision} was not measured: {missing.reason}")
    _print_failures(summary.failures())
    if checks:
        click.echo("These figures are now in the bundle's report and manifest.")


def _show_grid(checks: Sequence["EngineCheck"]) -> None:
    from rich.markup import escape

    from attnlens_cli.show.console import make_console, make_table
    from attnlens_export.engines.measure import precision_name

    first = checks[0]
    where = escape(f"{first.engine} {first.version} on {first.device}, {first.processor}")
    columns = ("\nlogits", "model\nhidden") if _is_classifier(first) else ("model\nhidden", "1 -\ncosine")
    table = make_table(
        f"{where}:\nlargest error against PyTorch, {counted(first.num_cases, 'input shape')}",
        (f"{'logits' if _is_classifier(first) else 'embeddings'}\nin",),
        (
            *columns,
            "att.\nhidden",
            "layer\noutputs",
            "contr.\nsum",
            "alone\n= batch",
            "\nverdict",
        ),
    )
    for check in checks:
        table.add_row(precision_name(check.precision), *_engine_cells(check), _verdict(passed=check.passed))
    click.echo()
    make_console(markup=True).print(table)


def _is_classifier(check: "EngineCheck") -> bool:
    from attnlens.v1.manifest_pb2 import OutputRole

    return any(gate.role == OutputRole.OUTPUT_ROLE_LOGITS for gate in check.gates)


def _engine_cells(check: "EngineCheck") -> list[str]:
    from attnlens.v1.manifest_pb2 import GateKind, OutputRole

    hidden, is_classifier = OutputRole.OUTPUT_ROLE_LAST_HIDDEN_STATE, _is_classifier(check)
    role = OutputRole.OUTPUT_ROLE_LOGITS if is_classifier else OutputRole.OUTPUT_ROLE_EMBEDDING
    figures = {(figure.graph, figure.role): figure for figure in check.figures}
    model, attention = (figures.get((graph, hidden)) for graph in ("embeddings", "attention"))
    layers = [
        figure.max_abs_error
        for (graph, role), figure in figures.items()
        if graph == "attention" and role != hidden
    ]
    logits = figures.get(("logits", role))
    values = [
        *([logits and logits.max_abs_error] if is_classifier else []),
        model and model.max_abs_error,
        *([] if is_classifier else [model and 1 - model.min_cosine]),
        attention and attention.max_abs_error,
        max(layers, default=None),
        _gate_value(check.gates, GateKind.GATE_KIND_MAX_INCOMPLETENESS),
        _gate_value(check.gates, GateKind.GATE_KIND_MAX_BATCH_DIFFERENCE, role),
    ]
    return ["-" if value is None else f"{value:.1e}" for value in values]


def _gate_value(
    gates: Sequence["Gate"],
    kind: "GateKind.ValueType",
    role: "OutputRole.ValueType | None" = None,
    text_kind: str = "",
) -> float | None:
    """Return the measured value of the first matching gate, or None."""
    values = (
        gate.value
        for gate in gates
        if (gate.kind, gate.text_kind) == (kind, text_kind) and role in (None, gate.role)
    )
    return next(values, None)


def _show_texts(checks: Sequence["EngineCheck"]) -> None:
    """Print the agreement with fp32 by kind of text, two columns per precision."""
    from attnlens.v1.manifest_pb2 import GateKind
    from attnlens_cli.show.console import make_console, make_table
    from attnlens_export.engines.measure import precision_name

    kinds = (GateKind.GATE_KIND_MEAN_COSINE, GateKind.GATE_KIND_MIN_COSINE)
    title, columns = "cosine\nwith fp32", ("mean", "smallest")
    if _is_classifier(checks[0]):
        kinds = (GateKind.GATE_KIND_MIN_RANK_AGREEMENT, GateKind.GATE_KIND_MAX_LOGIT_ERROR)
        title, columns = "logits\nand fp32", ("ranks", "error")
    headings = [
        heading
        for check in checks
        for heading in (f"{precision_name(check.precision)}\n{columns[0]}", f"\n{columns[1]}")
    ]
    table = make_table("", (title,), headings)
    names = dict.fromkeys(gate.text_kind for check in checks for gate in check.gates if gate.text_kind)
    for name in names:
        values = [_gate_value(check.gates, kind, text_kind=name) for check in checks for kind in kinds]
        table.add_row(name, *("-" if value is None else f"{value:.6f}" for value in values))
    limits = [_text_limit(check.gates, kind) for check in checks for kind in kinds]
    table.add_row("gate, for each", *(f"{limit:g}" for limit in limits))
    make_console(markup=True).print(table)


def _text_limit(gates: Sequence["Gate"], kind: "GateKind.ValueType") -> float:
    return next((gate.limit for gate in gates if gate.kind == kind and gate.text_kind), float("nan"))


def show_stated_engines(manifest: "Manifest") -> None:
    """Print the verdicts of earlier engine checks in the manifest."""
    from attnlens_export.engines.measure import precision_name

    for check in manifest.engine_checks:
        verdict = "passed" if check.passed else "FAILED"
        click.echo(
            f"{check.engine} {check.version} on {check.device} in {precision_name(check.precision)}: "
            f"{verdict} according to the manifest, not measured again"
        )


def engines_as_json(summary: "EngineSummary") -> dict[str, Any]:
    """Return the engine checks and the precisions without one as JSON values."""
    return {
        "engine_checks": [result.to_json() for result in summary.results],
        "precisions_not_measured": [
            {"precision": missing.precision, "reason": missing.reason} for missing in summary.not_measured
        ],
    }


def raise_engine_failure(summary: "EngineSummary") -> None:
    """Raise ClickException with the first failure, if there is one."""
    if failures := summary.failures():
        raise click.ClickException(
            f"failed in {_first(failures)}; a server with this setting refuses to start"
        )


def show_runtimes(summary: "CheckSummary") -> None:
    """Print one row per runtime and precision, then failures and missing runtimes."""
    from attnlens_runtimes import FP32

    exact = [result for result in summary.runtimes if result.precision == FP32]
    reduced = [result for result in summary.runtimes if result.precision != FP32]
    if exact:
        _show_runtime_table(
            "In other runtimes, in fp32: largest error against PyTorch",
            ("runtime", "version"),
            [(result.name, result.version, *_exact_cells(result)) for result in exact],
        )
    if reduced:
        _show_runtime_table(
            "In lower precision: 1 - smallest cosine with PyTorch",
            ("runtime", "version", "in"),
            [(result.name, result.version, result.precision, *_reduced_cells(result)) for result in reduced],
        )
    for result in exact:
        if result.logits_error is not None:
            click.echo(f"{result.name}: logits within {result.logits_error:.1e} of PyTorch")
    for result in summary.runtimes:
        _print_failures(result.failures(), f"{result.label}: ")
    for missing in summary.missing:
        click.echo(missing.reason)


def _show_runtime_table(title: str, names: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from attnlens_cli.show.console import make_console, make_table

    headings = ("model\nhidden", "att.\nhidden", "att.\nweights", "contr.\nsum", "\nshapes", "\nverdict")
    table = make_table(title, [f"\n{name}" for name in names], headings)
    for row in rows:
        table.add_row(*row)
    click.echo()
    make_console(markup=True).print(table)


def _exact_cells(result: "RuntimeResult") -> list[str]:
    errors = [*result.worst_errors(), result.incompleteness]
    return [*("-" if error is None else f"{error:.1e}" for error in errors), *_outcome_cells(result)]


def _reduced_cells(result: "RuntimeResult") -> list[str]:
    cosines = ["-" if cosine is None else f"{1 - cosine:.1e}" for cosine in result.min_cosines()]
    error = result.incompleteness
    return [*cosines, "-" if error is None else f"{error:.1e}", *_outcome_cells(result)]


def _outcome_cells(result: "RuntimeResult") -> list[str]:
    return [f"{result.num_cases}/{len(result.parity.cases)}", _verdict(passed=result.passed)]


def runtimes_as_json(summary: "CheckSummary") -> dict[str, Any]:
    """Return the measurements in other runtimes as JSON values. Empty if none were requested."""
    if not summary.runtimes and not summary.missing:
        return {}
    results = [result.to_json() for result in summary.runtimes]
    missing = [{"name": runtime.name, "reason": runtime.reason} for runtime in summary.missing]
    return {"runtimes": results, "missing_runtimes": missing}


def raise_runtime_failure(summary: "CheckSummary") -> None:
    """Raise ClickException with the names of failed runtimes, if there are any."""
    failed = [result for result in summary.runtimes if not result.passed]
    if failed:
        names = ", ".join(result.label for result in failed)
        [first, *_] = [*failed[0].failures(), f"{failed[0].label}: nothing was measured"]
        raise click.ClickException(f"failed in {names}: {first}")


def show_faithfulness(result: "FaithfulnessResult", *, is_recorded: bool = True) -> None:
    """Print one row per method and control, the highest rank correlation first."""
    from attnlens_cli.show.console import make_console, make_table

    table = make_table(
        f"Faithfulness of explanations, {counted(result.num_texts, 'text')} of {result.mean_tokens:.1f} "
        "tokens",
        ("method",),
        ("rank correlation\nwith leave-one-out", "95 %\ninterval", "\ntexts", "deletion\ndifference"),
    )
    for method in result.sorted():
        table.add_row(
            method.name, method.correlation, method.interval, str(method.num_texts), method.deletion
        )
    click.echo()
    make_console(markup=True).print(table)
    if is_recorded:
        click.echo("These figures are now in the bundle's report and manifest. Explanations include them.")


def describe_left_out(names: Iterable[str]) -> str:
    """Return one line that groups the tensors of a checkpoint that its encoder does not use."""
    groups: dict[str, list[str]] = {"pooler": [], "decoder": [], "task head": [], "others": []}
    for name in names:
        groups[_group(name)].append(name)
    parts = "; ".join(_describe_group(group, members) for group, members in groups.items() if members)
    return f"left out because the encoder's outputs do not depend on them: {parts}"


def _group(name: str) -> str:
    for group, pattern in (("pooler", _POOLER), ("decoder", _DECODER), ("task head", _HEAD)):
        if pattern.search(name):
            return group
    return "others"


def _describe_group(group: str, names: list[str]) -> str:
    count = counted(len(names), "tensor")
    # Only unexpected tensors are named. Every BERT has a pooler.
    if group in {"pooler", "decoder"}:
        return f"{group} ({count})"
    rest = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"{group} ({count}: {', '.join(names[:_MAX_NAMED])}{rest})"


def describe_layout(summary: "LayoutSummary", *, link: bool) -> str:
    """Return the contents of a layout tree and the command that starts the server."""
    parts = []
    if summary.num_linked:
        parts.append(
            f"{summary.num_linked} files linked (Python's onnx rejects weights with hard links, including "
            "those of the bundle)"
        )
    if summary.num_copied:
        parts.append(
            f"{summary.num_copied} files copied" + (" (hard links are not possible there)" if link else "")
        )
    parts.append(f"{summary.num_written} written")
    return (
        f"{summary.directory}: {', '.join(summary.models)} for {summary.title}, {', '.join(parts)}\n"
        f"start it with: {summary.start}"
    )
