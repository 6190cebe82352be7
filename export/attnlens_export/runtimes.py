"""Parity in other runtimes: the fp32 graphs run over the grid in a process of their own.

A runtime first runs with its defaults, as most users open a graph. If it computes in bf16 or fp16 by default,
the limits of reduced precision apply, and it runs again in fp32. If it rejects a graph, crashes or does not
respond, the measurement of this graph ends and the reason is part of the result.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from attnlens_export.classification import measure_logits
from attnlens_export.contributions import measure as contributions
from attnlens_export.contributions.measure import open_head
from attnlens_export.graph.names import (
    ATTENTIONS_PATH,
    CONTRIBUTIONS_PATH,
    HIDDEN_OUTPUT,
    MODEL_PATH,
    embeddings_path,
)
from attnlens_export.parity.grid import Case, Inputs
from attnlens_export.parity.measure import (
    GraphMeasurements,
    Grid,
    GridGraph,
    Subject,
    measure_grid,
    to_grid_graph,
    to_result,
)
from attnlens_export.parity.reference import FloatArray
from attnlens_export.parity.sessions import ProcessGraph
from attnlens_export.progress import StageProgress
from attnlens_export.published.classifier import has_head, num_logits
from attnlens_export.results import Result
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
class RuntimeResult(Result):
    """Measurements in one runtime and precision.

    Attributes:
        name: Value of the option `--runtime`.
        version: Version of its package.
        precision: Precision that it reports: fp32, bf16 or fp16. fp32 if no graph could be opened.
        num_cases: Number of input shapes on which both the embeddings and the attention graph ran.
    """

    name: str = ""
    version: str = ""
    precision: str = FP32
    num_cases: int = 0

    @property
    def label(self) -> str:
        """The name of the runtime, with the precision if it is not fp32."""
        return self.name if self.precision == FP32 else f"{self.name} in {self.precision}"

    def failures(self) -> list[str]:
        """Return one line per interrupted graph and failed figure, with the name of the runtime."""
        return [f"{self.label}: {line}" for line in super().failures()]

    def to_json(self) -> dict[str, Any]:
        """Return all measurements as JSON values. Non-finite numbers become None."""
        return {"name": self.name, "version": self.version, "precision": self.precision, **super().to_json()}


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
        in_fp32 = replace(runtime, command=runtime.fp32_command)
        results.append(_measure(subject, in_fp32, timeout_s, progress))
    return results


def _measure(
    subject: Subject, runtime: Installed, timeout_s: float, progress: StageProgress
) -> RuntimeResult:
    directory = subject.directory
    with ExitStack() as processes:

        def open_graph(path: str) -> ProcessGraph:
            process = processes.enter_context(GraphProcess(runtime, directory / path, timeout_s))
            return ProcessGraph(path, process, subject.config, num_logits(directory, path))

        paths = [embeddings_path(directory), ATTENTIONS_PATH]
        paths += [CONTRIBUTIONS_PATH] if (directory / CONTRIBUTIONS_PATH).is_file() else []
        openers = {path: partial(open_graph, path) for path in paths}
        grid, graphs = measure_processes(subject, openers, progress)
        logits = None
        if has_head(directory):
            logits = measure_process_logits(subject, partial(open_graph, MODEL_PATH), progress)
    reduced = [graph.precision for graph in graphs.values() if graph.precision != FP32]
    result = to_result(subject, grid, {path: path for path in paths})
    num_cases = min(len(grid[path].cases) for path in paths[:2])
    if logits is not None:
        result = result.joined([replace(logits, comparisons=()) if reduced else logits])
    return RuntimeResult(
        **vars(result) | {"inputs": f"{num_cases} of {result.inputs}"},
        name=runtime.name,
        version=runtime.version,
        precision=[*reduced, FP32][0],
        num_cases=num_cases,
    )


def measure_process_logits(
    subject: Subject, open_graph: Callable[[], ProcessGraph], progress: StageProgress
) -> Result:
    """Run every case in the logits graph of a classifier. If it is interrupted, the reason is in `stops`."""
    try:
        return measure_logits(subject, progress, open_graph())
    except RuntimeFailureError as error:
        return Result("Logits", "", "", (), stops={MODEL_PATH: f"stopped: {error}"})


def measure_processes(
    subject: Subject, openers: Mapping[str, Callable[[], ProcessGraph]], progress: StageProgress
) -> tuple[Grid, dict[str, ProcessGraph]]:
    """Run every case in graphs that have a process each.

    Args:
        subject: Bundle and reference.
        openers: Functions that open a graph, by label. The label of the contribution graph is its path.
        progress: Called before each graph is opened, and before each case.

    Returns:
        The measurements, and the graphs that could be opened by label.
    """
    graphs: dict[str, ProcessGraph] = {}
    unopened: Grid = {}
    for label, open_graph in openers.items():
        progress(f"opening {label}", 0, len(subject.cases))
        try:
            graphs[label] = open_graph()
        except RuntimeFailureError as error:
            unopened[label] = GraphMeasurements(stop=f"can't be opened: {error}")
    measured = {label: _to_grid_graph(subject, graph) for label, graph in graphs.items()}
    grid = measure_grid(subject, measured, progress)
    return {label: (unopened | grid)[label] for label in openers}, graphs


def _to_grid_graph(subject: Subject, graph: ProcessGraph) -> GridGraph:
    is_reduced = graph.precision != FP32
    if graph.path == CONTRIBUTIONS_PATH:
        head = open_head(subject.directory, subject.config)

        def hidden(_case: Case, inputs: Inputs) -> FloatArray:
            return subject.references.fp32(inputs)[HIDDEN_OUTPUT]

        return contributions.to_grid_graph(subject, graph.run_feed, hidden, head, is_reduced=is_reduced)
    has_attention = graph.path == ATTENTIONS_PATH
    return to_grid_graph(graph, subject.config, has_attention=has_attention, is_reduced=is_reduced)
