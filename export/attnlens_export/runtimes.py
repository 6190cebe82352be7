"""Parity in other runtimes: the fp32 graphs run over the grid in a process of their own.

A runtime first runs with its defaults, as most users open a graph. If it computes in bf16 or fp16 by default,
the limits of reduced precision apply, and it runs again in fp32. If it rejects a graph, crashes or does not
respond, the measurement of this graph ends and the reason is part of the result.
"""

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from attnlens.v1.manifest_pb2 import GateKind
from attnlens_export.classification import LogitsResult, measure_logits
from attnlens_export.contributions.measure import (
    Completeness,
    ContributionsResult,
    measure_case_of,
    open_head,
)
from attnlens_export.graph.names import (
    ATTENTIONS_PATH,
    CONTRIBUTIONS_PATH,
    HIDDEN_OUTPUT,
    MODEL_PATH,
    embeddings_path,
    role_number,
)
from attnlens_export.json_files import finite
from attnlens_export.parity.grid import Case, Inputs
from attnlens_export.parity.measure import (
    GridMeasurements,
    ParityResult,
    Subject,
    draw_inputs,
    measure_grid,
    summarize,
    to_grid_graph,
)
from attnlens_export.parity.reference import run_fp32
from attnlens_export.parity.sessions import ProcessGraph
from attnlens_export.progress import StageProgress
from attnlens_export.published.classifier import has_head, num_logits
from attnlens_export.results import CheckResult, Figure, max_or_nan
from attnlens_model import ATTENTION_WEIGHTS
from attnlens_runtimes import (
    FP32,
    RUNTIMES,
    GraphProcess,
    Installed,
    NotInstalledError,
    RuntimeFailureError,
    runtime_named,
)

ALL = "all"
DEFAULT_TIMEOUT_S = 300.0
MIN_COSINE = 0.999
"""Minimum cosine of token vectors in bf16 or fp16 with PyTorch fp32."""
ROW_SUM_TOLERANCE = 0.02
"""Maximum deviation of the sum of a token's attention weights from 1 in bf16 or fp16."""


@dataclass(frozen=True)
class RuntimeOptions:
    """Options of the check in other runtimes.

    Attributes:
        names: Names of the runtimes. `ALL` selects all that are installed.
        node_modules: Directory of npm packages. If None, the search path of Node.js.
        timeout_s: Maximum time to open a graph, and for each response, in seconds.
    """

    names: tuple[str, ...] = ()
    node_modules: Path | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S


@dataclass(frozen=True)
class Missing:
    """A runtime that is not installed.

    Attributes:
        name: Value of the option `--runtime`.
        reason: Sentence with the installation command.
    """

    name: str
    reason: str


