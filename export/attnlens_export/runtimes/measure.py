"""The parity check through other runtimes than the one that the bundle is served with.

Each runs every graph in fp32 in a process of its own. What it can't do (it refuses a graph, crashes, does not
answer) ends the measurement of that graph and stands in the result beside what was measured until then.

A runtime runs with its defaults first, since that is how people open a graph. If it computes in bf16 or
fp16 then, the gate is that of lower precision, and it runs a second time in fp32.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from attnlens.dense import DenseLayer, open_layers
from attnlens_export.contributions.measure import measure_case
from attnlens_export.contributions.result import Completeness
from attnlens_export.graph.names import (
    CONTRIBUTIONS_PATH,
    EMBEDDINGS_PATH,
    GRAPH_PURPOSES,
    HIDDEN_OUTPUT,
)
from attnlens_export.parity.grid import Case, Inputs
from attnlens_export.parity.measure import Run, Subject, compare_case, run_case
from attnlens_export.parity.reference import run_fp32
from attnlens_export.parity.result import Invariants, Measurement, ParityResult
from attnlens_export.parity.ties import make_clear_inputs
from attnlens_export.progress import StageProgress
from attnlens_export.published.pooling import read_pooling
from attnlens_export.runtimes.graph import ProcessGraph
from attnlens_export.runtimes.result import Missing, RuntimeResult
from attnlens_model import EncoderConfig
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
    """What may be chosen about the check through other runtimes.

    Attributes:
        names: the runtimes, or `ALL` of those that are installed.
        node_modules: where the packages of npm are; None: where Node.js would look.
        timeout_s: how long a runtime may take to open a graph, and for each answer, in seconds.
    """

    names: tuple[str, ...] = ()
    node_modules: Path | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S


def find_runtimes(options: RuntimeOptions) -> tuple[list[Installed], list[Missing]]:
    """Return the chosen runtimes that are installed and, if all were chosen, those that are not.

    Raises:
        NotInstalledError: one was named that is not installed.
        UnknownRuntimeError: one was named that does not exist.
    """
    named = [runtime_named(name) for name in dict.fromkeys(options.names) if name != ALL]
    installed = [runtime.find(options.node_modules) for runtime in named]
    missing = []
    if ALL in options.names:
        for runtime in (each for each in RUNTIMES.values() if each not in named):
            try:
                installed.append(runtime.find(options.node_modules))
            except NotInstalledError as error:
                missing.append(Missing(runtime.name, str(error)))
    return installed, missing


def measure_runtime(
    subject: Subject, runtime: Installed, timeout_s: float, progress: StageProgress
) -> list[RuntimeResult]:
    """Run every case through the graphs in fp32 in one runtime, and again in fp32 if that is not its default.

    Args:
        subject: the bundle and its reference.
        runtime: as `find_runtimes` returned it.
        timeout_s: for each answer.
        progress: called before each case.
    """
    results = [_measure(subject, runtime, timeout_s, progress)]
    if results[0].precision != FP32 and runtime.fp32_command:
        in_fp32 = replace(runtime, command=runtime.fp32_command)
        results.append(_measure(subject, in_fp32, timeout_s, progress))
    return results


def _measure(
    subject: Subject, runtime: Installed, timeout_s: float, progress: StageProgress
) -> RuntimeResult:
    cases, config = subject.cases, subject.config
    measurements: list[Measurement] = []
    invariants: list[Invariants] = []
    contributions: list[Completeness] = []
    stops: dict[str, str] = {}
    with ExitStack() as processes:
        progress("opening the graphs", 0, len(cases))
        graphs = [
            graph
            for path in GRAPH_PURPOSES
            if (graph := _open(subject, path, runtime, timeout_s, processes, stops))
        ]
        explained = None
        if (subject.directory / CONTRIBUTIONS_PATH).is_file():
            explained = _open(subject, CONTRIBUTIONS_PATH, runtime, timeout_s, processes, stops)
        dense = open_layers(
            subject.directory, read_pooling(subject.directory, config.vector_size).dense, config.vector_size
        )
        for number, case in enumerate(cases):
            progress(str(case), number, len(cases))
            inputs = make_clear_inputs(case, config, subject.encoder)
            runs = _run_case(case, inputs, graphs, config, stops)
            invariants += [run.invariants for run in runs.values()]
            if runs:
                measurements += compare_case(subject, case, inputs, runs)
            if explained and case.with_attentions and CONTRIBUTIONS_PATH not in stops:
                contributions += _contributions(subject, case, inputs, explained, dense, stops)
    progress("", len(cases), len(cases))
    parity = ParityResult(
        tuple(cases), tuple(measurements), tuple(invariants), subject.reference_name, config.max_tokens
    )
    opened = graphs if explained is None else [*graphs, explained]
    reduced = [graph.precision for graph in opened if graph.precision != FP32]
    return RuntimeResult(
        runtime.name, runtime.version, [*reduced, FP32][0], parity, stops, tuple(contributions)
    )


def _open(
    subject: Subject,
    path: str,
    runtime: Installed,
    timeout_s: float,
    processes: ExitStack,
    stops: dict[str, str],
) -> ProcessGraph | None:
    """Open a graph in a process of its own; note why where it does not open."""
    try:
        process = processes.enter_context(GraphProcess(runtime, subject.directory / path, timeout_s))
    except RuntimeFailureError as error:
        stops[path] = f"does not open: {error}"
        return None
    return ProcessGraph(path, process, subject.config)


def _run_case(
    case: Case,
    inputs: Inputs,
    graphs: Sequence[ProcessGraph],
    config: EncoderConfig,
    stops: dict[str, str],
) -> dict[str, Run]:
    """Run a case in the graphs that have not stopped; note those that stop at it."""
    runs = {}
    for graph in graphs:
        if graph.path in stops or not (case.with_attentions or graph.path == EMBEDDINGS_PATH):
            continue
        try:
            runs[graph.path] = run_case(graph, case, inputs, config)
        except RuntimeFailureError as error:
            stops[graph.path] = f"stopped at {case}: {error}"
    return runs


def _contributions(
    subject: Subject,
    case: Case,
    inputs: Inputs,
    graph: ProcessGraph,
    dense: Sequence[DenseLayer],
    stops: dict[str, str],
) -> list[Completeness]:
    """Run a case in the graph of contributions; nothing, and a note, if it stops."""
    hidden = run_fp32(subject.encoder, inputs, with_attentions=False)[HIDDEN_OUTPUT]
    try:
        return [measure_case(graph.run_feed, case, inputs, subject.config, hidden, dense)]
    except RuntimeFailureError as error:
        stops[CONTRIBUTIONS_PATH] = f"stopped at {case}: {error}"
        return []
