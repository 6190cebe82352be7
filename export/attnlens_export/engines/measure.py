"""Check of a bundle in another engine of the server, compiled with the properties that the server uses.

For each precision of the embeddings or logits, the parity grid and texts of several kinds are measured. The
int8 graph, and logits in bf16, have no limits on the grid. The int8 graph is measured on its own texts. Other
graphs are always fp32. The results are written into the manifest and the report of the bundle. A server
refuses to start with a combination that failed.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from attnlens.bundle import read_manifest
from attnlens.openvino import (
    PACKAGE,
    OpenvinoPrecision,
    compile_properties,
    compute_precision,
    multiplies_bf16,
)
from attnlens.v1.manifest_pb2 import EngineCheck, Manifest, Precision
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
)
from attnlens_export.graph.parameters import rebuild_encoder
from attnlens_export.int8.result import INT8_PATH
from attnlens_export.json_files import read_object
from attnlens_export.manifest import classifier_ids, rename_graphs
from attnlens_export.parity.grid import Case, default_grid
from attnlens_export.parity.measure import Subject, to_result
from attnlens_export.parity.sessions import ProcessGraph
from attnlens_export.parity.stored import References
from attnlens_export.progress import Progress, StageProgress, no_progress
from attnlens_export.published.classifier import has_head, num_logits
from attnlens_export.report import REPORT_JSON, add_section, comparisons_table
from attnlens_export.results import Comparison, Result
from attnlens_export.runtimes import DEFAULT_TIMEOUT_S, measure_process_logits, measure_processes
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
class EngineResult(Result):
    """Measurements in one precision.

    Attributes:
        check: Entry of the manifest without figures, gates and verdict.
        ids: Ids of graphs that differ from those of `graph_id`.
    """

    check: EngineCheck = field(default_factory=EngineCheck)
    ids: Mapping[str, str] = field(default_factory=dict)

    @property
    def precision(self) -> str:
        """Name of the precision, such as `bf16`."""
        return precision_name(self.check.precision)

    def to_message(self) -> EngineCheck:
        """Return the entry of the manifest."""
        message = EngineCheck(gates=self.gates(), figures=self.figures(), passed=self.passed)
        message.MergeFrom(self.check)
        rename_graphs([*message.gates, *message.figures], self.ids)
        return message

    def to_json(self) -> dict[str, Any]:
        """Return all measurements as JSON values. Non-finite numbers become None."""
        names = ("engine", "version", "device", "processor", "num_cases", "num_texts")
        described = {name: getattr(self.check, name) for name in names}
        return {**described, "precision": self.precision, **super().to_json()}


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
    references = References(rebuild_encoder(directory / embeddings_path(directory), config))
    cases = grid or default_grid(config, parity_tokens)
    subject = Subject(directory, references, config, "the weights inside the bundle", cases)
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
        title = f"{OPENVINO}, {engine.options.device}, {precision}"
        inputs = f"{len(cases)} input shapes, {texts.num_texts} texts"
        result = EngineResult(title, others.reference, inputs, (), check=check, ids=ids)
        on_texts = _measure_texts(subject, engine, precision, texts, _limits(precision, manifest))
        first = [on_grid[precision]] if precision in on_grid else []
        results.append(result.joined([*first, on_texts, others]))
    return EngineSummary(tuple(results), tuple(missing))


def _measure_grid(
    subject: Subject, engine: Engine, precisions: Sequence[OpenvinoPrecision], progress: StageProgress
) -> tuple[str, dict[OpenvinoPrecision, Result], Result]:
    """Run all graphs on the grid, except for the int8 graph and logits in bf16.

    Returns:
        The processor name, the results of embeddings or logits by precision, and that of the other graphs.

    Raises:
        EngineError: The engine can't open any graph.
    """
    directory, config = subject.directory, subject.config
    is_classifier = has_head(directory)
    in_fp32: list[OpenvinoPrecision] = [precision for precision in precisions if precision != "int8"]
    others = {path: path for path in ([ENCODER_PATH] if is_classifier else []) + [ATTENTIONS_PATH]}
    if (directory / CONTRIBUTIONS_PATH).is_file():
        others[CONTRIBUTIONS_PATH] = CONTRIBUTIONS_PATH
    opened: dict[str, tuple[str, OpenvinoPrecision]] = {}
    if not is_classifier:
        opened |= {precision: (MODEL_PATH, precision) for precision in in_fp32}
    opened |= {path: (path, "fp32") for path in others}
    with ExitStack() as processes:
        openers = {
            label: partial(engine.open, directory, path, config, processes, precision)
            for label, (path, precision) in opened.items()
        }
        grid, graphs = measure_processes(subject, openers, progress)
    if not graphs:
        raise EngineError(f"{embeddings_path(directory)} {next(iter(grid.values())).stop}")
    processor = next(iter(graphs.values())).processor
    main: dict[OpenvinoPrecision, Result] = {}
    if not is_classifier:
        main = {precision: to_result(subject, grid, {precision: MODEL_PATH}) for precision in in_fp32}
    elif "fp32" in precisions:
        with ExitStack() as processes:
            open_graph = partial(engine.open, directory, MODEL_PATH, config, processes)
            main = {"fp32": measure_process_logits(subject, open_graph, progress)}
    return processor, main, to_result(subject, grid, others)


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
) -> Result:
    path = GRAPHS[precision]
    result = Result("Texts", "ONNX Runtime in fp32", f"{texts.num_texts} texts", ())
    with ExitStack() as processes:
        try:
            concurrent, single = (
                engine.open(subject.directory, path, subject.config, processes, precision, max_streams)
                for max_streams in (2, 1)
            )
            return replace(result, comparisons=tuple(measure_texts(concurrent, single, texts, limits)))
        except RuntimeFailureError as error:
            return replace(result, stops={f"{path} on texts": f"stopped: {error}"})


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
    yield comparisons_table([Comparison.from_gate(gate) for gate in check.gates])
