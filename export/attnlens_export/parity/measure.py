"""Parity: comparison of graphs with the PyTorch encoder in fp32 and float64, over the parity grid.

The limit for each input shape and output role: max |ONNX - PyTorch fp32| must not exceed `TOLERANCE`, or
`REFERENCE_ERROR_RATIO` times the error of PyTorch fp32 itself against float64 on the same input. Padding is
not compared. A graph that a runtime computes in bf16 or fp16 has other limits: `REDUCED_MIN_COSINE` for token
vectors, and `REDUCED_ROW_SUM_ERROR`.

`measure_grid` is the loop over the grid. It also measures graphs in other runtimes and engines.

Shapes: B texts in a batch, T tokens, D hidden size, H heads, W stored weights per token.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from attnlens.patterns import Band, BlockTable, Pattern
from attnlens_export.graph.names import HIDDEN_OUTPUT, layer_outputs
from attnlens_export.graph.read import read_structure
from attnlens_export.parity.grid import Case, Inputs
from attnlens_export.parity.reference import (
    TOLERANCE,
    BoolArray,
    FloatArray,
    Tensors,
    allowed_error,
    difference,
    max_abs_difference,
    select_live,
)
from attnlens_export.parity.sessions import Graph, RunnableGraph
from attnlens_export.parity.stored import References
from attnlens_export.progress import StageProgress, report_each
from attnlens_export.results import Comparison, Errors, Result, max_or_nan
from attnlens_model import AttentionOutput, EncoderConfig
from attnlens_runtimes import RuntimeFailureError

REDUCED_MIN_COSINE = 0.999
"""Minimum cosine of token vectors in bf16 or fp16 with PyTorch fp32."""
REDUCED_ROW_SUM_ERROR = 0.02
"""Maximum deviation of the sum of a token's attention weights from 1 in bf16 or fp16."""
NOT_FINITE = "number of outputs with NaN or infinity"

LayerOutputs = Mapping[str, tuple[int, AttentionOutput]]
"""Outputs of the attention graph that belong to a layer: name -> (layer, description)."""


@dataclass(frozen=True)
class Subject:
    """A bundle and its reference.

    Attributes:
        directory: Bundle directory.
        references: Results of the PyTorch encoder.
        config: Configuration of the encoder.
        reference_name: Origin of the encoder's weights, for the report.
        cases: Parity grid.
    """

    directory: Path
    references: References
    config: EncoderConfig
    reference_name: str
    cases: Sequence[Case]


def compare_output(
    graph: str,
    role: str,
    name: str,
    measured: FloatArray,
    fp32: FloatArray,
    exact: FloatArray,
    live: BoolArray,
) -> Errors:
    """Return the errors of one output of a graph at tokens that are not padding.

    Args:
        graph: Path of the ONNX file.
        role: Role of the output.
        name: Name of the output.
        measured: The output, see `difference`.
        fp32: The same output of PyTorch in fp32.
        exact: The same output of PyTorch in float64.
        live: Mask (B, T), False for padding.
    """
    found = difference(measured, fp32, live)
    first, second = found.values
    return Errors(
        graph=graph,
        role=role,
        num_tokens=live.shape[1],
        max_abs_error=found.max_abs,
        max_abs_error_float64=_live_error(measured, exact, live),
        torch_max_abs_error_float64=_live_error(fp32, exact, live),
        mean_abs_error=found.mean_abs,
        p99_abs_error=found.p99_abs,
        min_cosine=found.min_cosine,
        num_elements=found.count,
        worst=f"{name}{list(found.index)} is {first:.8g}, PyTorch returns {second:.8g}",
    )


@dataclass(frozen=True)
class Run:
    """Outputs of a graph for one input shape.

    Attributes:
        graph: Path of the ONNX file.
        tensors: Outputs by name that are compared with PyTorch. `compare_case` removes each after its
            comparison to release the memory.
        max_batch_differences: By role, maximum difference between the shortest text and the same text alone.
        comparisons: Figures that need no PyTorch encoder.
        is_reduced: Whether the graph is computed in bf16 or fp16.
    """

    graph: str
    tensors: Tensors
    max_batch_differences: dict[str, float]
    comparisons: list[Comparison]
    is_reduced: bool = False


class GridGraph(NamedTuple):
    """A graph that `measure_grid` runs.

    Attributes:
        run: Runs a case, see `run_case`.
        has_attention: Whether the outputs include attention, which is too large in some cases.
    """

    run: Callable[[Case, Inputs], Run]
    has_attention: bool


@dataclass
class GraphMeasurements:
    """Measurements of one graph over the grid.

    Attributes:
        cases: Input shapes on which it ran.
        comparisons: All figures.
        errors: Errors by input shape and role.
        stop: Reason why the measurement was interrupted. Empty if it was not.
    """

    cases: list[Case] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    errors: list[Errors] = field(default_factory=list)
    stop: str = ""


