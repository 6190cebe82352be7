"""Does each graph compute what the PyTorch encoder computes? Measured on a grid, against fp32 and float64.

The gate, for each input shape and each output kind: the largest |ONNX - PyTorch fp32| on live tokens is at
most `TOLERANCE`, or at most `REFERENCE_ERROR_RATIO` times the error that PyTorch in fp32 itself has against
float64 on the same input. A large model has large activations; nobody can ask more of a runtime than of its
reference.

B batch, T tokens, D width, H heads, L layers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime

from attnlens_export.graph.names import HIDDEN_OUTPUT, layer_outputs
from attnlens_export.graph.read import locate_weights, read_structure
from attnlens_export.parity.compare import (
    BoolArray,
    Difference,
    FloatArray,
    difference,
    max_abs_difference,
    select_live,
)
from attnlens_export.parity.grid import Case, Inputs
from attnlens_export.parity.patterns import pattern_errors
from attnlens_export.parity.reference import Tensors, run_float64, run_fp32
from attnlens_export.parity.result import Invariants, Measurement, ParityResult, allowed_error, max_or_nan
from attnlens_export.parity.ties import make_clear_inputs
from attnlens_export.progress import StageProgress
from attnlens_model import AttentionOutput, Encoder, EncoderConfig

Described = Mapping[str, tuple[int, AttentionOutput]]
"""The outputs that belong to a layer: name -> layer, what it is."""


@dataclass(frozen=True)
class Subject:
    """A bundle, and what its graphs are compared with.

    Attributes:
        directory: the bundle's.
        encoder: the reference, fp32, in eval mode, on the CPU.
        config: its configuration.
        reference_name: where the reference's weights came from, for the report.
        cases: the grid.
    """

    directory: Path
    encoder: Encoder
    config: EncoderConfig
    reference_name: str
    cases: Sequence[Case]


class RunnableGraph(Protocol):
    """An ONNX file, open in some runtime."""

    @property
    def path(self) -> str:
        """Its place in the bundle."""

    def run(self, inputs: Inputs) -> Tensors:
        """Return every output by name."""


class Graph:
    """An ONNX file in ONNX Runtime, opened as attnlens-server opens it on the CPU.

    Args:
        directory: Bundle directory.
        path: The ONNX file, relative to `directory`.
        threads: Number of threads of a run. 0 means one per core.
        model: Graph to run in place of the file, whose weights it refers to. Changed by `locate_weights`.
    """

    def __init__(
        self, directory: Path, path: str, *, threads: int = 0, model: onnx.ModelProto | None = None
    ) -> None:
        self.path = path
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        # The threads must not burn the cores between two runs, while PyTorch computes.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # The arena would keep what the largest input needed, rounded up to a power of two.
        options.enable_cpu_mem_arena = False
        options.log_severity_level = 3  # errors come as exceptions
        source: Path | bytes = directory / path
        if model is not None:
            folder = locate_weights(model, (directory / path).parent)
            options.add_session_config_entry(
                "session.model_external_initializers_file_folder_path", str(folder)
            )
            source = model.SerializeToString()
        self._session = onnxruntime.InferenceSession(
            source,
            providers=["CPUExecutionProvider"],
            # Slower and less exact than the nodes that it replaces (onnxruntime issue 17689).
            sess_options=options,
            disabled_optimizers=["SkipLayerNormFusion"],
        )

    def run(self, inputs: Inputs) -> Tensors:
        """Return every output by name."""
        return self.run_feed(inputs.feed())

    def run_feed(self, feed: Mapping[str, npt.NDArray[np.generic]]) -> Tensors:
        """Return every output by name, for inputs by name."""
        names = [output.name for output in self._session.get_outputs()]
        return dict(zip(names, self._session.run(None, feed), strict=True))


@dataclass(frozen=True)
class Run:
    """What a graph returned for one input shape.

    Attributes:
        tensors: by name. They are taken out as they are compared, so that their memory is free again.
        max_batch_differences: by role, how much the shortest text differs from the same text run alone.
        invariants: what holds for any encoder.
    """

    tensors: Tensors
    max_batch_differences: dict[str, float]
    invariants: Invariants


@dataclass(frozen=True)
class _Comparison:
    """One output of a graph against both references, on live tokens."""

    difference: Difference
    error_float64: float
    reference_error_float64: float


def measure_parity(subject: Subject, graph_paths: Sequence[str], progress: StageProgress) -> ParityResult:
    """Run every case through every graph and through PyTorch.

    Memory is what decides the order. Graphs without attention maps come first, one after the other, and
    their small outputs are kept; then each case is compared layer by layer.

    Args:
        subject: the bundle and its reference.
        graph_paths: the ONNX files, relative to the bundle's directory.
        progress: called before each case.

    Returns:
        The measurements. Nothing is raised for a graph that differs: see `ParityResult.failures`.
    """
    directory, config, cases = subject.directory, subject.config, subject.cases
    inputs = {case: make_clear_inputs(case, config, subject.encoder) for case in cases}
    with_maps = [path for path in graph_paths if len(read_structure(directory / path).graph.output) > 1]
    kept: dict[str, dict[Case, Run]] = {}
    for path in graph_paths:
        if path not in with_maps:
            graph = Graph(directory, path)
            kept[path] = {
                case: run_case(graph, case, inputs[case], config) for case in _announced(cases, progress)
            }
            del graph
    graphs = {path: Graph(directory, path) for path in with_maps}
    measurements: list[Measurement] = []
    invariants: list[Invariants] = []
    for case in _announced(cases, progress):
        runs = {
            path: kept[path].pop(case) if path in kept else run_case(graphs[path], case, inputs[case], config)
            for path in graph_paths
            if path in kept or case.with_attentions
        }
        invariants += [run.invariants for run in runs.values()]
        measurements += compare_case(subject, case, inputs[case], runs)
    progress("", len(cases), len(cases))
    return ParityResult(
        tuple(cases), tuple(measurements), tuple(invariants), subject.reference_name, config.max_tokens
    )


def _announced(cases: Sequence[Case], progress: StageProgress) -> Iterator[Case]:
    for number, case in enumerate(cases):
        progress(str(case), number, len(cases))
        yield case


def run_case(graph: RunnableGraph, case: Case, inputs: Inputs, config: EncoderConfig) -> Run:
    """Run a graph on a case, and check what needs no reference."""
    tensors = graph.run(inputs)
    described = layer_outputs(config)
    return Run(
        tensors,
        _max_batch_differences(graph, inputs, tensors, described),
        _check_invariants(graph.path, case, inputs, tensors, config, described),
    )


def compare_case(
    subject: Subject, case: Case, inputs: Inputs, runs: Mapping[str, Run]
) -> Iterator[Measurement]:
    """Compare what graphs, by path, returned with PyTorch; their tensors are gone afterwards."""
    live = inputs.attention_mask == 1
    described = layer_outputs(subject.config)
    expected = run_fp32(subject.encoder, inputs, case.with_attentions)
    compared: dict[str, dict[str, _Comparison]] = {path: {} for path in runs}

    def compare(name: str, exact: FloatArray) -> None:
        if name not in expected:
            return
        fp32 = expected.pop(name)
        reference_error = _live_error(fp32, exact, live)
        for path, run in runs.items():
            if name in run.tensors:
                measured = run.tensors.pop(name)
                compared[path][name] = _Comparison(
                    difference(measured, fp32, live), _live_error(measured, exact, live), reference_error
                )

    compare(HIDDEN_OUTPUT, run_float64(subject.encoder, inputs, compare))
    for path, comparisons in compared.items():
        by_role: dict[str, dict[str, _Comparison]] = {HIDDEN_OUTPUT: {}}
        for name, comparison in comparisons.items():
            by_role.setdefault(_role(name, described), {})[name] = comparison
        for role, of_role in by_role.items():
            if of_role:
                yield _measurement(path, case, role, of_role, runs[path].max_batch_differences.get(role, 0.0))


def _measurement(
    path: str, case: Case, role: str, compared: dict[str, _Comparison], max_batch_difference: float
) -> Measurement:
    found = {name: each.difference for name, each in compared.items()}
    # A NaN is worse than any number.
    worst = max(found, key=lambda name: np.nan_to_num(found[name].max_abs, nan=np.inf))
    reference_error = max_or_nan(each.reference_error_float64 for each in compared.values())
    counts = [each.count for each in found.values()]
    return Measurement(
        graph=path,
        case=case,
        role=role,
        max_abs_error=found[worst].max_abs,
        max_abs_error_float64=max_or_nan(each.error_float64 for each in compared.values()),
        torch_max_abs_error_float64=reference_error,
        mean_abs_error=float(np.average([each.mean_abs for each in found.values()], weights=counts)),
        p99_abs_error=max_or_nan(each.p99_abs for each in found.values()),
        min_cosine=-max_or_nan(-each.min_cosine for each in found.values()),
        num_elements=sum(counts),
        allowed_error=allowed_error(reference_error),
        max_batch_difference=max_batch_difference,
        worst_output=worst,
        worst_index=found[worst].index,
        worst_values=found[worst].values,
    )


def _role(name: str, described: Described) -> str:
    return described[name][1].role if name in described else HIDDEN_OUTPUT


def _live_error(measured: FloatArray, exact: FloatArray, live: BoolArray) -> float:
    return max_abs_difference(select_live(measured, live), select_live(exact, live))


def _max_batch_differences(
    graph: RunnableGraph, inputs: Inputs, tensors: Tensors, described: Described
) -> dict[str, float]:
    """Run the shortest text of a batch alone and compare: by role, the largest difference."""
    lengths = inputs.attention_mask.sum(axis=1)
    if len(lengths) == 1:
        return {}
    row = int(np.where(lengths > 0, lengths, lengths.max() + 1).argmin())
    own = inputs.alone(row)
    live = own.attention_mask == 1
    length = live.shape[1]
    errors: dict[str, list[float]] = {}
    for name, tensor in graph.run(own).items():
        whole = tensors[name][row : row + 1]
        layout = described[name][1].layout if name in described else "per_token"
        num_columns = length if layout == "dense" else None
        together = whole[:, :length] if layout == "per_token" else whole[:, :, :length, :num_columns]
        errors.setdefault(_role(name, described), []).append(_live_error(tensor, together, live))
    return {role: max_or_nan(found) for role, found in errors.items()}


def _check_invariants(
    graph: str,
    case: Case,
    inputs: Inputs,
    tensors: Tensors,
    config: EncoderConfig,
    described: Described,
) -> Invariants:
    live = inputs.attention_mask == 1
    empty = ~live.any(axis=1)
    masked = np.broadcast_to(~live[:, None, None, :], (len(live), 1, case.length, case.length))
    if config.is_causal:
        masked = masked | np.triu(np.ones((case.length, case.length), dtype=np.bool_), k=1)
    places = np.arange(case.length)
    distances = np.abs(places[:, None] - places)
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
        # Where a layer sees nothing: keys farther away than its window, and masked ones.
        reach = config.layer_attentions[layer].reach
        zero = masked if reach is None else masked | (distances > reach)
        masked_weight = max(masked_weight, float(np.abs(np.where(zero, weights, 0)).max()))
        empty_row_weight = max(empty_row_weight, float(np.abs(weights[empty]).max(initial=0.0)))
    finite = all(bool(np.isfinite(tensor).all()) for tensor in tensors.values())
    return Invariants(graph, case, finite, row_sum_error, masked_weight, empty_row_weight)