@dataclass(frozen=True)
class RuntimeResult(CheckResult):
    """Measurements in one runtime and precision.

    Attributes:
        name: Value of the option `--runtime`.
        version: Version of its package.
        precision: Precision that it reports: fp32, bf16 or fp16. fp32 if no graph could be opened.
        parity: Measurements. Incomplete for a graph in `stops`.
        stops: Reason why the measurement of a graph was interrupted, by path.
        contributions: Measurements of the contribution graph.
        logits: Measurements of the logits graph of a classifier. None if there are none.
        embeddings: Path of the graph of token vectors.
    """

    name: str
    version: str
    precision: str
    parity: ParityResult
    stops: dict[str, str]
    contributions: tuple[Completeness, ...] = ()
    logits: LogitsResult | None = None
    embeddings: str = MODEL_PATH

    @property
    def label(self) -> str:
        """The name of the runtime, with the precision if it is not fp32."""
        return self.name if self.precision == FP32 else f"{self.name} in {self.precision}"

    @property
    def num_cases(self) -> int:
        """Number of cases on which both the embeddings and the attention graph ran."""
        graphs = [invariants.graph for invariants in self.parity.invariants]
        return min(graphs.count(path) for path in (self.embeddings, ATTENTIONS_PATH))

    @property
    def columns(self) -> tuple[tuple[str, str], ...]:
        """Graph and role of the columns in tables."""
        return (
            (self.embeddings, HIDDEN_OUTPUT),
            (ATTENTIONS_PATH, HIDDEN_OUTPUT),
            (ATTENTIONS_PATH, ATTENTION_WEIGHTS),
        )

    def figures(self) -> list[Figure]:
        """Return the figures of logits, parity and contributions, or those of reduced precision."""
        if self.precision == FP32:
            logits = self.logits.figures() if self.logits else []
            return [*logits, *self.parity.figures(), *ContributionsResult(self.contributions).figures()]
        cosines = [
            Figure(
                measurement.graph,
                measurement.min_cosine,
                MIN_COSINE,
                f"{measurement.graph} at {measurement.case}: a token vector has the cosine "
                f"{measurement.min_cosine:.6f} with PyTorch's (minimum {MIN_COSINE})",
                GateKind.GATE_KIND_MIN_COSINE,
                role_number(measurement.role),
            )
            for measurement in self.parity.measurements
            if measurement.role == HIDDEN_OUTPUT
        ]
        sets = (invariants.figures(ROW_SUM_TOLERANCE) for invariants in self.parity.invariants)
        return [*cosines, *(figure for figures in sets for figure in figures)]

    def interruptions(self) -> Mapping[str, str]:
        """Return `stops`."""
        return self.stops

    def failures(self) -> list[str]:
        """Return one line per interrupted graph and failed figure, with the name of the runtime."""
        return [f"{self.label}: {line}" for line in super().failures()]

    @property
    def incompleteness(self) -> float | None:
        """Maximum difference of scores and baseline from d · p, relative to |d| |p|. None if not measured."""
        return max_or_nan(case.incompleteness for case in self.contributions) if self.contributions else None

    def worst_errors(self) -> list[float | None]:
        """Return max |runtime - PyTorch fp32| for each of `columns`. None if not measured."""
        groups = self.parity.by_role()
        return [summarize(groups[key]).max_abs_error if key in groups else None for key in self.columns]

    @property
    def logits_error(self) -> float | None:
        """Maximum error of a logit. None if not measured."""
        return max_or_nan(case.max_abs_error for case in self.logits.cases) if self.logits else None

    def min_cosines(self) -> list[float | None]:
        """Return the minimum cosine of a row with PyTorch's for each of `columns`. None if not measured."""
        groups = self.parity.by_role()
        return [summarize(groups[key]).min_cosine if key in groups else None for key in self.columns]

    def to_json(self) -> dict[str, Any]:
        """Return all measurements as JSON values. Non-finite numbers become None."""
        content = self.parity.to_json()
        if self.precision != FP32:
            del content["tolerance"], content["reference_error_ratio"]
            content["min_cosine_allowed"] = MIN_COSINE
        return content | {
            "name": self.name,
            "version": self.version,
            "precision": self.precision,
            "stops": self.stops,
            "contributions": [finite(dataclasses.asdict(case)) for case in self.contributions],
            **({"logits": self.logits.to_json()} if self.logits else {}),
            "passed": self.passed,
            "failures": self.failures(),
        }


def find_runtimes(options: RuntimeOptions) -> tuple[list[Installed], list[Missing]]:
    """Return the selected runtimes that are installed and, for `ALL`, those that are not.

    Raises:
        NotInstalledError: A runtime that was selected by name is not installed.
        UnknownRuntimeError: There is no runtime of this name.
    """
    named = [runtime_named(name) for name in dict.fromkeys(options.names) if name != ALL]
    installed = [runtime.find(options.node_modules) for runtime in named]
    missing = []
    if ALL in options.names:
        for runtime in RUNTIMES.values():
            if runtime in named:
                continue
            try:
                installed.append(runtime.find(options.node_modules))
            except NotInstalledError as error:
                missing.append(Missing(runtime.name, str(error)))
    return installed, missing