Grid = dict[str, GraphMeasurements]
"""Measurements over the grid by label of the graph."""


def to_result(subject: Subject, grid: Grid, paths: Mapping[str, str]) -> Result:
    """Return the measurements of some graphs.

    Args:
        subject: Bundle and reference.
        grid: Measurements by label.
        paths: Paths of the graphs by label. Labels that were not measured are ignored.
    """
    measured = {label: grid[label] for label in paths if label in grid}
    errors = [errors for graph in measured.values() for errors in graph.errors]
    left_out = [
        f"{paths[label]} on {case}"
        for label, graph in measured.items()
        for case in subject.cases
        if case not in graph.cases and not graph.stop
    ]
    return Result(
        title="Graphs in fp32",
        reference=f"PyTorch ({subject.reference_name})",
        inputs=f"{len(subject.cases)} input shapes",
        comparisons=tuple(figure for graph in measured.values() for figure in graph.comparisons),
        errors=tuple(errors),
        remarks=(
            *_describe_lengths(errors, subject.config.max_tokens),
            *([f"not compared, too large: {', '.join(left_out)}"] if left_out else []),
        ),
        stops={paths[label]: graph.stop for label, graph in measured.items() if graph.stop},
    )


def _describe_lengths(group: Iterable[Errors], max_tokens: int) -> Iterator[str]:
    """Yield one line with the maximum compared length, by role if it differs. Nothing without errors."""
    longest: dict[str, int] = {}
    for errors in group:
        longest[errors.role] = max(longest.get(errors.role, 0), errors.num_tokens)
    lengths = set(longest.values())
    if lengths:
        by_role = ", ".join(f"{role} {length}" for role, length in longest.items())
        tokens = str(lengths.pop()) if len(lengths) == 1 else by_role
        yield f"longest input compared, in tokens: {tokens}; the encoder takes {max_tokens}"


def run_embeddings(
    subject: Subject, graph_paths: Sequence[str], progress: StageProgress
) -> dict[str, dict[Case, Run]]:
    """Run every case in the graphs without attention, one graph after the other to save memory.

    Returns:
        Runs by path and case. Their outputs are small.
    """
    inputs, runs = draw_inputs(subject), {}
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
    runs: Mapping[str, dict[Case, Run]] | None = None,
) -> Result:
    """Compare graphs with PyTorch on every case.

    Args:
        subject: Bundle and reference.
        graph_paths: Paths of the ONNX files in the bundle.
        progress: Called before each case.
        runs: Runs of the graphs without attention, which the comparison removes. If None, `run_embeddings`.

    Returns:
        The measurements. A graph that differs does not raise an exception: see `Result.failures`.
    """
    runs = run_embeddings(subject, graph_paths, progress) if runs is None else runs
    graphs: dict[str, GridGraph] = {}
    for path in graph_paths:
        if path in runs:
            graphs[path] = GridGraph(_replay(runs[path]), has_attention=False)
        else:
            graph = Graph(subject.directory, path)
            graphs[path] = to_grid_graph(graph, subject.config, has_attention=True)
    grid = measure_grid(subject, graphs, progress)
    return to_result(subject, grid, {path: path for path in graph_paths})


def _replay(runs: dict[Case, Run]) -> Callable[[Case, Inputs], Run]:
    """Return a function that returns, and releases, an earlier run."""
    return lambda case, _inputs: runs.pop(case)


def draw_inputs(subject: Subject) -> dict[Case, Inputs]:
    """Return the inputs of all cases."""
    return {case: subject.references.inputs(case, subject.config) for case in subject.cases}


def store_grid(subject: Subject, progress: StageProgress) -> None:
    """Run every case in PyTorch, so that `measure_grid` does not need the encoder."""
    inputs = draw_inputs(subject)
    for case in report_each(subject.cases, progress):
        subject.references.fp32(inputs[case], with_attentions=case.with_attentions)
        subject.references.float64(inputs[case], with_attentions=case.with_attentions)


def to_grid_graph(
    graph: RunnableGraph, config: EncoderConfig, *, has_attention: bool, is_reduced: bool = False
) -> GridGraph:
    """Return an open graph as `measure_grid` runs it."""
    return GridGraph(
        lambda case, inputs: run_case(graph, case, inputs, config, is_reduced=is_reduced), has_attention
    )


def measure_grid(subject: Subject, graphs: Mapping[str, GridGraph], progress: StageProgress) -> Grid:
    """Run every case in every graph, and compare the outputs with PyTorch.

    If a graph in another runtime fails, its measurement ends.

    Args:
        subject: Bundle and reference.
        graphs: Open graphs by label.
        progress: Called before each case.

    Returns:
        The measurements by label.
    """
    inputs = draw_inputs(subject)
    grid = {label: GraphMeasurements() for label in graphs}
    for case in report_each(subject.cases, progress):
        runs = _run_graphs(graphs, case, inputs[case], grid)
        if runs:
            compare_case(subject, case, inputs[case], runs, grid)
    progress("", len(subject.cases), len(subject.cases))
    return grid


