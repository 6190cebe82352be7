"""The parity report: every case as JSON, and a page to read."""

import dataclasses
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnlens.bundle import describe_file, write_manifest
from attnlens.v1.manifest_pb2 import Manifest, ParityFigure
from attnlens_export.contents import PRECISIONS
from attnlens_export.contributions.result import ContributionsResult
from attnlens_export.graph.names import role_name
from attnlens_export.json_files import finite, read_object, write_json
from attnlens_export.manifest import tool_versions
from attnlens_export.parity.grid import Case
from attnlens_export.parity.result import (
    REFERENCE_ERROR_RATIO,
    TOLERANCE,
    Invariants,
    Measurement,
    ParityResult,
    max_or_nan,
    worst,
)
from attnlens_export.precision import GraphResult, Table
from attnlens_export.runtimes.result import MIN_COSINE, RuntimeResult
from attnlens_export.verdict import Verdict
from attnlens_runtimes import FP32

WIDTH = 110
REPORT_JSON, REPORT_PAGE = "parity/report.json", "parity/report.md"


def write_report(directory: Path, verdict: Verdict, model_name: str) -> None:
    """Write `report.json` and `report.md` to `directory`."""
    versions = tool_versions()
    content = report_content(verdict) | {"model": model_name, "tool_versions": versions}
    write_json(directory / "report.json", content)
    text = _page(verdict, model_name, versions)
    (directory / "report.md").write_text(text, encoding="utf-8")


def add_section(directory: Path, manifest: Manifest, key: str, content: object, section: str) -> None:
    """Write what was measured after the export into a bundle's report, and the manifest with the new hashes.

    Args:
        directory: the bundle.
        manifest: its manifest, which already states what was measured.
        key: of the content in `report.json`; one that is there is replaced.
        content: JSON values.
        section: of `report.md`, from its heading on; one with the same heading is replaced.
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


def report_content(verdict: Verdict) -> dict[str, Any]:
    """Return every measurement as JSON values; a NaN or an infinity becomes null."""
    content = _parity_content(verdict.parity)
    content |= {"passed": verdict.passed, "failures": verdict.failures()}
    content["long_context"] = verdict.long_context.as_json() if verdict.long_context else None
    content["repeats"] = verdict.repeats.as_json() if verdict.repeats else None
    content |= dict.fromkeys((ContributionsResult.name, *PRECISIONS))
    return content | {result.name: result.as_json() for result in verdict.further}


def runtime_content(result: RuntimeResult) -> dict[str, Any]:
    """Return every measurement in one runtime as JSON values."""
    content = _parity_content(result.parity)
    if result.precision != FP32:
        del content["tolerance"], content["reference_error_ratio"]
        content["min_cosine_allowed"] = MIN_COSINE
    head = {
        "name": result.name,
        "version": result.version,
        "precision": result.precision,
        "stops": result.stops,
        "contributions": [finite(dataclasses.asdict(case)) for case in result.contributions],
    }
    return content | head | {"passed": result.passed, "failures": result.failures()}


def _parity_content(result: ParityResult) -> dict[str, Any]:
    return {
        "passed": result.passed,
        "tolerance": TOLERANCE,
        "reference_error_ratio": REFERENCE_ERROR_RATIO,
        "reference": result.reference_name,
        "max_position_embeddings": result.max_tokens,
        "longest_input_tokens": {
            f"{graph} {role}": max(measurement.case.length for measurement in group)
            for (graph, role), group in result.by_role().items()
        },
        "failures": result.failures(),
        "left_out": [{"graph": graph, **_case(case)} for graph, case in result.left_out()],
        "measurements": [_as_json(measurement) for measurement in result.measurements],
        "invariants": [_as_json(invariants) for invariants in result.invariants],
    }


def _as_json(found: Measurement | Invariants) -> dict[str, Any]:
    values = dataclasses.asdict(found)
    del values["case"]
    return _case(found.case) | {key: finite(value) for key, value in values.items()}


def _case(case: Case) -> dict[str, Any]:
    return {"batch_size": case.batch_size, "length": case.length, "padding": case.padding.value}


def _page(verdict: Verdict, model_name: str, versions: Mapping[str, str]) -> str:
    result = verdict.parity
    summary = (
        f"{len(result.cases)} input shapes (batch size x length x padding), random ids, ONNX Runtime on the\n"
        f"CPU against the PyTorch encoder (weights: {result.reference_name}) in fp32 and in float64,\n"
        f"live tokens only. An error passes that is at most {TOLERANCE:g}, or at most "
        f"{REFERENCE_ERROR_RATIO:g} times the error\nthat PyTorch in fp32 itself has against float64 "
        "on the same input."
    )
    sections = [
        f"# Parity of {model_name}: {'passed' if verdict.passed else 'FAILED'}",
        summary,
        "## Worst errors of any shape",
        _figures_table(list(verdict.to_message().figures)),
        "## Where the worst are",
        "\n".join(f"- {_worst_line(worst(group))}" for group in result.by_role().values()),
        "## What holds for any encoder",
        _invariants_list(result),
        *(["## Longer inputs", f"{verdict.long_context.describe()}."] if verdict.long_context else []),
        *(["## Repeated runs", f"{verdict.repeats.describe()}."] if verdict.repeats else []),
        *(text for found in verdict.further for text in _graph_section(found)),
        "## Versions",
        "\n".join(f"- {name} {version}" for name, version in versions.items()),
    ]
    if not verdict.passed:
        sections[2:2] = ["## Failures", "\n".join(f"- {line}" for line in verdict.failures())]
    return "\n\n".join(sections) + "\n"


def _graph_section(result: GraphResult) -> list[str]:
    table = result.table()
    texts = [f"## {result.title}", textwrap.fill(f"{table.caption}.", WIDTH), _markdown(table)]
    return [text for text in [*texts, "\n".join(f"- {remark}" for remark in table.remarks)] if text]


def _markdown(table: Table) -> str:
    if not table.headings:
        return ""
    lines = (table.headings, ("---",) * len(table.headings), *table.rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _figures_table(figures: list[ParityFigure]) -> str:
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


def _worst_line(found: Measurement) -> str:
    return (
        f"{found.graph}, {found.case}: {found.worst_output}{list(found.worst_index)} is "
        f"{found.worst_values[0]:.8g}, PyTorch has {found.worst_values[1]:.8g}: "
        f"{found.max_abs_error:.2e}, allowed {found.allowed_error:.2e}"
    )


def _invariants_list(result: ParityResult) -> str:
    row_sum = max_or_nan(found.row_sum_error for found in result.invariants)
    masked = max_or_nan(found.masked_weight for found in result.invariants)
    empty = max_or_nan(found.empty_row_weight for found in result.invariants)
    alone = max_or_nan(found.max_batch_difference for found in result.measurements)
    finite = all(found.finite for found in result.invariants)
    return "\n".join(
        [
            f"- attention rows of live tokens sum to 1 within {row_sum:.1e}",
            f"- attention on masked tokens is at most {masked:g}",
            f"- attention in a text of nothing but padding is at most {empty:g}",
            f"- a text alone and in a batch differ by at most {alone:.1e}",
            f"- every output is finite: {'yes' if finite else 'NO'}",
            f"- {result.describe_lengths()}",
            *(f"- {graph} at {case}: not compared, too large" for graph, case in result.left_out()),
        ]
    )
