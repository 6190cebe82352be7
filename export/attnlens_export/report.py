"""Parity report of a bundle: `report.json` with every measurement, and `report.md` for readers."""

import re
import textwrap
from collections.abc import Mapping
from pathlib import Path

from attnlens.bundle import describe_file, write_manifest
from attnlens.v1.manifest_pb2 import Manifest, ParityFigure
from attnlens_export.contents import Verdict
from attnlens_export.graph.names import role_name
from attnlens_export.json_files import read_object, write_json
from attnlens_export.manifest import tool_versions
from attnlens_export.parity.measure import Measurement, ParityResult, worst
from attnlens_export.parity.reference import REFERENCE_ERROR_RATIO, TOLERANCE
from attnlens_export.results import GraphResult, Table, max_or_nan

WIDTH = 110
REPORT_JSON, REPORT_PAGE = "parity/report.json", "parity/report.md"


def write_report(directory: Path, verdict: Verdict, model_name: str) -> None:
    """Write `report.json` and `report.md` to `directory`."""
    versions = tool_versions()
    content = verdict.to_json() | {"model": model_name, "tool_versions": versions}
    write_json(directory / "report.json", content)
    text = _page(verdict, model_name, versions)
    (directory / "report.md").write_text(text, encoding="utf-8")


def add_section(directory: Path, manifest: Manifest, key: str, content: object, section: str) -> None:
    """Add later measurements to the report of a bundle, and update the hashes in its manifest.

    Args:
        directory: Bundle directory.
        manifest: Manifest that already states the measurements.
        key: Key in `report.json`. An existing value is replaced.
        content: JSON values.
        section: Section of `report.md` with its heading. A section with the same heading is replaced.
    """
    report = read_object(directory / REPORT_JSON)
    write_json(directory / REPORT_JSON, report | {key: content})
    page = directory / REPORT_PAGE
    heading = section.partition("\n")[0]
    sections = re.split(r"^(?=## )", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    kept = [text.rstrip("\n") for text in sections if text.partition("\n")[0] != heading]
    page.write_text("\n\n".join([*kept, section.rstrip("\n")]) + "\n", encoding="utf-8")
    for file in manifest.files:
        if file.path in (REPORT_JSON, REPORT_PAGE):
            file.CopyFrom(describe_file(directory, directory / file.path))
    write_manifest(directory, manifest)


def _page(verdict: Verdict, model_name: str, versions: Mapping[str, str]) -> str:
    parity = verdict.parity
    summary = (
        f"{len(parity.cases)} input shapes (batch size x length x padding) with random token ids: ONNX "
        f"Runtime on the CPU against the PyTorch encoder (weights: {parity.reference_name}) in fp32 and in "
        f"float64. Padding is not compared. The limit of an error is {TOLERANCE:g}, or "
        f"{REFERENCE_ERROR_RATIO:g} times the error of PyTorch in fp32 against float64 on the same input."
    )
    sections = [
        f"# Parity of {model_name}: {'passed' if verdict.passed else 'FAILED'}",
        textwrap.fill(summary, WIDTH),
        "## Worst errors of any shape",
        _errors_table(list(verdict.to_message().figures)),
        "## Location of the worst errors",
        "\n".join(f"- {_worst_line(worst(group))}" for group in parity.by_role().values()),
        "## Properties of every encoder",
        _invariants_list(parity),
        *(["## Longer inputs", f"{verdict.long_context.describe()}."] if verdict.long_context else []),
        *(["## Repeated runs", f"{verdict.repeats.describe()}."] if verdict.repeats else []),
        *(text for result in verdict.further for text in _graph_section(result)),
        "## Versions",
        "\n".join(f"- {name} {version}" for name, version in versions.items()),
    ]
    if not verdict.passed:
        sections[2:2] = ["## Failures", "\n".join(f"- {line}" for line in verdict.failures())]
    return "\n\n".join(sections) + "\n"


def _graph_section(result: GraphResult) -> list[str]:
    table = result.table()
    texts = [f"## {result.title}", textwrap.fill(f"{table.caption}.", WIDTH), _to_markdown(table)]
    return [text for text in [*texts, "\n".join(f"- {remark}" for remark in table.remarks)] if text]


def _to_markdown(table: Table) -> str:
    if not table.headings:
        return ""
    lines = (table.headings, ("---",) * len(table.headings), *table.rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _errors_table(figures: list[ParityFigure]) -> str:
    rows = [
        "| graph | role | ONNX - PyTorch | ONNX - float64 | PyTorch - float64 | mean | p99 | 1 - cosine |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for figure in figures:
        errors = (
            figure.max_abs_error,
            figure.max_abs_error_float64,
            figure.torch_max_abs_error_float64,
            figure.mean_abs_error,
            figure.p99_abs_error,
        )
        cells = [figure.graph, role_name(figure.role), *(f"{error:.2e}" for error in errors)]
        rows.append(f"| {' | '.join(cells)} | {1 - figure.min_cosine:.1e} |")
    return "\n".join(rows)


def _worst_line(measurement: Measurement) -> str:
    return (
        f"{measurement.graph}, {measurement.case}: {measurement.worst_output}{list(measurement.worst_index)} "
        f"is {measurement.worst_values[0]:.8g}, PyTorch returns {measurement.worst_values[1]:.8g}: error "
        f"{measurement.max_abs_error:.2e}, limit {measurement.allowed_error:.2e}"
    )


def _invariants_list(parity: ParityResult) -> str:
    row_sum = max_or_nan(invariants.row_sum_error for invariants in parity.invariants)
    masked = max_or_nan(invariants.masked_weight for invariants in parity.invariants)
    empty = max_or_nan(invariants.empty_row_weight for invariants in parity.invariants)
    batch = max_or_nan(measurement.max_batch_difference for measurement in parity.measurements)
    is_finite = all(invariants.finite for invariants in parity.invariants)
    return "\n".join(
        [
            f"- the attention weights of a token sum to 1 within {row_sum:.1e}",
            f"- the attention weight of masked tokens is at most {masked:g}",
            f"- the attention weight in a text without tokens is at most {empty:g}",
            f"- a text alone and in a batch differ by at most {batch:.1e}",
            f"- all outputs are finite: {'yes' if is_finite else 'NO'}",
            f"- {parity.describe_lengths()}",
            *(f"- {graph} at {case}: not compared, too large" for graph, case in parity.left_out()),
        ]
    )
