"""Check of a bundle in another engine of the server, compiled with the properties that the server uses.

For each precision of the embeddings or logits, the parity grid and texts of several kinds are measured. The
int8 graph, and logits in bf16, have no limits on the grid. The int8 graph is measured on its own texts. Other
graphs are always fp32. The results are written into the manifest and the report of the bundle. A server
refuses to start with a combination that failed.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from attnlens.bundle import read_manifest
from attnlens.openvino import (
    PACKAGE,
    OpenvinoPrecision,
    compile_properties,
    compute_precision,
    multiplies_bf16,
)
from attnlens.v1.manifest_pb2 import EngineCheck, Gate, GateKind, Manifest, ParityFigure, Precision
from attnlens_export.contributions.measure import Completeness, ContributionsResult
from attnlens_export.engines.texts import (
    BF16_LIMITS,
    BF16_LOGITS_LIMITS,
    FP32_LIMITS,
    FP32_LOGITS_LIMITS,
    Limits,
    Texts,
    measure_texts,
)
from attnlens_export.errors import EngineError
from attnlens_export.graph.names import (
    ATTENTIONS_PATH,
    CONTRIBUTIONS_PATH,
    ENCODER_PATH,
    MODEL_PATH,
    embeddings_path,
    role_name,
)
from attnlens_export.graph.parameters import rebuild_encoder
from attnlens_export.int8.result import INT8_PATH
from attnlens_export.json_files import finite, read_object
from attnlens_export.manifest import classifier_ids, rename_graphs
from attnlens_export.parity.grid import Case, default_grid
from attnlens_export.parity.measure import GridMeasurements, Subject, summarize
from attnlens_export.parity.sessions import ProcessGraph
from attnlens_export.progress import Progress, StageProgress, no_progress
from attnlens_export.published.classifier import has_head, num_logits
from attnlens_export.report import REPORT_JSON, add_section
from attnlens_export.results import CheckResult, Figure
from attnlens_export.runtimes import (
    DEFAULT_TIMEOUT_S,
    MIN_COSINE,
    measure_process_logits,
    measure_processes,
)
from attnlens_model import EncoderConfig, read_config
from attnlens_runtimes import (
    RUNTIMES,
    GraphProcess,
    Installed,
    NotInstalledError,
    PythonRuntime,
    RuntimeFailureError,
    Settings,
)

OPENVINO = PACKAGE
PRECISIONS: tuple[OpenvinoPrecision, ...] = ("fp32", "bf16", "int8")
CPU = "CPU"

GRAPHS: dict[OpenvinoPrecision, str] = {"fp32": MODEL_PATH, "bf16": MODEL_PATH, "int8": INT8_PATH}
"""Path of the graph that computes embeddings or logits in a precision."""

KEY = "engine_checks"
HEADING = "## In other engines"
_PRECISION_PREFIX = "PRECISION_"


@dataclass(frozen=True)
class EngineOptions:
    """Options of the check in an engine.

    Attributes:
        precisions: Precisions to measure. Empty for all that the bundle and the processor support.
        device: Device name of the engine.
        timeout_s: Maximum time to open a graph, and for each response, in seconds.
    """

    precisions: Sequence[OpenvinoPrecision] = ()
    device: str = CPU
    timeout_s: float = DEFAULT_TIMEOUT_S


@dataclass(frozen=True)
class NotMeasured:
    """A precision that can't be measured, with the reason."""

    precision: str
    reason: str


