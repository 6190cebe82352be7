"""Does each graph compute what the PyTorch encoder computes? Measured on a grid, against fp32 and float64.

The gate, for each input shape and each output kind: the largest |ONNX - PyTorch fp32| on live tokens is at
most `TOLERANCE`, or at most `REFERENCE_ERROR_RATIO` times the error that PyTorch in fp32 itself has against
float64 on the same input. A large model has large activations; nobody can ask more of a runtime than of its
reference.

B batch, T tokens, D width, H heads, L layers.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import onnxruntime
import torch

from attnlens_export.compare import BoolArray, FloatArray, difference, max_abs_difference, select_live
from attnlens_export.graph import ATTENTION_PREFIX, HIDDEN_OUTPUT
from attnlens_export.grid import Case, Inputs, make_inputs
from attnlens_export.result import Invariants, Measurement, ParityResult, allowed_error, max_or_nan
from attnlens_model import Encoder, EncoderConfig

# Attention maps above this are left out of the comparison; 2 x 512 tokens of BERT-large are 0.8 GB.
MAX_MAP_BYTES = 2**30
ATTENTIONS = "attentions"

# From here on PyTorch may use all its threads.
_TOKENS_FOR_THREADS = 256

CaseProgress = Callable[[int, int, str], None]
Tensors = dict[str, FloatArray]


@dataclass(frozen=True)
class Outputs:
    """What an encoder returns: hidden states (B, T, D) and L maps (B, H, T, T), perhaps none."""

    hidden: FloatArray
    attentions: tuple[FloatArray, ...]

    def kinds(self) -> dict[str, Tensors]:
        """Return the tensors by name, grouped by output kind."""
        hidden = {HIDDEN_OUTPUT: {HIDDEN_OUTPUT: self.hidden}}
        if not self.attentions:
            return hidden
        named = {f"{ATTENTION_PREFIX}{layer}": weights for layer, weights in enumerate(self.attentions)}
        return hidden | {ATTENTIONS: named}


class Reference:
    """The PyTorch encoder in fp32 and a float64 copy of it."""

    def __init__(self, encoder: Encoder) -> None:
        self._fp32 = encoder
        self._float64 = copy.deepcopy(encoder).double()

    def run(self, inputs: Inputs, with_attentions: bool) -> tuple[Outputs, Outputs]:
        """Return the outputs in fp32 and in float64."""
        return _run_torch(self._fp32, inputs, with_attentions), _run_torch(
            self._float64, inputs, with_attentions
        )


class RunnableGraph(Protocol):
    """An ONNX file, open in some runtime."""

    @property
    def path(self) -> str:
        """Its place in the bundle."""

    def run(self, inputs: Inputs) -> Outputs:
        """Return every output."""


class Graph:
    """An ONNX file in ONNX Runtime, opened as attnlens-server opens it on the CPU."""

    def __init__(self, directory: Path, path: str) -> None:
        self.path = path
        options = onnxruntime.SessionOptions()
        # The threads must not burn the cores between two runs, while PyTorch computes.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = onnxruntime.InferenceSession(
            directory / path,
            providers=["CPUExecutionProvider"],
            # Slower and less exact than the nodes that it replaces (onnxruntime issue 17689).
            sess_options=options,
            disabled_optimizers=["SkipLayerNormFusion"],
        )

    @property
    def has_attentions(self) -> bool:
        """Whether it returns attention maps."""
        return len(self._session.get_outputs()) > 1

    def run(self, inputs: Inputs) -> Outputs:
        """Return every output."""
        hidden, *attentions = self._session.run(None, inputs.feed())
        return Outputs(hidden, tuple(attentions))


def measure_parity(
    encoder: Encoder,
    config: EncoderConfig,
    directory: Path,
    graph_paths: Sequence[str],
    cases: Sequence[Case],
    *,
    reference_name: str,
    progress: CaseProgress,
) -> ParityResult:
    """Run every case through every graph and through PyTorch.

    Args:
        encoder: the reference, fp32, in eval mode, on the CPU.
        config: its configuration.
        directory: the bundle's directory.
        graph_paths: the ONNX files, relative to it.
        cases: the grid.
        reference_name: where the reference's weights came from, for the report.
        progress: called before each case with its number, the number of cases, and its name.

    Returns:
        The measurements. Nothing is raised for a graph that differs: see `ParityResult.failures`.
    """
    reference = Reference(encoder)
    graphs = [Graph(directory, path) for path in graph_paths]
    measurements: list[Measurement] = []
    invariants: list[Invariants] = []
    for number, case in enumerate(cases):
        progress(number, len(cases), str(case))
        inputs = make_inputs(case, config)
        with_attentions = map_bytes(case, config) <= MAX_MAP_BYTES
        with torch_threads(case):
            fp32, float64 = reference.run(inputs, with_attentions)
        for graph in graphs:
            if graph.has_attentions and not with_attentions:
                continue
            found, holds = measure_case(graph, case, inputs, fp32, float64, config)
            measurements += found
            invariants.append(holds)
    progress(len(cases), len(cases), "")
    return ParityResult(tuple(cases), tuple(measurements), tuple(invariants), reference_name)


def measure_case(
    graph: RunnableGraph, case: Case, inputs: Inputs, fp32: Outputs, float64: Outputs, config: EncoderConfig
) -> tuple[list[Measurement], Invariants]:
    """Run a case and compare: one measurement for each output kind, and what holds for any encoder."""
    outputs = graph.run(inputs)
    measurements = _measure(graph, case, inputs, outputs, fp32, float64)
    return [*measurements], _check_invariants(graph.path, case, inputs, outputs, config)


def map_bytes(case: Case, config: EncoderConfig) -> int:
    """Return the size of all fp32 attention maps of a case."""
    return 4 * config.num_layers * config.num_heads * case.batch_size * case.length**2


def _measure(
    graph: RunnableGraph, case: Case, inputs: Inputs, outputs: Outputs, fp32: Outputs, float64: Outputs
) -> Iterator[Measurement]:
    live = inputs.attention_mask == 1
    alone = _alone_errors(graph, inputs, outputs)
    for kind, measured in outputs.kinds().items():
        expected, exact = fp32.kinds()[kind], float64.kinds()[kind]
        found = {name: difference(measured[name], expected[name], live) for name in measured}
        # A NaN is worse than any number.
        worst = max(found, key=lambda name: np.nan_to_num(found[name].max_abs, nan=np.inf))
        reference_error = _live_error(expected, exact, live)
        counts = [each.count for each in found.values()]
        yield Measurement(
            graph=graph.path,
            case=case,
            output=kind,
            max_abs_error=found[worst].max_abs,
            max_abs_error_float64=_live_error(measured, exact, live),
            torch_abs_error_float64=reference_error,
            mean_abs_error=float(np.average([each.mean_abs for each in found.values()], weights=counts)),
            p99_abs_error=max_or_nan(each.p99_abs for each in found.values()),
            min_cosine=-max_or_nan(-each.min_cosine for each in found.values()),
            num_elements=sum(counts),
            allowed_error=allowed_error(reference_error),
            alone_error=alone.get(kind, 0.0),
            worst_output=worst,
            worst_index=found[worst].index,
            worst_values=found[worst].values,
        )


def _live_error(measured: Tensors, exact: Tensors, live: BoolArray) -> float:
    return max(
        max_abs_difference(select_live(measured[name], live), select_live(exact[name], live))
        for name in measured
    )


def _alone_errors(graph: RunnableGraph, inputs: Inputs, outputs: Outputs) -> dict[str, float]:
    """Run the shortest text of a batch alone and compare: by output kind, the largest difference."""
    lengths = inputs.attention_mask.sum(axis=1)
    if len(lengths) == 1:
        return {}
    row = int(np.where(lengths > 0, lengths, lengths.max() + 1).argmin())
    own = inputs.alone(row)
    live = own.attention_mask == 1
    length = live.shape[1]
    cut = Outputs(
        outputs.hidden[row : row + 1, :length],
        tuple(layer[row : row + 1, :, :length, :length] for layer in outputs.attentions),
    )
    together = cut.kinds()
    return {
        kind: _live_error(tensors, together[kind], live) for kind, tensors in graph.run(own).kinds().items()
    }


def _check_invariants(
    graph: str, case: Case, inputs: Inputs, outputs: Outputs, config: EncoderConfig
) -> Invariants:
    live = inputs.attention_mask == 1
    empty = ~live.any(axis=1)
    masked = np.broadcast_to(~live[:, None, None, :], (len(live), 1, case.length, case.length))
    if config.is_causal:
        masked = masked | np.triu(np.ones((case.length, case.length), dtype=np.bool_), k=1)
    row_sum_error = masked_weight = empty_row_weight = 0.0
    finite = bool(np.isfinite(outputs.hidden).all())
    for layer in outputs.attentions:
        finite = finite and bool(np.isfinite(layer).all())
        sums = select_live(layer, live).sum(axis=-1, dtype=np.float64)
        row_sum_error = max(row_sum_error, float(np.abs(sums - 1).max()))
        masked_weight = max(masked_weight, float(np.abs(np.where(masked, layer, 0)).max()))
        empty_row_weight = max(empty_row_weight, float(np.abs(layer[empty]).max(initial=0.0)))
    return Invariants(graph, case, finite, row_sum_error, masked_weight, empty_row_weight)


@contextmanager
def torch_threads(case: Case) -> Iterator[None]:
    """Keep PyTorch to one thread for small inputs.

    More do not help there, and on a busy machine each operation then waits for a thread that has no core.
    """
    threads = torch.get_num_threads()
    if case.batch_size * case.length < _TOKENS_FOR_THREADS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@torch.inference_mode()
def _run_torch(encoder: Encoder, inputs: Inputs, with_attentions: bool) -> Outputs:
    feed = {name: torch.from_numpy(array) for name, array in inputs.feed().items()}
    output = encoder(**feed, output_attentions=with_attentions)
    return Outputs(output.last_hidden_state.numpy(), tuple(layer.numpy() for layer in output.attentions))
