"""Output of `export`, `check` and `layout`: measurements of a bundle, failures, and what was written."""
# ruff: noqa: PLC0415 - rich and attnlens_export are imported by the functions, so that `--help` is fast

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from attnlens_cli.printable import counted

if TYPE_CHECKING:
    from attnlens.v1.manifest_pb2 import Manifest
    from attnlens_export.check import CheckSummary
    from attnlens_export.contents import Verdict
    from attnlens_export.engines.measure import EngineSummary
    from attnlens_export.faithfulness.measure import FaithfulnessResult
    from attnlens_export.judge.result import PublisherResult
    from attnlens_export.layouts import LayoutSummary
    from attnlens_export.results import Comparison, Result

_MAX_FAILURES = 3  # an invalid graph fails on every input shape
_MAX_NAMED = 3
_POOLER = re.compile(r"(^|\.)pooler\.")
# Does not match the last layer of a masked language model's head, which is also called decoder.
_DECODER = re.compile(r"(^|\.)decoder\.\w+\.")
_HEAD = re.compile(r"(^|\.)(cls|decoder|qa_outputs|vocab_\w+|\w*(classifier|head|predictions|projection))\.")


def show_verdict(verdict: "Verdict", title: str) -> None:
    """Print the figures of all graphs, each with the inputs that are closest to its limit, and remarks."""
    results = verdict.results.values()
    rows = [row for result in results for row in result.worst()]
    graphs = list(dict.fromkeys(row.graph for row in rows))
    rows.sort(key=lambda row: graphs.index(row.graph))
    _show_comparisons(f"{title}, {verdict.parity.inputs}", rows)
    for result in results:
        for remark in result.remarks:
            click.echo(remark)


def _show_comparisons(title: str, comparisons: "Iterable[Comparison]") -> None:
    """Print one row per figure, grouped by graph."""
    from rich.markup import escape

    from attnlens_cli.show.console import make_console, make_table

    table = make_table(escape(title), ("graph and figure",), ("value", "limit", "verdict"))
    for graph, group in groupby(comparisons, lambda comparison: comparison.graph):
        if graph:
            table.add_row(graph.rpartition("/")[2])  # the file name, so that the table fits 80 columns
        for comparison in group:
            _, name, _, value, limit, verdict = comparison.cells()
            kind = f", {comparison.text_kind}" if comparison.text_kind else ""
            table.add_row(f"  {escape(name + kind)}", value, limit, _colored(verdict))
    make_console(markup=True).print(table)


def _show_results(title: str, results: "Mapping[str, Result]") -> None:
    """Print one row per result, with the value closest to its limit for each kind of gate."""
    from rich.markup import escape

    from attnlens_cli.show.console import make_console, make_table
    from attnlens_export.results import closest, kind_name

    values = {
        label: {found.kind: found.shown_value for found in closest(result.comparisons, lambda row: row.kind)}
        for label, result in results.items()
    }
    kinds = sorted({kind for row in values.values() for kind in row if kind})
    names = [kind_name(kind).replace("_", "\n") for kind in kinds]
    table = make_table(escape(title), ("",), (*names, "verdict"))
    for label, row in values.items():
        verdict = "passed" if results[label].passed else "FAILED"
        table.add_row(escape(label), *(row.get(kind, "-") for kind in kinds), _colored(verdict))
    click.echo()
    make_console(markup=True).print(table)


def _colored(verdict: str) -> str:
    return f"[green]{verdict}[/]" if verdict == "passed" else f"[red]{verdict}[/]"


def raise_parity_failure(verdict: "Verdict") -> None:
    """Raise ClickException with the worst failure if a gate was not met."""
    if not verdict.passed:
        raise click.ClickException(verdict.describe_failure())


def show_publisher(result: "PublisherResult") -> None:
    """Print the comparison with the publisher's pipeline, and what was not compared."""
    if result.comparisons:
        click.echo()
        _show_comparisons(f"Served bundle against {result.implementation}", result.comparisons)
    for line in result.not_compared:
        click.echo(f"not compared with the publisher's results: {line}")


def raise_publisher_failure(result: "PublisherResult") -> None:
    """Raise ClickException with the first failure, if there is one."""
    from attnlens_export.results import describe_first

    if failures := result.failures():
        first = describe_first(failures)
        raise click.ClickException(f"the bundle differs from {result.implementation}: {first}")


def raise_differences(differences: Sequence[str]) -> None:
    """Raise ClickException with the first field of the manifest that differs, if there is one."""
    from attnlens_export.results import describe_first

    if differences:
        first = describe_first(differences)
        raise click.ClickException(f"the manifest is wrong: {first}. Export the bundle again")


def _print_failures(failures: Sequence[str], prefix: str = "") -> None:
    for line in failures[:_MAX_FAILURES]:
        click.echo(line)
    if len(failures) > _MAX_FAILURES:
        click.echo(f"{prefix}{len(failures) - _MAX_FAILURES} more failures, see --json")


def show_engines(summary: "EngineSummary") -> None:
    """Print one row per precision, failures, and precisions that were not measured."""
    if summary.results:
        check = summary.results[0].check
        where = f"{check.engine} {check.version} on {check.device}, {check.processor}"
        inputs = f"{counted(check.num_cases, 'input shape')}, {counted(check.num_texts, 'text')}"
        _show_results(f"{where}:\n{inputs}", {result.precision: result for result in summary.results})
    for missing in summary.not_measured:
        click.echo(f"{missing.precision} was not measured: {missing.reason}")
    _print_failures(summary.failures())
    if summary.results:
        click.echo("These figures are now in the bundle's report and manifest.")


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
    from attnlens_export.results import describe_first

    if failures := summary.failures():
        first = describe_first(failures)
        raise click.ClickException(f"failed in {first}; a server with this setting refuses to start")


def show_runtimes(summary: "CheckSummary") -> None:
    """Print one row per runtime and precision, then failures and missing runtimes."""
    if summary.runtimes:
        labels = {f"{result.name} {result.precision}": result for result in summary.runtimes}
        _show_results("In other runtimes: the values closest to their limits", labels)
    for result in summary.runtimes:
        click.echo(f"{result.label}: version {result.version}, {result.inputs}")
        _print_failures(result.failures(), f"{result.label}: ")
    for missing in summary.missing:
        click.echo(missing.reason)


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