@dataclass(frozen=True)
class Engine:
    """OpenVINO on a device.

    Attributes:
        version: Version of the package.
        options: Options of the check.
    """

    version: str
    options: EngineOptions
    _runtime: PythonRuntime

    def open(
        self,
        directory: Path,
        path: str,
        config: EncoderConfig,
        processes: ExitStack,
        precision: OpenvinoPrecision = "fp32",
        max_streams: int = 1,
    ) -> ProcessGraph:
        """Open a graph of the bundle with one thread per core.

        Args:
            directory: Bundle directory.
            path: Path of the graph in the bundle.
            config: Configuration of the encoder.
            processes: Terminates the process of the graph.
            precision: Precision of the embeddings.
            max_streams: Maximum number of streams that the threads are divided into, up to the number of
                threads. A server has several for concurrent batches, and one for a single batch.

        Raises:
            RuntimeFailureError: The engine rejects the graph or uses another precision.
        """
        threads = len(os.sched_getaffinity(0))
        device = self.options.device
        properties = compile_properties(
            device, precision, threads=threads, num_streams=min(max_streams, threads)
        )
        command = self._runtime.command(Settings(properties, device))
        installed = Installed(OPENVINO, self.version, command)
        process = processes.enter_context(GraphProcess(installed, directory / path, self.options.timeout_s))
        expected = compute_precision(device, precision)
        if process.precision != expected:
            raise RuntimeFailureError(f"the engine computes in {process.precision} instead of {expected}")
        return ProcessGraph(path, process, config, num_logits(directory, path))

    def choose(self, directory: Path) -> tuple[list[OpenvinoPrecision], list[NotMeasured]]:
        """Return the precisions to measure and those that are not supported.

        Raises:
            EngineError: The bundle or the processor does not support a requested precision.
        """
        requested = self.options.precisions
        reasons = {precision: self._obstacle(directory, precision) for precision in requested or PRECISIONS}
        supported = [precision for precision, reason in reasons.items() if not reason]
        missing = [NotMeasured(precision, reason) for precision, reason in reasons.items() if reason]
        if requested and missing:
            raise EngineError(
                f"{missing[0].precision} can't be measured: {missing[0].reason}; choose another --precision"
            )
        return supported, missing

    def _obstacle(self, directory: Path, precision: OpenvinoPrecision) -> str:
        """Return the reason why a precision is not supported. Empty if it is."""
        if precision == "int8" and not (directory / INT8_PATH).is_file():
            return "the bundle has no graph in int8"
        if precision == "bf16" and self.options.device == CPU and multiplies_bf16() is False:
            return "this processor has no instructions for bf16 (avx512_bf16 or amx_bf16 in /proc/cpuinfo)"
        if precision == "bf16" and has_head(directory) and not (directory / "tokenizer.json").is_file():
            return "the bundle has no tokenizer, but the accuracy of logits in bf16 is measured on texts"
        return ""


def find_engine(options: EngineOptions | None = None) -> Engine:
    """Return the installed OpenVINO.

    Raises:
        NotInstalledError: OpenVINO is not installed.
    """
    runtime = RUNTIMES[OPENVINO]
    assert isinstance(runtime, PythonRuntime)  # noqa: S101 - its adapter is in Python
    try:
        installed = runtime.find(None)
    except NotInstalledError as error:
        raise NotInstalledError(
            "--engine openvino needs openvino, which is not installed: pip install 'attnlens[openvino]'"
        ) from error
    return Engine(installed.version, options or EngineOptions(), runtime)


@dataclass(frozen=True)
class EngineResult(CheckResult):
    """Measurements in one precision.

    Attributes:
        check: Entry of the manifest without figures, gates and verdict.
        measured: All figures.
        errors: Errors against PyTorch on the grid.
        stops: Reason why the measurement of a graph was interrupted.
        ids: Ids of graphs that differ from those of `graph_id`.
    """

    check: EngineCheck
    measured: tuple[Figure, ...]
    errors: tuple[ParityFigure, ...]
    stops: Mapping[str, str]
    ids: Mapping[str, str] = field(default_factory=dict)

    def gates(self) -> list[Gate]:
        """Return the manifest's gates."""
        gates = super().gates()
        rename_graphs(gates, self.ids)
        return gates

    def figures(self) -> list[Figure]:
        """Return all figures."""
        return list(self.measured)

    def interruptions(self) -> Mapping[str, str]:
        """Return `stops`."""
        return self.stops

    def manifest_figures(self) -> list[ParityFigure]:
        """Return the errors against PyTorch on the grid."""
        return list(self.errors)

    @property
    def precision(self) -> str:
        """Name of the precision, such as `bf16`."""
        return precision_name(self.check.precision)

    def to_message(self) -> EngineCheck:
        """Return the entry of the manifest."""
        message = EngineCheck(gates=self.gates(), figures=self.errors, passed=self.passed)
        message.MergeFrom(self.check)
        return message

    def to_json(self) -> dict[str, Any]:
        """Return all measurements as JSON values. Non-finite numbers become None."""
        return {
            "engine": self.check.engine,
            "version": self.check.version,
            "precision": self.precision,
            "device": self.check.device,
            "processor": self.check.processor,
            "passed": self.passed,
            "failures": self.failures(),
            "num_cases": self.check.num_cases,
            "num_texts": self.check.num_texts,
            "gates": [finite(_gate_to_json(gate)) for gate in self.gates()],
            "figures": [finite(_errors_to_json(figure)) for figure in self.errors],
        }