def _run_graphs(graphs: Mapping[str, GridGraph], case: Case, inputs: Inputs, grid: Grid) -> dict[str, Run]:
    """Return the runs to compare with PyTorch by label. Other figures and failures are added to `grid`."""
    runs: dict[str, Run] = {}
    for label, graph in graphs.items():
        measured = grid[label]
        if measured.stop or (graph.has_attention and not case.with_attentions):
            continue
        try:
            run = graph.run(case, inputs)
        except RuntimeFailureError as error:
            measured.stop = f"stopped at {case}: {error}"
            continue
        measured.cases.append(case)
        measured.comparisons += run.comparisons
        if run.tensors:
            runs[label] = run
    return runs


def run_case(
    graph: RunnableGraph, case: Case, inputs: Inputs, config: EncoderConfig, *, is_reduced: bool = False
) -> Run:
    """Run a graph on a case and check everything that needs no reference."""
    tensors = graph.run(inputs)
    described = layer_outputs(config)
    max_row_sum_error = REDUCED_ROW_SUM_ERROR if is_reduced else TOLERANCE
    return Run(
        graph.path,
        tensors,
        _max_batch_differences(graph, inputs, tensors, described),
        list(_check_invariants(graph.path, case, inputs, tensors, config, max_row_sum_error)),
        is_reduced,
    )


def compare_case(subject: Subject, case: Case, inputs: Inputs, runs: Mapping[str, Run], grid: Grid) -> None:
    """Compare the outputs of graphs with PyTorch, and remove them from `runs`.

    Args:
        subject: Bundle and reference.
        case: Input shape.
        inputs: Inputs of the case.
        runs: Runs by label.
        grid: Receives the measurements by label.
    """
    live = inputs.attention_mask == 1
    described = layer_outputs(subject.config)
    expected = subject.references.fp32(inputs, with_attentions=case.with_attentions)
    exact = subject.references.float64(inputs, with_attentions=case.with_attentions)
    compared: dict[str, dict[str, list[Errors]]] = {label: {HIDDEN_OUTPUT: []} for label in runs}
    for name in exact:
        having = {label: run for label, run in runs.items() if name in run.tensors}
        if not having or name not in expected:
            continue
        fp32, float64, role = expected[name], exact[name], _role(name, described)
        for label, run in having.items():
            errors = compare_output(run.graph, role, name, run.tensors.pop(name), fp32, float64, live)
            compared[label].setdefault(role, []).append(errors)
    for label, by_role in compared.items():
        for group in filter(None, by_role.values()):
            errors = Errors.merged(group)
            grid[label].errors.append(errors)
            grid[label].comparisons += _to_comparisons(errors, case, runs[label])


def _to_comparisons(errors: Errors, case: Case, run: Run) -> list[Comparison]:
    if run.is_reduced:
        return [errors.compare_cosine(str(case), REDUCED_MIN_COSINE)] if errors.role == HIDDEN_OUTPUT else []
    limit = allowed_error(errors.torch_max_abs_error_float64)
    return errors.compare(str(case), limit, run.max_batch_differences.get(errors.role, 0.0))


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
    max_row_sum_error: float,
) -> Iterator[Comparison]:
    """Yield the properties of the outputs that need no reference. All outputs are finite, at padding, too."""
    live = inputs.attention_mask == 1
    empty = ~live.any(axis=1)
    masked = np.broadcast_to(~live[:, None, None, :], (len(live), 1, case.length, case.length))
    if config.is_causal:
        masked = masked | np.triu(np.ones((case.length, case.length), dtype=np.bool_), k=1)
    positions = np.arange(case.length)
    distances = np.abs(positions[:, None] - positions)
    row_sum_error = masked_weight = empty_row_weight = 0.0
    described = layer_outputs(config)
    maps = {name: described[name] for name in tensors.keys() & described.keys()}
    for name, (layer, output) in maps.items():
        if output.layout == "per_token":
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
    num_not_finite = sum(not np.isfinite(tensor).all() for tensor in tensors.values())
    yield Comparison(graph, str(case), float(num_not_finite), 0.0, what=NOT_FINITE)
    if not maps:
        return
    for what, value, limit in (
        ("deviation of a row sum from 1", row_sum_error, max_row_sum_error),
        ("attention weight of a masked token", masked_weight, 0.0),
        ("attention weight in a text without tokens", empty_row_weight, 0.0),
    ):
        yield Comparison(graph, str(case), value, limit, what=what)


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
