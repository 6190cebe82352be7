"""The parity report: every case as JSON, and a page to read."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnlens.v1.manifest_pb2 import OutputRole, ParityFigure
from attnlens_export.fp16.result import MIN_COSINE, HalfResult
from attnlens_export.int8.result import Int8Result
from attnlens_export.json_files import write_json
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


def write_report(directory: Path, result: ParityResult, model_name: str) -> None:
    """Write `report.json` and `report.md` to `directory`."""
    versions = tool_versions()
    content = report_content(result) | {"model_name": model_name, "tool_versions": versions}
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
        "max_position_embeddings": result.max_tokens,
        "longest_input_tokens": {
            f"{graph} {output}": max(each.case.length for each in group)
            for (graph, output), group in result.by_output().items()
        },
        "failures": result.failures(),
        "left_out": [{"graph": graph, **_case(case)} for graph, case in result.left_out()],
        "measurements": [_as_json(each) for each in result.measurements],
        "invariants": [_as_json(each) for each in result.invariants],
        "fp16": None if result.half is None else _half_as_json(result.half),
        "int8": None if result.int8 is None else _int8_as_json(result.int8),
    }


def _half_as_json(half: HalfResult) -> dict[str, Any]:
    return {
        "min_cosine_allowed": MIN_COSINE,
        "weights": dataclasses.asdict(half.weights),
        "measurements": [
            {key: _finite(value) for key, value in dataclasses.asdict(each).items()}
            for each in half.measurements
        ],
    }


def _int8_as_json(int8: Int8Result) -> dict[str, Any]:
    values = dataclasses.asdict(int8)
    agreement = {key: _finite(value) for key, value in values["agreement"].items()}
    agreement["kinds"] = {
        kind: {key: _finite(value) for key, value in figures.items()}
        for kind, figures in agreement["kinds"].items()
    }
    values["agreement"] = agreement
    return values | {"alone_error": _finite(int8.alone_error)}


def _as_json(found: Measurement | Invariants) -> dict[str, Any]:
    values = dataclasses.asdict(found)
    del values["case"]
    return _case(found.case) | {key: _finite(value) for key, value in values.items()}


def _case(case: Case) -> dict[str, Any]:
    return {"batch_size": case.batch_size, "length": case.length, "padding": case.padding.value}


def _finite(value: Any) -> Any:  # noqa: ANN401 - a field of a measurement
    if isinstance(value, tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _page(result: ParityResult, model_name: str, versions: Mapping[str, str]) -> str:
    verdict = "passed" if result.passed else "FAILED"
    summary = (
        f"{len(result.cases)} input shapes (batch size x length x padding), random ids, ONNX Runtime on the\n"
        f"CPU against the PyTorch encoder (weights: {result.reference_name}) in fp32 and in float64,\n"
        f"live tokens only. An error passes that is at most {TOLERANCE:g}, or at most "
        f"{REFERENCE_ERROR_RATIO:g} times the error\nthat PyTorch in fp32 itself has against float64 "
        "on the same input."
    )
    sections = [
        f"# Parity of {model_name}: {verdict}",
        summary,
        "## Worst errors of any shape",
        _figures_table(list(result.to_message().figures)),
        "## Where the worst are",
        "\n".join(f"- {_worst_line(worst(group))}" for group in result.by_output().values()),
        "## What holds for any encoder",
        _invariants_list(result),
        *(_half_section(result.half) if result.half else ()),
        *(("## In int8", int8_table(result.int8)) if result.int8 else ()),
        "## Versions",
        "\n".join(f"- {name} {version}" for name, version in versions.items()),
    ]
    if not result.passed:
        sections[2:2] = ["## Failures", "\n".join(f"- {line}" for line in result.failures())]
    return "\n\n".join(sections) + "\n"


def _half_section(half: HalfResult) -> tuple[str, str]:
    text = (
        f"{len(half.measurements)} inputs, each as ONNX Runtime computes it on the CPU and with every fp16\n"
        "result rounded, as a GPU does (the errors above are of the second). The gate is a cosine of\n"
        f"{MIN_COSINE} with PyTorch fp32 for every token, and the range.\n\n"
        f"- smallest cosine: {half.figure().min_cosine:.7f}\n- {half.describe()}"
    )
    return "## In fp16", text


def int8_table(int8: Int8Result) -> str:
    """Return a table in Markdown of the cosines, and a line on the rest."""
    found, gate = int8.agreement, int8.gate
    kinds = "".join(
        f"| {name} | {kind.num_texts} | {kind.mean_cosine:.6f} | {kind.min_cosine:.6f} |\n"
        for name, kind in found.kinds.items()
    )
    return (
        f"{int8.num_texts} texts that it was not calibrated with, against the graph in fp32.\n\n"
        "| cosine | texts | mean | smallest |\n|---|---|---|---|\n"
        f"{kinds}"
        f"| gate, for each | | {gate.min_mean_cosine:g} | {gate.min_cosine:g} |\n"
        f"| all embeddings | {int8.num_texts} | {found.mean_cosine:.6f} | {found.min_cosine:.6f} |\n"
        f"| all token vectors | | {found.mean_token_cosine:.6f} | {found.min_token_cosine:.6f} |\n\n"
        f"- the nearest other text is the same for {found.neighbour_agreement:.1%}\n"
        f"- a text alone and in a batch differ by {int8.alone_error:.1e}"
    )


def _figures_table(figures: list[ParityFigure]) -> str:
    rows = [
        "| graph | output | ONNX - PyTorch | ONNX - float64 | PyTorch - float64 | mean | p99 | 1 - cosine |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for figure in figures:
        errors = (
            figure.max_abs_error,
            figure.max_abs_error_float64,
            figure.torch_abs_error_float64,
            figure.mean_abs_error,
            figure.p99_abs_error,
        )
        cells = [figure.graph, _role(figure.role), *(f"{error:.2e}" for error in errors)]
        rows.append(f"| {' | '.join(cells)} | {1 - figure.min_cosine:.1e} |")
    return "\n".join(rows)


def _role(role: OutputRole.ValueType) -> str:
    return OutputRole.Name(role).removeprefix("OUTPUT_ROLE_").lower()


def _worst_line(found: Measurement) -> str:
    return (
        f"{found.graph}, {found.case}: {found.worst_output}{list(found.worst_index)} is "
        f"{found.worst_values[0]:.8g}, PyTorch has {found.worst_values[1]:.8g}: "
        f"{found.max_abs_error:.2e}, allowed {found.allowed_error:.2e}"
    )


def _invariants_list(result: ParityResult) -> str:
    row_sum = max_or_nan(each.row_sum_error for each in result.invariants)
    masked = max_or_nan(each.masked_weight for each in result.invariants)
    empty = max_or_nan(each.empty_row_weight for each in result.invariants)
    alone = max_or_nan(each.alone_error for each in result.measurements)
    finite = all(each.finite for each in result.invariants)
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