def _gate_to_json(gate: Gate) -> dict[str, Any]:
    return {
        "graph": gate.graph,
        "role": role_name(gate.role),
        "kind": GateKind.Name(gate.kind).removeprefix("GATE_KIND_").lower(),
        "text_kind": gate.text_kind,
        "limit": gate.limit,
        "value": gate.value,
    }


def _errors_to_json(figure: ParityFigure) -> dict[str, Any]:
    return {
        "graph": figure.graph,
        "role": role_name(figure.role),
        "max_abs_error": figure.max_abs_error,
        "max_abs_error_float64": figure.max_abs_error_float64,
        "torch_max_abs_error_float64": figure.torch_max_abs_error_float64,
        "mean_abs_error": figure.mean_abs_error,
        "p99_abs_error": figure.p99_abs_error,
        "min_cosine": figure.min_cosine,
        "longest_input_tokens": figure.longest_input_tokens,
    }


@dataclass(frozen=True)
class EngineSummary:
    """Result of the check in all precisions.

    Attributes:
        results: Results of the measured precisions, passed or failed.
        not_measured: Precisions that are not supported.
    """

    results: tuple[EngineResult, ...]
    not_measured: tuple[NotMeasured, ...]

    def failures(self) -> list[str]:
        """Return one line per failure, with its precision."""
        return [
            f"{result.check.engine} in {result.precision}: {line}"
            for result in self.results
            for line in result.failures()
        ]


def precision_name(precision: Precision.ValueType) -> str:
    """Return the name of a precision in options, such as `bf16`."""
    return Precision.Name(precision).removeprefix(_PRECISION_PREFIX).lower()


def precision_number(name: str) -> Precision.ValueType:
    """Return the number of a precision in the manifest."""
    return Precision.Value(f"{_PRECISION_PREFIX}{name.upper()}")


class _Part(NamedTuple):
    """Result of one measurement."""

    figures: Sequence[Figure] = ()
    errors: Sequence[ParityFigure] = ()
    stops: Mapping[str, str] = {}


def measure_engine(
    directory: Path,
    engine: Engine,
    *,
    parity_tokens: int | None = None,
    grid: Sequence[Case] | None = None,
    progress: Progress = no_progress,
) -> EngineSummary:
    """Measure a bundle whose files match its manifest.

    Args:
        directory: Bundle directory.
        engine: Result of `find_engine`.
        parity_tokens: Maximum length of the grid. If None, the memory limits of `default_grid` apply.
        grid: Parity cases. If None, `default_grid`.
        progress: Called before each step.

    Returns:
        The measurements. A graph that fails does not raise an exception: see `EngineSummary.failures`.

    Raises:
        BundleError: There is no manifest, or it contradicts the files.
        EngineError: The engine can't open any graph, or a requested precision is not supported.
        GraphError: The graph lacks a parameter.
    """
    precisions, missing = engine.choose(directory)
    manifest, config = read_manifest(directory), read_config(directory / "config.json")
    encoder = rebuild_encoder(directory / embeddings_path(directory), config)
    cases = grid or default_grid(config, parity_tokens)
    subject = Subject(directory, encoder, config, "the weights inside the bundle", cases)
    stage = partial(progress, f"{OPENVINO} in {', '.join(precisions)}")
    processor, on_grid, others = _measure_grid(subject, engine, precisions, stage)
    texts = Texts.of_package(directory, config)  # shared by all precisions of the fp32 graph
    results, ids = [], classifier_ids(directory)
    for precision in precisions:
        progress(f"{OPENVINO} in {precision} on texts", "", 0, 1)
        if precision == "int8":
            texts = Texts.of_int8(directory, config, manifest)
        check = EngineCheck(
            engine=OPENVINO,
            version=engine.version,
            precision=precision_number(precision),
            device=engine.options.device,
            processor=processor,
            num_cases=len(cases),
            num_texts=texts.num_texts,
        )
        on_texts = _measure_texts(subject, engine, precision, texts, _limits(precision, manifest))
        parts = (on_grid.get(precision, _Part()), on_texts, others)
        results.append(_result(check, parts, ids))
    return EngineSummary(tuple(results), tuple(missing))


