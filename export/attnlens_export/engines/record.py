"""What was measured in an engine, in a bundle's manifest and report."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from attnlens.bundle import read_manifest
from attnlens.v1.manifest_pb2 import EngineCheck, Gate, GateKind, Precision
from attnlens_export.engines.result import EngineResult, holds, precision_name, precision_number
from attnlens_export.graph.names import role_name
from attnlens_export.json_files import read_object
from attnlens_export.report import REPORT_JSON, add_section

KEY = "engine_checks"
HEADING = "## In other engines"

_Key = tuple[str, Precision.ValueType, str]


def record(directory: Path, results: Iterable[EngineResult]) -> None:
    """Write results into the bundle's report and manifest.

    They take the place of earlier ones of the same engine, precision and device. The manifest changes, and
    with it the version of the model that a server states.
    """
    manifest = read_manifest(directory)
    checks = {_key(check): check for check in manifest.engine_checks}
    described = read_object(directory / REPORT_JSON).get(KEY, [])
    entries = {
        (entry["engine"], precision_number(entry["precision"]), entry["device"]): entry for entry in described
    }
    for result in results:
        checks[_key(result.check)] = result.check
        entries[_key(result.check)] = result.as_json()
    ordered = [check for _, check in sorted(checks.items())]
    manifest.ClearField("engine_checks")
    manifest.engine_checks.extend(ordered)
    add_section(directory, manifest, KEY, [entry for _, entry in sorted(entries.items())], page(ordered))


def _key(check: EngineCheck) -> _Key:
    return check.engine, check.precision, check.device


def page(checks: Iterable[EngineCheck]) -> str:
    """Return a section of the report."""
    head = (
        "The graphs as a server with the engine runs them, against PyTorch on the grid and against ONNX\n"
        "Runtime in fp32 on texts; of each gate the case that came nearest to its limit."
    )
    return "\n\n".join([HEADING, head, *(text for check in checks for text in _described(check))]) + "\n"


def _described(check: EngineCheck) -> Iterator[str]:
    verdict = "passed" if check.passed else "FAILED"
    yield f"### {check.engine}, {check.device}, {precision_name(check.precision)}: {verdict}"
    yield (
        f"{check.engine} {check.version} on {check.processor or check.device}, {check.num_cases} input "
        f"shapes, {check.num_texts} texts."
    )
    rows = ["| graph | of | texts | figure | limit | found | |", "|---|---|---|---|---|---|---|"]
    yield "\n".join([*rows, *map(_row, check.gates)])


def _row(gate: Gate) -> str:
    kind = GateKind.Name(gate.kind).removeprefix("GATE_KIND_").lower().replace("_", " ")
    found = f"{gate.value:.6f}" if "cosine" in kind else f"{gate.value:.1e}"
    verdict = "held" if holds(gate) else "NOT HELD"
    cells = (gate.graph, role_name(gate.role), gate.text_kind, kind, f"{gate.limit:.6g}", found, verdict)
    return f"| {' | '.join(cells)} |"
