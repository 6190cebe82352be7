"""The parity check through other runtimes than the one that the bundle is served with.

Each runs both graphs in processes of their own. What it can't do (it refuses a graph, crashes, does not
answer) ends the measurement of that graph and stands in the result beside what was measured until then.

A runtime runs with its defaults first, since that is how people open a graph. If it computes in bf16 or
fp16 then, the gate is that of lower precision, and it runs a second time in fp32.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from attnlens_export.graph.names import (
    ATTENTIONS_PATH,
    BATCH_AXIS,
    EMBEDDINGS_PATH,
    GRAPH_PURPOSES,
    HIDDEN_OUTPUT,
    LENGTH_AXIS,
    layer_outputs,
    output_axes,
)
from attnlens_export.parity.grid import Case, Inputs
from attnlens_export.parity.measure import Run, Subject, compare_case, run_case
from attnlens_export.parity.reference import Tensors
from attnlens_export.parity.result import Invariants, Measurement, ParityResult, summarize
from attnlens_export.parity.ties import make_clear_inputs
from attnlens_export.progress import StageProgress
from attnlens_model import ATTENTION_WEIGHTS, EncoderConfig
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
# In bf16 or fp16: of a token's vector with PyTorch's in fp32.
MIN_COSINE = 0.999
# In bf16 or fp16: how far a row of attention weights may be from summing to 1.
ROW_SUM_TOLERANCE = 0.02

# The outputs of a bundle in the order of the table: graph and role.
COLUMNS = (
    (EMBEDDINGS_PATH, HIDDEN_OUTPUT),
    (ATTENTIONS_PATH, HIDDEN_OUTPUT),
    (ATTENTIONS_PATH, ATTENTION_WEIGHTS),
)


@dataclass(frozen=True)
class Missing:
    """A runtime that is not installed.

    Attributes:
        name: what `--runtime` calls it.
        reason: a sentence that says how to install it.
    """

    name: str
    reason: str


@dataclass(frozen=True)
class RuntimeResult:
    """What was measured in one runtime, in one precision.

    Attributes:
        name: what `--runtime` calls it.
        version: of its package.
        precision: what it computed in, as it says: fp32, bf16 or fp16; fp32 where no graph opened.
        parity: the measurements, for a graph that was stopped those until then.
        stops: by graph, where it stopped and the runtime's reason.
    """

    name: str
    version: str
    precision: str
    parity: ParityResult
    stops: dict[str, str]

    @property
    def label(self) -> str:
        """The name, with the precision where that is not fp32."""
        return self.name if self.precision == FP32 else f"{self.name} in {self.precision}"

    @property
    def passed(self) -> bool:
        """Whether both graphs ran on every case, and each gate held."""
        return bool(self.parity.measurements) and not self.failures()

    @property
    def num_cases(self) -> int:
        """On how many cases both graphs ran."""
        return min(sum(each.graph == path for each in self.parity.invariants) for path in GRAPH_PURPOSES)

    def failures(self) -> list[str]:
        """Return a line for each graph that was stopped and each gate that did not hold."""
        lines = [f"{graph}: {reason}" for graph, reason in self.stops.items()]
        lines += self.parity.failures() if self.precision == FP32 else self._reduced_failures()
        return [f"{self.label}: {line}" for line in lines]

    def _reduced_failures(self) -> Iterator[str]:
        """Yield a line for each gate of lower precision that did not hold, the smallest cosines first."""
        hidden = [each for each in self.parity.measurements if each.role == HIDDEN_OUTPUT]
        for each in sorted(hidden, key=lambda each: float(np.nan_to_num(each.min_cosine, nan=-1.0))):
            if not each.min_cosine >= MIN_COSINE:
                yield (
                    f"{each.graph} at {each.case}: the cosine of a token's vector with PyTorch's is "
                    f"{each.min_cosine:.6f}, at least {MIN_COSINE} is allowed"
                )
        for invariants in self.parity.invariants:
            yield from invariants.failures(ROW_SUM_TOLERANCE)

    def worst_errors(self) -> list[float | None]:
        """Return the largest |runtime - PyTorch fp32| of each of `COLUMNS`; None if nothing was measured."""
        groups = self.parity.by_role()
        return [summarize(groups[key]).max_abs_error if key in groups else None for key in COLUMNS]

    def min_cosines(self) -> list[float | None]:
        """Return the smallest cosine of a row with PyTorch's, of each of `COLUMNS`."""
        groups = self.parity.by_role()
        return [summarize(groups[key]).min_cosine if key in groups else None for key in COLUMNS]


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


class _ProcessGraph:
    """A graph of the bundle, open in a runtime's process."""

    def __init__(self, path: str, process: GraphProcess, config: EncoderConfig) -> None:
        self.path = path
        self.precision = process.precision
        self._process = process
        self._config = config

    def run(self, inputs: Inputs) -> Tensors:
        """Return every output by name.

        Raises:
            RuntimeFailureError: there is no answer, or one of other shapes.
        """
        outputs = self._process.run(inputs.feed())
        expected = self._shapes(*inputs.input_ids.shape)
        found, shapes = [output.shape for output in outputs], list(expected.values())
        if found != shapes:
            raise RuntimeFailureError(f"outputs of the shapes {found} instead of {shapes}")
        return dict(zip(expected, outputs, strict=True))

    def _shapes(self, batch_size: int, length: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {HIDDEN_OUTPUT: (batch_size, length, self._config.hidden_size)}
        if self.path == EMBEDDINGS_PATH:
            return shapes
        sizes = {BATCH_AXIS: batch_size, LENGTH_AXIS: length}
        for name, (_, output) in layer_outputs(self._config).items():
            axes = output_axes(output)
            shapes[name] = tuple(axis if isinstance(axis, int) else sizes[axis] for axis in axes)
        return shapes


def measure_runtime(
    subject: Subject, runtime: Installed, timeout_s: float, progress: StageProgress
) -> list[RuntimeResult]:
    """Run every case through both graphs in one runtime, and again in fp32 if that is not its default.

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
    stops: dict[str, str] = {}
    with ExitStack() as processes:
        progress("opening the graphs", 0, len(cases))
        graphs = _open(subject, runtime, timeout_s, processes, stops)
        for number, case in enumerate(cases):
            progress(str(case), number, len(cases))
            inputs = make_clear_inputs(case, config, subject.encoder)
            runs = _run_case(case, inputs, graphs, config, stops)
            invariants += [run.invariants for run in runs.values()]
            if runs:
                measurements += compare_case(subject, case, inputs, runs)
    progress("", len(cases), len(cases))
    parity = ParityResult(
        tuple(cases), tuple(measurements), tuple(invariants), subject.reference_name, config.max_tokens
    )
    reduced = [graph.precision for graph in graphs if graph.precision != FP32]
    return RuntimeResult(runtime.name, runtime.version, [*reduced, FP32][0], parity, stops)


def _open(
    subject: Subject, runtime: Installed, timeout_s: float, processes: ExitStack, stops: dict[str, str]
) -> list[_ProcessGraph]:
    graphs = []
    for path in GRAPH_PURPOSES:
        process = GraphProcess(runtime, subject.directory / path, timeout_s)
        try:
            opened = processes.enter_context(process)
        except RuntimeFailureError as error:
            stops[path] = f"does not open: {error}"
        else:
            graphs.append(_ProcessGraph(path, opened, subject.config))
    return graphs


def _run_case(
    case: Case,
    inputs: Inputs,
    graphs: Sequence[_ProcessGraph],
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