def _result(check: EngineCheck, parts: Sequence[_Part], ids: Mapping[str, str]) -> EngineResult:
    errors = [ParityFigure.FromString(figure.SerializeToString()) for part in parts for figure in part.errors]
    rename_graphs(errors, ids)
    return EngineResult(
        check,
        tuple(figure for part in parts for figure in part.figures),
        tuple(errors),
        {path: reason for part in parts for path, reason in part.stops.items()},
        ids,
    )


def _measure_grid(
    subject: Subject, engine: Engine, precisions: Sequence[OpenvinoPrecision], progress: StageProgress
) -> tuple[str, dict[OpenvinoPrecision, _Part], _Part]:
    """Run all graphs on the grid, except for the int8 graph and logits in bf16.

    Returns:
        The processor name, the results of embeddings or logits by precision, and those of the other graphs.

    Raises:
        EngineError: The engine can't open any graph.
    """
    directory, config = subject.directory, subject.config
    is_classifier = has_head(directory)
    in_fp32: list[OpenvinoPrecision] = [precision for precision in precisions if precision != "int8"]
    opened: dict[str, tuple[str, OpenvinoPrecision]] = {}
    if is_classifier:
        opened[ENCODER_PATH] = (ENCODER_PATH, "fp32")
    else:
        opened |= {precision: (MODEL_PATH, precision) for precision in in_fp32}
    opened[ATTENTIONS_PATH] = (ATTENTIONS_PATH, "fp32")
    if (directory / CONTRIBUTIONS_PATH).is_file():
        opened[CONTRIBUTIONS_PATH] = (CONTRIBUTIONS_PATH, "fp32")
    with ExitStack() as processes:
        openers = {
            label: partial(engine.open, directory, path, config, processes, precision)
            for label, (path, precision) in opened.items()
        }
        grid, graphs = measure_processes(subject, openers, progress)
    if not graphs:
        raise EngineError(f"{embeddings_path(directory)} {next(iter(grid.stops.values()))}")
    processor = next(iter(graphs.values())).processor
    main: dict[OpenvinoPrecision, _Part] = {}
    if not is_classifier:
        main = {precision: _embeddings(subject, precision, grid) for precision in in_fp32}
    elif "fp32" in precisions:
        main = {"fp32": _logits(subject, engine, progress)}
    in_parity = [ENCODER_PATH, ATTENTIONS_PATH] if is_classifier else [ATTENTIONS_PATH]
    compared = [_parity(subject, path, path, grid) for path in in_parity]
    contributions = ContributionsResult(tuple(grid.contributions))
    stops = _stops(CONTRIBUTIONS_PATH, CONTRIBUTIONS_PATH, grid)
    others = _Part(
        [*(figure for part in compared for figure in part.figures), *contributions.figures()],
        [errors for part in compared for errors in part.errors],
        {path: reason for part in compared for path, reason in part.stops.items()} | stops,
    )
    return processor, main, others


def _logits(subject: Subject, engine: Engine, progress: StageProgress) -> _Part:
    """Return the result of the logits in fp32."""
    with ExitStack() as processes:
        open_graph = partial(engine.open, subject.directory, MODEL_PATH, subject.config, processes)
        logits, stops = measure_process_logits(subject, open_graph, progress)
    return _Part(logits.figures(), logits.manifest_figures()) if logits else _Part(stops=stops)


def _embeddings(
    subject: Subject, precision: OpenvinoPrecision, grid: GridMeasurements[Completeness]
) -> _Part:
    """Return the result of the token vectors."""
    if precision == "fp32":
        return _parity(subject, precision, MODEL_PATH, grid)
    stops = _stops(precision, MODEL_PATH, grid)
    parity = grid.parity(subject, [precision])
    if not parity.measurements:
        return _Part(stops=stops)
    errors = summarize(parity.measurements)
    failure = (
        f"{MODEL_PATH}: the minimum cosine of token vectors with fp32 is {errors.min_cosine:.6g} "
        f"(limit {MIN_COSINE:g})"
    )
    cosine = Figure(
        MODEL_PATH, errors.min_cosine, MIN_COSINE, failure, GateKind.GATE_KIND_MIN_COSINE, errors.role
    )
    invariants = [figure for invariants in parity.invariants for figure in invariants.figures()]
    return _Part([cosine, *invariants], [errors], stops)