def measure_runtime(
    subject: Subject, runtime: Installed, timeout_s: float, progress: StageProgress
) -> list[RuntimeResult]:
    """Run every case in one runtime with its defaults, and again in fp32 if that is not the default.

    Args:
        subject: Bundle and reference.
        runtime: Result of `find_runtimes`.
        timeout_s: Maximum time to open a graph, and for each response.
        progress: Called before each case.
    """
    results = [_measure(subject, runtime, timeout_s, progress)]
    if results[0].precision != FP32 and runtime.fp32_command:
        in_fp32 = dataclasses.replace(runtime, command=runtime.fp32_command)
        results.append(_measure(subject, in_fp32, timeout_s, progress))
    return results


def _measure(
    subject: Subject, runtime: Installed, timeout_s: float, progress: StageProgress
) -> RuntimeResult:
    directory = subject.directory
    compared = [embeddings_path(directory), ATTENTIONS_PATH]
    with ExitStack() as processes:

        def open_graph(path: str) -> ProcessGraph:
            process = processes.enter_context(GraphProcess(runtime, directory / path, timeout_s))
            return ProcessGraph(path, process, subject.config, num_logits(directory, path))

        has_contributions = (directory / CONTRIBUTIONS_PATH).is_file()
        paths = [*compared, *([CONTRIBUTIONS_PATH] if has_contributions else [])]
        openers = {path: partial(open_graph, path) for path in paths}
        grid, graphs = measure_processes(subject, openers, progress)
        logits = None
        if has_head(directory):
            logits, stops = measure_process_logits(subject, partial(open_graph, MODEL_PATH), progress)
            grid.stops |= stops
    reduced = [graph.precision for graph in graphs.values() if graph.precision != FP32]
    return RuntimeResult(
        runtime.name,
        runtime.version,
        [*reduced, FP32][0],
        grid.parity(subject, compared),
        grid.stops,
        tuple(grid.contributions),
        logits,
        compared[0],
    )


def measure_process_logits(
    subject: Subject, open_graph: Callable[[], ProcessGraph], progress: StageProgress
) -> tuple[LogitsResult | None, dict[str, str]]:
    """Run every case in the logits graph of a classifier.

    Returns:
        The measurements, or None and the reason why they were interrupted, by path.
    """
    try:
        return measure_logits(subject, progress, open_graph()), {}
    except RuntimeFailureError as error:
        return None, {MODEL_PATH: f"stopped: {error}"}


def measure_processes(
    subject: Subject, openers: Mapping[str, Callable[[], ProcessGraph]], progress: StageProgress
) -> tuple[GridMeasurements[Completeness], dict[str, ProcessGraph]]:
    """Run every case in graphs that have a process each.

    Args:
        subject: Bundle and reference.
        openers: Functions that open a graph, by label. The label of the contribution graph is its path.
        progress: Called before each graph is opened, and before each case.

    Returns:
        The measurements, and the graphs that could be opened by label.
    """
    config, num_cases = subject.config, len(subject.cases)
    grid: GridMeasurements[Completeness] = GridMeasurements()
    graphs: dict[str, ProcessGraph] = {}
    for label, open_graph in openers.items():
        progress(f"opening {label}", 0, num_cases)
        try:
            graphs[label] = open_graph()
        except RuntimeFailureError as error:
            grid.stops[label] = f"can't be opened: {error}"
    contributions = None
    if CONTRIBUTIONS_PATH in graphs:
        graph = graphs[CONTRIBUTIONS_PATH]
        head = open_head(subject.directory, config)

        def measure_contributions(case: Case, inputs: Inputs) -> Completeness:
            hidden = run_fp32(subject.encoder, inputs, with_attentions=False)[HIDDEN_OUTPUT]
            return measure_case_of(subject, graph.run_feed, case, inputs, hidden, head)

        contributions = (CONTRIBUTIONS_PATH, measure_contributions)
    compared = {
        label: to_grid_graph(graph, config, has_attention=graph.path == ATTENTIONS_PATH)
        for label, graph in graphs.items()
        if graph.path != CONTRIBUTIONS_PATH
    }
    measure_grid(subject, draw_inputs(subject), compared, grid, progress, contributions)
    progress("", num_cases, num_cases)
    return grid, graphs
