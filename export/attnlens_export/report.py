"""Parity report of a bundle: `report.json` with every measurement, and `report.md` for readers."""

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from attnlens.bundle import describe_file, write_manifest
from attnlens.v1.manifest_pb2 import Manifest
from attnlens_export.contents import Verdict
from attnlens_export.json_files import read_object, write_json
from attnlens_export.manifest import tool_versions
from attnlens_export.parity.reference import REFERENCE_ERROR_RATIO, TOLERANCE
from attnlens_export.results import HEADINGS, Comparison, Errors, Result

WIDTH = 110
REPORT_JSON, REPORT_PAGE = "parity/report.json", "parity/report.md"
_SUMMARY = (
    "Input shapes are batch size x length x padding, with random token ids. ONNX Runtime runs the graphs on "
    "the CPU. Padding is not compared. The limit of an error against PyTorch in fp32 is "
    f"{TOLERANCE:g}, or {REFERENCE_ERROR_RATIO:g} times the error of PyTorch in fp32 against float64 on the "
    "same input. Each figure shows the inputs that are closest to its limit."
)


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
    sections = [
        f"# Parity of {model_name}: {'passed' if verdict.passed else 'FAILED'}",
        textwrap.fill(_SUMMARY, WIDTH),
        "## Largest errors",
        _errors_table([errors for result in verdict.results.values() for errors in result.worst_errors()]),
        *(text for result in verdict.results.values() for text in _section(result)),
        "## Versions",
        "\n".join(f"- {name} {version}" for name, version in versions.items()),
    ]
    if not verdict.passed:
        sections[2:2] = ["## Failures", "\n".join(f"- {line}" for line in verdict.failures())]
    return "\n\n".join(sections) + "\n"


def _section(result: Result) -> list[str]:
    caption = f"{result.inputs}, compared with {result.reference}."
    table = comparisons_table(result.worst()) if result.comparisons else ""
    texts = [f"## {result.title}", textwrap.fill(caption, WIDTH), table]
    return [text for text in [*texts, "\n".join(f"- {remark}" for remark in result.remarks)] if text]


def comparisons_table(comparisons: Iterable[Comparison]) -> str:
    """Return comparisons as a Markdown table."""
    return _table(HEADINGS, [comparison.cells() for comparison in comparisons])


def _errors_table(group: Iterable[Errors]) -> str:
    headings = ("graph", "role", "ONNX - PyTorch", "ONNX - float64", "PyTorch - float64", "mean", "p99")
    rows = [
        (
            errors.graph,
            errors.role,
            f"{errors.max_abs_error:.2e}",
            f"{errors.max_abs_error_float64:.2e}",
            f"{errors.torch_max_abs_error_float64:.2e}",
            f"{errors.mean_abs_error:.2e}",
            f"{errors.p99_abs_error:.2e}",
            f"{1 - errors.min_cosine:.1e}",
            errors.worst,
        )
        for errors in group
    ]
    return _table((*headings, "1 - cosine", "largest error"), rows)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = (headings, ("---",) * len(headings), *rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
