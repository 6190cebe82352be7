"""Parity: comparison of graphs with the PyTorch encoder in fp32 and float64, over the parity grid.

The limit for each input shape and output role: max |ONNX - PyTorch fp32| must not exceed `TOLERANCE`, or
`REFERENCE_ERROR_RATIO` times the error of PyTorch fp32 itself against float64 on the same input. Padding is
not compared.

`measure_grid` is the loop over the grid. It also measures graphs in other runtimes and engines.

Shapes: B texts in a batch, T tokens, D hidden size, H heads, W stored weights per token.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from attnlens.patterns import Band, BlockTable, Pattern
from attnlens.v1.manifest_pb2 import GateKind, ParityFigure
from attnlens_export.graph.names import HIDDEN_OUTPUT, graph_id, layer_outputs, role_number
from attnlens_export.graph.read import read_structure
from attnlens_export.json_files import finite
from attnlens_export.parity.grid import Case, Inputs
from attnlens_export.parity.reference import (
    REFERENCE_ERROR_RATIO,
    TOLERANCE,
    BoolArray,
    Difference,
    Float64Arithmetic,
    FloatArray,
    Tensors,
    allowed_error,
    difference,
    make_clear_inputs,
    max_abs_difference,
    run_float64,
    run_fp32,
    select_live,
)
from attnlens_export.parity.sessions import Graph, RunnableGraph
from attnlens_export.progress import StageProgress, report_each
from attnlens_export.published.classifier import has_head
from attnlens_export.results import CheckResult, Figure, FigureSet, max_or_nan
from attnlens_model import AttentionOutput, Encoder, EncoderConfig, ModuleEncoder
from attnlens_runtimes import RuntimeFailureError

LayerOutputs = Mapping[str, tuple[int, AttentionOutput]]
"""Outputs of the attention graph that belong to a layer: name -> (layer, description)."""

T = TypeVar("T")


@dataclass(frozen=True)
class Subject:
    """A bundle and its reference.

    Attributes:
        directory: Bundle directory.
        encoder: PyTorch encoder in fp32 and eval mode, on the CPU.
        config: Configuration of the encoder.
        reference_name: Origin of the encoder's weights, for the report.
        cases: Parity grid.
        exact_states: Hidden states (B, T, D) of PyTorch in float64, by case, if the bundle is a classifier,
            see `exact_hidden_states`.
    """

    directory: Path
    encoder: Encoder | ModuleEncoder
    config: EncoderConfig
    reference_name: str
    cases: Sequence[Case]
    exact_states: dict[Case, FloatArray] = field(default_factory=dict)


@dataclass(frozen=True)
class Errors:
    """Errors of the outputs of one graph with one role, on one input. Padding is excluded.

    Attributes:
        graph: Path of the ONNX file.
        role: Role of the outputs of all layers, such as `last_hidden_state` or `attention_weights`.
        max_abs_error: max |ONNX - PyTorch fp32|.
        max_abs_error_float64: max |ONNX - PyTorch float64|.
        torch_max_abs_error_float64: max |PyTorch fp32 - PyTorch float64|.
        mean_abs_error: mean |ONNX - PyTorch fp32|.
        p99_abs_error: 99th percentile of |ONNX - PyTorch fp32|, maximum over layers.
        min_cosine: Minimum cosine of a row of ONNX with the row of PyTorch fp32.
        num_elements: Number of compared elements.
    """

    graph: str
    role: str
    max_abs_error: float
    max_abs_error_float64: float
    torch_max_abs_error_float64: float
    mean_abs_error: float
    p99_abs_error: float
    min_cosine: float
    num_elements: int


@dataclass(frozen=True)
class Measurement(Errors, FigureSet):
    """Errors on one input shape.

    Attributes:
        case: Input shape.
        allowed_error: Limit for `max_abs_error` and `max_batch_difference`.
        max_batch_difference: Maximum difference between the shortest text in the batch and the same text
            alone.
        worst_output: Output with the largest error.
        worst_index: Index of the largest error: (batch, token, component) or (batch, head, query, key).
        worst_values: Values of ONNX and of PyTorch fp32 at `worst_index`.
    """

    case: Case
    allowed_error: float
    max_batch_difference: float
    worst_output: str
    worst_index: tuple[int, ...]
    worst_values: tuple[float, float]

    def figures(self) -> list[Figure]:
        """Return the error against PyTorch and the difference that a batch makes."""
        role = role_number(self.role)
        limit = f"(limit {self.allowed_error:.2e})"
        error = (
            f"{self.graph} at {self.case}: {self.worst_output}{list(self.worst_index)} is "
            f"{self.worst_values[0]:.8g}, PyTorch returns {self.worst_values[1]:.8g}: error "
            f"{self.max_abs_error:.2e} {limit}"
        )
        batch = (
            f"{self.graph} at {self.case}: {self.role} of a text differs by {self.max_batch_difference:.2e} "
            f"between the batch and the text alone {limit}"
        )
        return [
            Figure(self.graph, value, self.allowed_error, failure, kind, role)
            for value, failure, kind in (
                (self.max_abs_error, error, GateKind.GATE_KIND_MAX_ABS_ERROR),
                (self.max_batch_difference, batch, GateKind.GATE_KIND_MAX_BATCH_DIFFERENCE),
            )
        ]


@dataclass(frozen=True)
class Invariants(FigureSet):
    """Properties of the outputs of one graph on one input shape that need no reference.

    Attributes:
        graph: Path of the ONNX file.
        case: Input shape.
        finite: Whether all outputs are finite, at padding, too.
        row_sum_error: Maximum |sum - 1| of the attention weights of a token.
        masked_weight: Maximum attention weight on padding, on later tokens (causal encoder), or outside the
            window (local layer).
        empty_row_weight: Maximum attention weight in a text without tokens.
    """

    graph: str
    case: Case
    finite: bool
    row_sum_error: float
    masked_weight: float
    empty_row_weight: float

    def figures(self, row_sum_tolerance: float | None = None) -> list[Figure]:
        """Return a figure for each property. The default limit of row sums is `TOLERANCE`."""
        tolerance = TOLERANCE if row_sum_tolerance is None else row_sum_tolerance
        return [
            Figure(self.graph, value, limit, f"{self.graph} at {self.case}: {failure}")
            for value, limit, failure in (
                (float(not self.finite), 0.0, "an output contains NaN or infinity"),
                (
                    self.row_sum_error,
                    tolerance,
                    f"the sum of a token's attention weights differs from 1 by {self.row_sum_error:.2e}",
                ),
                (
                    self.masked_weight,
                    0.0,
                    f"a masked token has attention weight {self.masked_weight:.2e} instead of 0",
                ),
                (
                    self.empty_row_weight,
                    0.0,
                    f"a text without tokens has attention weight {self.empty_row_weight:.2e} instead of 0",
                ),
            )
        ]


@dataclass(frozen=True)
class ParityResult(CheckResult):
    """All measurements over the grid.

    Attributes:
        cases: Input shapes.
        measurements: One for each graph, input shape and role.
        invariants: One for each graph and input shape.
        reference_name: Origin of the weights of the PyTorch encoder.
        max_tokens: Maximum input length of the encoder.
    """

    cases: tuple[Case, ...]
    measurements: tuple[Measurement, ...]
    invariants: tuple[Invariants, ...]
    reference_name: str
    max_tokens: int

    def figures(self) -> list[Figure]:
        """Return the figures of all measurements, then those of the invariants."""
        sets: tuple[FigureSet, ...] = (*self.measurements, *self.invariants)
        return [figure for figures in sets for figure in figures.figures()]

    def left_out(self) -> list[tuple[str, Case]]:
        """Return the graphs and input shapes that were not compared because of memory limits."""
        measured = {(invariants.graph, invariants.case) for invariants in self.invariants}
        graphs = dict.fromkeys(invariants.graph for invariants in self.invariants)
        return [(graph, case) for graph in graphs for case in self.cases if (graph, case) not in measured]

    def describe_lengths(self) -> str:
        """Return one line with the maximum compared length, by role if it differs."""
        longest: dict[str, int] = {}
        for measurement in self.measurements:
            longest[measurement.role] = max(longest.get(measurement.role, 0), measurement.case.length)
        lengths = set(longest.values())
        by_role = ", ".join(f"{role} {length}" for role, length in longest.items())
        tokens = str(lengths.pop()) if len(lengths) == 1 else by_role
        return f"longest input compared, in tokens: {tokens}; the encoder takes {self.max_tokens}"

    def by_role(self) -> dict[tuple[str, str], list[Measurement]]:
        """Return the measurements by graph and role."""
        groups: dict[tuple[str, str], list[Measurement]] = {}
        for measurement in self.measurements:
            groups.setdefault((measurement.graph, measurement.role), []).append(measurement)
        return groups

    def manifest_figures(self) -> list[ParityFigure]:
        """Return the worst errors of each role of each graph."""
        return [summarize(group) for group in self.by_role().values()]

    def to_json(self) -> dict[str, Any]:
        """Return all measurements as JSON values. Non-finite numbers become None."""
        return {
            "passed": self.passed,
            "tolerance": TOLERANCE,
            "reference_error_ratio": REFERENCE_ERROR_RATIO,
            "reference": self.reference_name,
            "max_position_embeddings": self.max_tokens,
            "longest_input_tokens": {
                f"{graph} {role}": max(measurement.case.length for measurement in group)
                for (graph, role), group in self.by_role().items()
            },
            "failures": self.failures(),
            "left_out": [{"graph": graph, **_case_to_json(case)} for graph, case in self.left_out()],
            "measurements": [_record_to_json(measurement) for measurement in self.measurements],
            "invariants": [_record_to_json(invariants) for invariants in self.invariants],
        }


def _record_to_json(record: Measurement | Invariants) -> dict[str, Any]:
    values = dataclasses.asdict(record)
    del values["case"]
    return _case_to_json(record.case) | {key: finite(value) for key, value in values.items()}


def _case_to_json(case: Case) -> dict[str, Any]:
    return {"batch_size": case.batch_size, "length": case.length, "padding": case.padding.value}


def summarize(group: Sequence[Measurement]) -> ParityFigure:
    """Return the worst errors of one role of one graph. NaN is worse than any number."""
    return worst_errors(group, max(measurement.case.length for measurement in group))


def worst_errors(group: Sequence[Errors], longest_input_tokens: int) -> ParityFigure:
    """Return the worst errors of a group. NaN is worse than any number."""
    counts = [errors.num_elements for errors in group]
    return ParityFigure(
        graph=graph_id(group[0].graph),
        role=role_number(group[0].role),
        max_abs_error=max_or_nan(errors.max_abs_error for errors in group),
        max_abs_error_float64=max_or_nan(errors.max_abs_error_float64 for errors in group),
        torch_max_abs_error_float64=max_or_nan(errors.torch_max_abs_error_float64 for errors in group),
        mean_abs_error=float(np.average([errors.mean_abs_error for errors in group], weights=counts)),
        p99_abs_error=max_or_nan(errors.p99_abs_error for errors in group),
        min_cosine=-max_or_nan(-errors.min_cosine for errors in group),
        longest_input_tokens=longest_input_tokens,
    )


def worst(group: Sequence[Measurement]) -> Measurement:
    """Return the measurement with the largest error against PyTorch fp32."""
    return max(group, key=lambda measurement: float(np.nan_to_num(measurement.max_abs_error, nan=np.inf)))


@dataclass(frozen=True)
class Run:
    """Outputs of a graph for one input shape.

    Attributes:
        tensors: Outputs by name. `compare_case` removes each after its comparison to release the memory.
        max_batch_differences: By role, maximum difference between the shortest text and the same text alone.
        invariants: Properties that need no reference.
    """

    tensors: Tensors
    max_batch_differences: dict[str, float]
    invariants: Invariants


class GridGraph(NamedTuple):
    """A graph that `measure_grid` runs.

    Attributes:
        run: Runs a case, see `run_case`.
        has_attention: Whether the outputs include attention, which is too large in some cases.
    """

    run: Callable[[Case, Inputs], Run]
    has_attention: bool


@dataclass
class GridMeasurements(Generic[T]):
    """Measurements of several graphs over the grid, by label.

    Attributes:
        measurements: (label, measurement).
        invariants: (label, invariants).
        contributions: Measurements of the contribution graph.
        stops: Reason why the measurement of a graph was interrupted, by label.
    """

    measurements: list[tuple[str, Measurement]] = field(default_factory=list)
    invariants: list[tuple[str, Invariants]] = field(default_factory=list)
    contributions: list[T] = field(default_factory=list)
    stops: dict[str, str] = field(default_factory=dict)

    def parity(self, subject: Subject, labels: Iterable[str]) -> ParityResult:
        """Return the parity of some graphs."""
        selected = frozenset(labels)
        return ParityResult(
            tuple(subject.cases),
            tuple(measurement for label, measurement in self.measurements if label in selected),
            tuple(invariants for label, invariants in self.invariants if label in selected),
            subject.reference_name,
            subject.config.max_tokens,
        )


def run_embeddings(
    subject: Subject, graph_paths: Sequence[str], inputs: Mapping[Case, Inputs], progress: StageProgress
) -> dict[str, dict[Case, Run]]:
    """Run every case in the graphs without attention, one graph after the other to save memory.

    Returns:
        Runs by path and case. Their outputs are small.
    """
    runs = {}
    for path in graph_paths:
        if len(read_structure(subject.directory / path).graph.output) == 1:
            graph = Graph(subject.directory, path)
            runs[path] = {
                case: run_case(graph, case, inputs[case], subject.config)
                for case in report_each(subject.cases, progress)
            }
    return runs


def measure_parity(
    subject: Subject,
    graph_paths: Sequence[str],
    progress: StageProgress,
    inputs: Mapping[Case, Inputs] | None = None,
    runs: Mapping[str, dict[Case, Run]] | None = None,
) -> ParityResult:
    """Compare graphs with PyTorch on every case.

    Args:
        subject: Bundle and reference.
        graph_paths: Paths of the ONNX files in the bundle.
        progress: Called before each case.
        inputs: Inputs of each case. If None, `draw_inputs`.
        runs: Runs of the graphs without attention, which the comparison removes. If None, `run_embeddings`.

    Returns:
        The measurements. A graph that differs does not raise an exception: see `ParityResult.failures`.
    """
    directory, config, cases = subject.directory, subject.config, subject.cases
    inputs = inputs or draw_inputs(subject)
    runs = run_embeddings(subject, graph_paths, inputs, progress) if runs is None else runs
    graphs: dict[str, GridGraph] = {}
    for path in graph_paths:
        if path in runs:
            graphs[path] = GridGraph(_replay(runs[path]), has_attention=False)
        else:
            graphs[path] = to_grid_graph(Graph(directory, path), config, has_attention=True)
    grid: GridMeasurements[None] = GridMeasurements()
    measure_grid(subject, inputs, graphs, grid, progress)
    progress("", len(cases), len(cases))
    return grid.parity(subject, graph_paths)


def _replay(runs: dict[Case, Run]) -> Callable[[Case, Inputs], Run]:
    """Return a function that returns, and releases, an earlier run."""
    return lambda case, _inputs: runs.pop(case)


def draw_inputs(subject: Subject) -> dict[Case, Inputs]:
    """Return the inputs of all cases."""
    return {case: make_clear_inputs(case, subject.config, subject.encoder) for case in subject.cases}


def exact_hidden_states(subject: Subject, case: Case, inputs: Inputs) -> FloatArray:
    """Return the hidden states (B, T, D) of PyTorch in float64, computed once for all graphs."""
    if case not in subject.exact_states:
        subject.exact_states[case] = run_float64(subject.encoder, inputs, lambda _name, _output: None)
    return subject.exact_states[case]


def to_grid_graph(graph: RunnableGraph, config: EncoderConfig, *, has_attention: bool) -> GridGraph:
    """Return an open graph as `measure_grid` runs it."""
    return GridGraph(lambda case, inputs: run_case(graph, case, inputs, config), has_attention)


def measure_grid(
    subject: Subject,
    inputs: Mapping[Case, Inputs],
    graphs: Mapping[str, GridGraph],
    grid: GridMeasurements[T],
    progress: StageProgress,
    contributions: tuple[str, Callable[[Case, Inputs], T]] | None = None,
) -> None:
    """Run every case in every graph, and in PyTorch once for all graphs.

    If a graph in another runtime fails, its measurement ends and the reason is added to `grid.stops`.

    Args:
        subject: Bundle and reference.
        inputs: Inputs of each case.
        graphs: Open graphs by label.
        grid: Receives the measurements. Labels in its `stops` are skipped.
        progress: Called before each case.
        contributions: Label of the contribution graph, and a function that measures it on a case. Skipped if
            attention is too large.
    """
    arithmetic = Float64Arithmetic()
    for case in report_each(subject.cases, progress):
        runs = _run_graphs(graphs, case, inputs[case], grid)
        if contributions is not None and contributions[0] not in grid.stops and case.with_attentions:
            label, measure = contributions
            try:
                grid.contributions.append(measure(case, inputs[case]))
            except RuntimeFailureError as error:
                grid.stops[label] = f"stopped at {case}: {error}"
        if runs:
            grid.measurements += compare_case(subject, case, inputs[case], runs, arithmetic)


def _run_graphs(
    graphs: Mapping[str, GridGraph], case: Case, inputs: Inputs, grid: GridMeasurements[T]
) -> dict[str, Run]:
    """Return the run of each graph by label. Invariants and failures are added to `grid`."""
    runs: dict[str, Run] = {}
    for label, graph in graphs.items():
        if label in grid.stops or (graph.has_attention and not case.with_attentions):
            continue
        try:
            runs[label] = graph.run(case, inputs)
        except RuntimeFailureError as error:
            grid.stops[label] = f"stopped at {case}: {error}"
    grid.invariants += [(label, run.invariants) for label, run in runs.items()]
    return runs


def run_case(graph: RunnableGraph, case: Case, inputs: Inputs, config: EncoderConfig) -> Run:
    """Run a graph on a case and check everything that needs no reference."""
    tensors = graph.run(inputs)
    described = layer_outputs(config)
    return Run(
        tensors,
        _max_batch_differences(graph, inputs, tensors, described),
        _check_invariants(graph.path, case, inputs, tensors, config, described),
    )


@dataclass(frozen=True)
class _Comparison:
    """One output of a graph against both references."""

    difference: Difference
    error_float64: float
    reference_error_float64: float


def compare_case(
    subject: Subject, case: Case, inputs: Inputs, runs: Mapping[str, Run], arithmetic: Float64Arithmetic
) -> Iterator[tuple[str, Measurement]]:
    """Compare the outputs of graphs with PyTorch, and remove them from `runs`.

    Args:
        subject: Bundle and reference.
        case: Input shape.
        inputs: Inputs of the case.
        runs: Runs by label.
        arithmetic: See `run_float64`.

    Yields:
        The label of a run and a measurement, one for each role.
    """
    live = inputs.attention_mask == 1
    expected = run_fp32(subject.encoder, inputs, case.with_attentions)
    compared: dict[str, dict[str, _Comparison]] = {label: {} for label in runs}

    def compare(name: str, exact: FloatArray) -> None:
        if name not in expected:
            return
        fp32 = expected.pop(name)
        reference_error = _live_error(fp32, exact, live)
        for label, run in runs.items():
            if name in run.tensors:
                measured = run.tensors.pop(name)
                compared[label][name] = _Comparison(
                    difference(measured, fp32, live), _live_error(measured, exact, live), reference_error
                )

    exact = run_float64(subject.encoder, inputs, compare, arithmetic)
    if has_head(subject.directory):
        subject.exact_states[case] = exact
    compare(HIDDEN_OUTPUT, exact)
    for label, comparisons in compared.items():
        for measurement in _to_measurements(runs[label], case, comparisons, subject.config):
            yield label, measurement


def _to_measurements(
    run: Run, case: Case, comparisons: Mapping[str, _Comparison], config: EncoderConfig
) -> Iterator[Measurement]:
    """Yield the measurement of each role."""
    described = layer_outputs(config)
    by_role: dict[str, dict[str, _Comparison]] = {HIDDEN_OUTPUT: {}}
    for name, comparison in comparisons.items():
        by_role.setdefault(_role(name, described), {})[name] = comparison
    for role, of_role in by_role.items():
        if of_role:
            yield _to_measurement(run, case, role, of_role)


def _to_measurement(run: Run, case: Case, role: str, comparisons: dict[str, _Comparison]) -> Measurement:
    differences = {name: comparison.difference for name, comparison in comparisons.items()}
    # NaN is worse than any number.
    worst = max(differences, key=lambda name: np.nan_to_num(differences[name].max_abs, nan=np.inf))
    reference_error = max_or_nan(comparison.reference_error_float64 for comparison in comparisons.values())
    counts = [difference.count for difference in differences.values()]
    means = [difference.mean_abs for difference in differences.values()]
    return Measurement(
        graph=run.invariants.graph,
        case=case,
        role=role,
        max_abs_error=differences[worst].max_abs,
        max_abs_error_float64=max_or_nan(comparison.error_float64 for comparison in comparisons.values()),
        torch_max_abs_error_float64=reference_error,
        mean_abs_error=float(np.average(means, weights=counts)),
        p99_abs_error=max_or_nan(difference.p99_abs for difference in differences.values()),
        min_cosine=-max_or_nan(-difference.min_cosine for difference in differences.values()),
        num_elements=sum(counts),
        allowed_error=allowed_error(reference_error),
        max_batch_difference=run.max_batch_differences.get(role, 0.0),
        worst_output=worst,
        worst_index=differences[worst].index,
        worst_values=differences[worst].values,
    )


def _role(name: str, described: LayerOutputs) -> str:
    return described[name][1].role if name in described else HIDDEN_OUTPUT


def _live_error(measured: FloatArray, exact: FloatArray, live: BoolArray) -> float:
    return max_abs_difference(select_live(measured, live), select_live(exact, live))


def shortest_text(inputs: Inputs) -> int | None:
    """Return the index of the shortest text with tokens. None if the batch has only one text."""
    lengths = inputs.attention_mask.sum(axis=1)
    if len(lengths) == 1:
        return None
    return int(np.where(lengths > 0, lengths, lengths.max() + 1).argmin())


def _max_batch_differences(
    graph: RunnableGraph, inputs: Inputs, tensors: Tensors, described: LayerOutputs
) -> dict[str, float]:
    """Run the shortest text alone, and return its maximum difference from the batch by role."""
    row = shortest_text(inputs)
    if row is None:
        return {}
    alone = inputs.alone(row)
    live = alone.attention_mask == 1
    length = live.shape[1]
    errors: dict[str, list[float]] = {}
    for name, tensor in graph.run(alone).items():
        in_batch = tensors[name][row : row + 1]
        layout = described[name][1].layout if name in described else "per_token"
        num_columns = length if layout == "dense" else None
        in_batch = in_batch[:, :length] if layout == "per_token" else in_batch[:, :, :length, :num_columns]
        errors.setdefault(_role(name, described), []).append(_live_error(tensor, in_batch, live))
    return {role: max_or_nan(values) for role, values in errors.items()}


def _check_invariants(
    graph: str,
    case: Case,
    inputs: Inputs,
    tensors: Tensors,
    config: EncoderConfig,
    described: LayerOutputs,
) -> Invariants:
    live = inputs.attention_mask == 1
    empty = ~live.any(axis=1)
    masked = np.broadcast_to(~live[:, None, None, :], (len(live), 1, case.length, case.length))
    if config.is_causal:
        masked = masked | np.triu(np.ones((case.length, case.length), dtype=np.bool_), k=1)
    positions = np.arange(case.length)
    distances = np.abs(positions[:, None] - positions)
    row_sum_error = masked_weight = empty_row_weight = 0.0
    for name, (layer, output) in described.items():
        if name not in tensors or output.layout == "per_token":
            continue
        if output.pattern is not None:
            errors = pattern_errors(tensors[name], output.pattern, live)
            row_sum_error = max(row_sum_error, errors.row_sum if output.row_sum == "one" else 0.0)
            masked_weight = max(masked_weight, errors.masked_weight)
            empty_row_weight = max(empty_row_weight, errors.empty_row_weight)
            continue
        weights = tensors[name]
        if output.row_sum == "one":
            sums = select_live(weights, live).sum(axis=-1, dtype=np.float64)
            row_sum_error = max(row_sum_error, float(np.abs(sums - 1).max()))
        # The weights of masked keys, and of keys outside the window of the layer, must be 0.
        reach = config.layer_attentions[layer].reach
        zero = masked if reach is None else masked | (distances > reach)
        if config.has_own_module:  # rows of padding are not defined, as with a causal mask alone
            zero = zero & live[:, None, :, None]
        masked_weight = max(masked_weight, float(np.abs(np.where(zero, weights, 0)).max()))
        empty_row_weight = max(empty_row_weight, float(np.abs(weights[empty]).max(initial=0.0)))
    is_finite = all(bool(np.isfinite(tensor).all()) for tensor in tensors.values())
    return Invariants(graph, case, is_finite, row_sum_error, masked_weight, empty_row_weight)


class PatternErrors(NamedTuple):
    """Deviations of banded or block-sparse attention weights from their expected values.

    Attributes:
        row_sum: Maximum |sum - 1| of a token's row.
        masked_weight: Maximum weight on padding.
        empty_row_weight: Maximum weight in a text without tokens.
    """

    row_sum: float
    masked_weight: float
    empty_row_weight: float


def pattern_errors(rows: FloatArray, pattern: Pattern, live: BoolArray) -> PatternErrors:
    """Check banded or block-sparse weights. Only one head of one text is dense (T, T) at a time.

    Args:
        rows: Weights (B, H, T, W).
        pattern: Layout of `rows`.
        live: Mask (B, T), False for padding.
    """
    row_sum = masked = empty = 0.0
    for text, mask in zip(rows, live, strict=True):
        if not mask.any():
            empty = max(empty, float(np.abs(text).max()))
            continue
        length = int(np.flatnonzero(mask)[-1]) + 1
        for head in range(len(text)):
            weights = _to_dense(text[head : head + 1, :length], pattern, head, mask[:length])[0]
            sums = weights[mask[:length]].sum(axis=-1, dtype=np.float64)
            row_sum = max(row_sum, float(np.abs(sums - 1).max()))
            masked = max(masked, float(np.abs(weights[:, ~mask[:length]]).max(initial=0.0)))
        masked = max(masked, _max_weight_from_global_tokens(text[:, length:], pattern))
    return PatternErrors(row_sum, masked, empty)


def _to_dense(rows: FloatArray, pattern: Pattern, head: int, mask: BoolArray) -> FloatArray:
    if isinstance(pattern, Band):
        return pattern.dense(rows, mask)
    return pattern.of_heads([head]).at(rows.shape[1]).dense(rows)


def _max_weight_from_global_tokens(rows: FloatArray, pattern: Pattern) -> float:
    """Return the maximum weight in the last columns, which store the attention of global tokens."""
    number = 2 * pattern.block_size if isinstance(pattern, BlockTable) else pattern.num_global_tokens
    columns = rows[..., rows.shape[-1] - number :]
    return float(np.abs(columns).max(initial=0.0))
