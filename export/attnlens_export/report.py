"""The parity report: every case as JSON, and a page to read."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnlens.v1.manifest_pb2 import ParityFigure
from attnlens_export.json_files import write_json
from attnlens_export.result import (
    REFERENCE_ERROR_RATIO,
    TOLERANCE,
    Invariants,
    Measurement,
    ParityResult,
    worst,
)


def write_report(directory: Path, result: ParityResult, model_name: str, versions: Mapping[str, str]) -> None:
    """Write `report.json` and `report.md` to `directory`."""
    content = report_content(result) | {"model_name": model_name, "tool_versions": dict(versions)}
    write_json(directory / "report.json", content)
    text = _page(result, model_name, versions)
    (directory / "report.md").write_text(text, encoding="utf-8")


def report_content(result: ParityResult) -> dict[str, Any]:
    """Return every measurement as JSON values; a NaN or an infinity becomes null."""
    return {
        "passed": result.passed,
        "tolerance": TOLERANCE,
        "reference_error_ratio": REFERENCE_ERROR_RATIO,
        "reference": result.reference_name,
        "failures": result.failures(),
        "measurements": [_as_json(each) for each in result.measurements],
        "invariants": [_as_json(each) for each in result.invariants],
    }


def _as_json(found: Measurement | Invariants) -> dict[str, Any]:
    values = dataclasses.asdict(found)
    case = values.pop("case")
    return {"batch_size": case["batch_size"], "length": case["length"], "padding": case["padding"].value} | {
        key: _finite(value) for key, value in values.items()
    }


def _finite(value: Any) -> Any:  # noqa: ANN401 - a field of a measurement
    if isinstance(value, tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _page(result: ParityResult, model_name: str, versions: Mapping[str, str]) -> str:
    verdict = "passed" if result.passed else "FAILED"
    sections = [
        f"# Parity of {model_name}: {verdict}",
        f"{len(result.cases)} input shapes (batch size x length x padding), random ids, ONNX Runtime on the CPU "
        f"against the PyTorch encoder (weights: {result.reference_name}) in fp32 and in float64. Live tokens only.",
        f"An error passes that is at most {TOLERANCE:g}, or at most {REFERENCE_ERROR_RATIO:g} times the error that "
        "PyTorch in fp32 itself has against float64 on the same input.",
        "## Worst errors of any shape",
        _figures_table(list(result.to_message().figures)),
        "## Where the worst are",
        "\n".join(f"- {_worst_line(worst(group))}" for group in result.by_output().values()),
        "## What holds exactly",
        _invariants_list(result),
        "## Versions",
        "\n".join(f"- {name} {version}" for name, version in versions.items()),
    ]
    if not result.passed:
        sections[2:2] = ["## Failures", "\n".join(f"- {line}" for line in result.failures())]
    return "\n\n".join(sections) + "\n"


def _figures_table(figures: list[ParityFigure]) -> str:
    rows = [
        "| graph | output | ONNX - PyTorch | ONNX - float64 | PyTorch - float64 | mean | p99 | 1 - cosine |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows += [
        f"| {each.graph} | {each.output} | {each.max_abs_error:.2e} | {each.max_abs_error_float64:.2e} | "
        f"{each.torch_abs_error_float64:.2e} | {each.mean_abs_error:.2e} | {each.p99_abs_error:.2e} | "
        f"{1 - each.min_cosine:.1e} |"
        for each in figures
    ]
    return "\n".join(rows)


def _worst_line(found: Measurement) -> str:
    return (
        f"{found.graph}, {found.case}: {found.worst_output}{list(worst.worst_index)} is "
        f"{found.worst_values[0]:.8g}, PyTorch has {found.worst_values[1]:.8g}: "
        f"{found.max_abs_error:.2e}, allowed {found.allowed_error:.2e}"
    )


def _invariants_list(result: ParityResult) -> str:
    invariants = result.invariants
    alone = max(each.alone_error for each in result.measurements)
    return "\n".join(
        [
            f"- attention rows of live tokens sum to 1 within {max(each.row_sum_error for each in invariants):.1e}",
            f"- attention on masked tokens: at most {max(each.masked_weight for each in invariants):g}",
            f"- attention in a text of nothing but padding: {max(each.empty_row_weight for each in invariants):g}",
            f"- a text alone and in a batch differ by at most {alone:.1e}",
            f"- every output is finite: {'yes' if all(each.finite for each in invariants) else 'NO'}",
        ]
    )