def _parity(subject: Subject, label: str, path: str, grid: GridMeasurements[Completeness]) -> _Part:
    """Return the result of a graph in fp32. Its limits are those of the bundle's own parity."""
    parity = grid.parity(subject, [label])
    return _Part(parity.figures(), parity.manifest_figures(), _stops(label, path, grid))


def _stops(label: str, path: str, grid: GridMeasurements[Completeness]) -> dict[str, str]:
    return {path: grid.stops[label]} if label in grid.stops else {}


def _limits(precision: OpenvinoPrecision, manifest: Manifest) -> Limits:
    is_classifier = manifest.HasField("classifier")
    match precision:
        case "fp32":
            return FP32_LOGITS_LIMITS if is_classifier else FP32_LIMITS
        case "bf16":
            return BF16_LOGITS_LIMITS if is_classifier else BF16_LIMITS
        case "int8":
            return Limits.of_int8(manifest)


def _measure_texts(
    subject: Subject, engine: Engine, precision: OpenvinoPrecision, texts: Texts, limits: Limits
) -> _Part:
    path = GRAPHS[precision]
    with ExitStack() as processes:
        try:
            concurrent, single = (
                engine.open(subject.directory, path, subject.config, processes, precision, max_streams)
                for max_streams in (2, 1)
            )
            return _Part(measure_texts(concurrent, single, texts, limits))
        except RuntimeFailureError as error:
            return _Part(stops={f"{path} on texts": f"stopped: {error}"})


def record(directory: Path, results: Iterable[EngineResult]) -> None:
    """Write results into the report and the manifest of a bundle.

    Earlier results of the same engine, precision and device are replaced. The new manifest changes the model
    version that a server reports.
    """
    manifest = read_manifest(directory)
    checks = {_key(check): check for check in manifest.engine_checks}
    entries = {
        (entry["engine"], precision_number(entry["precision"]), entry["device"]): entry
        for entry in read_object(directory / REPORT_JSON).get(KEY, [])
    }
    for result in results:
        checks[_key(result.check)] = result.to_message()
        entries[_key(result.check)] = result.to_json()
    ordered = [check for _, check in sorted(checks.items())]
    manifest.ClearField("engine_checks")
    manifest.engine_checks.extend(ordered)
    add_section(directory, manifest, KEY, [entry for _, entry in sorted(entries.items())], page(ordered))


def _key(check: EngineCheck) -> tuple[str, Precision.ValueType, str]:
    return check.engine, check.precision, check.device


def page(checks: Iterable[EngineCheck]) -> str:
    """Return the section of the report."""
    introduction = (
        "The graphs as a server with the engine runs them, compared with PyTorch on the grid and with ONNX\n"
        "Runtime in fp32 on texts. Each gate shows the case that is closest to its limit."
    )
    sections = (text for check in checks for text in _describe(check))
    return "\n\n".join([HEADING, introduction, *sections]) + "\n"


def _describe(check: EngineCheck) -> Iterator[str]:
    verdict = "passed" if check.passed else "FAILED"
    yield f"### {check.engine}, {check.device}, {precision_name(check.precision)}: {verdict}"
    yield (
        f"{check.engine} {check.version} on {check.processor or check.device}, {check.num_cases} input "
        f"shapes, {check.num_texts} texts."
    )
    rows = ["| graph | of | texts | figure | limit | value | |", "|---|---|---|---|---|---|---|"]
    yield "\n".join([*rows, *map(_row, check.gates)])


def _row(gate: Gate) -> str:
    kind = GateKind.Name(gate.kind).removeprefix("GATE_KIND_").lower().replace("_", " ")
    is_agreement = "cosine" in kind or "rank" in kind
    value = f"{gate.value:.6f}" if is_agreement else f"{gate.value:.1e}"
    verdict = "passed" if Figure("", gate.value, gate.limit, "", gate.kind).passed else "FAILED"
    cells = (gate.graph, role_name(gate.role), gate.text_kind, kind, f"{gate.limit:.6g}", value, verdict)
    return f"| {' | '.join(cells)} |"
