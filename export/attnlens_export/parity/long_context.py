"""Comparison with PyTorch beyond the parity grid, for encoders with a long context.

The grid ends at the length at which the attention weights of a layer no longer fit into memory (see
`parity.grid`). Three comparisons need less memory and cover longer inputs:

1. The hidden states of the embeddings graph are compared with PyTorch in fp32 on one text. Its length is
   limited by the attention scores of one layer.
2. A small encoder with the model's position settings is traced and compared with PyTorch in fp32 and float64
   at up to `PROBE_TOKENS` tokens. It has one head, and one layer per distinct attention configuration. The
   position settings are rotary frequencies, ALiBi slopes, windows, relative position buckets and causal mask.
3. The position tables in the graph (rotary cosines and sines, bucket indices) are compared bit for bit up to
   the last position. `compare_tables` does this for every encoder.

Shapes: T tokens, H heads.
"""

import dataclasses
import math
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlens.v1.manifest_pb2 import LongContext as LongContextMessage
from attnlens_export.graph.names import EMBEDDINGS_PATH, HIDDEN_OUTPUT, embeddings_path
from attnlens_export.graph.trace import TracedGraph, embeddings_graph, trace
from attnlens_export.graph.write import write_embedded
from attnlens_export.json_files import finite
from attnlens_export.parity.grid import SEED, Case, Padding
from attnlens_export.parity.measure import ParityResult, Subject
from attnlens_export.parity.reference import (
    allowed_error,
    make_clear_inputs,
    max_abs_difference,
    run_float64,
    run_fp32,
)
from attnlens_export.parity.sessions import Graph
from attnlens_export.progress import StageProgress
from attnlens_export.results import CheckResult, Figure, max_or_nan
from attnlens_model import AttentionConfig, ConfigError, Encoder, EncoderConfig, new_encoder

MAX_SCORE_BYTES = 2**32
"""Maximum size of the attention scores (H, T, T) of one layer, in fp32. About three such tensors exist at a
time."""
MAX_MEMORY_SHARE = 0.15
"""Maximum share of memory for the scores of one layer."""
PROBE_TOKENS = 8192

Tracer = Callable[[Encoder, EncoderConfig], TracedGraph]


@dataclass(frozen=True)
class LongContext(CheckResult):
    """Errors on inputs that exceed the parity grid.

    Attributes:
        max_tokens: Maximum input length of the encoder.
        hidden_states_tokens: Longest input at which hidden states were compared, including the grid.
        hidden_states_error: max |ONNX - PyTorch fp32| at this length. None if the grid reached it.
        hidden_states_limit: Limit on `hidden_states_error`.
        probe_tokens: Input length of the one-head encoder. 0 if the mechanism does not exist with one head.
        probe_error: max |ONNX - PyTorch fp32| of the one-head encoder.
        probe_limit: Limit on `probe_error`.
        graph: Path of the graph.
    """

    max_tokens: int
    hidden_states_tokens: int
    hidden_states_error: float | None
    hidden_states_limit: float
    probe_tokens: int
    probe_error: float
    probe_limit: float
    graph: str = EMBEDDINGS_PATH

    def figures(self) -> list[Figure]:
        """Return both errors."""
        probe_failure = (
            f"positions at {self.probe_tokens} tokens: the hidden states of a one-head encoder with the "
            f"model's position settings differ from PyTorch by {self.probe_error:.2e} "
            f"(limit {self.probe_limit:.2e})"
        )
        probe = Figure(self.graph, self.probe_error, self.probe_limit, probe_failure)
        error = self.hidden_states_error
        if error is None:
            return [probe]
        failure = (
            f"{self.graph} at 1x{self.hidden_states_tokens}: hidden states differ from PyTorch by "
            f"{error:.2e} (limit {self.hidden_states_limit:.2e})"
        )
        return [Figure(self.graph, error, self.hidden_states_limit, failure), probe]

    def describe(self) -> str:
        """Return one line with the maximum length of each comparison."""
        line = f"hidden states compared up to {self.hidden_states_tokens:,} of {self.max_tokens:,} tokens"
        if self.hidden_states_tokens == self.max_tokens:
            return line
        if self.probe_tokens:
            line += f", positions with one head up to {self.probe_tokens:,}"
        return f"{line}; beyond that only position tables, bit for bit"

    def to_json(self) -> dict[str, Any]:
        """Return every field as a JSON value. Non-finite numbers become None."""
        values: dict[str, Any] = finite(dataclasses.asdict(self))
        del values["graph"]
        return values

    def to_message(self) -> LongContextMessage:
        """Return the manifest entry."""
        values = dataclasses.asdict(self)
        del values["graph"]
        return LongContextMessage(**{name: value for name, value in values.items() if value is not None})


def measure_long_context(
    subject: Subject, parity: ParityResult, progress: StageProgress, tracer: Tracer = trace
) -> LongContext | None:
    """Compare the embeddings graph and the model's position settings beyond the parity grid.

    Args:
        subject: Bundle and reference.
        parity: Measurements on the grid. The limit for hidden states is derived from their largest error of
            PyTorch fp32 against float64, since float64 at this length would need twice the memory.
        progress: Called before each comparison.
        tracer: Traces the one-head encoder.

    Returns:
        The errors, or None if the grid reached the longest input.
    """
    config = subject.config
    path = embeddings_path(subject.directory)
    on_grid = [measurement for measurement in parity.measurements if measurement.graph == path]
    reached = max(measurement.case.length for measurement in on_grid)
    if reached >= config.max_tokens:
        return None
    longest = min(config.max_tokens, longest_length(config))
    error = None
    if longest > reached:
        progress(f"hidden states, 1x{longest}", 0, 2)
        error = _hidden_states_error(subject, longest)
    limit = allowed_error(max_or_nan(measurement.torch_max_abs_error_float64 for measurement in on_grid))
    num_tokens, probe_error, probe_limit = 0, 0.0, 0.0
    probe = one_head_config(config)
    if probe is not None:
        num_tokens = min(config.max_tokens, PROBE_TOKENS)
        progress(f"positions, 1x{num_tokens}", 1, 2)
        probe_error, probe_limit = _probe_error(probe, num_tokens, tracer)
    progress("", 2, 2)
    return LongContext(
        config.max_tokens, max(longest, reached), error, limit, num_tokens, probe_error, probe_limit, path
    )


def memory_limit(cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the size of the machine's memory, or the limit of the container if smaller, in bytes."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # another version of cgroups, or "max"
            limits.append(int((cgroups / name).read_text(encoding="ascii")))
    return min(limits)


def longest_length(config: EncoderConfig) -> int:
    """Return the largest T at which the fp32 scores (H, T, T) of a layer are within the memory limits."""
    num_bytes = min(MAX_SCORE_BYTES, int(memory_limit() * MAX_MEMORY_SHARE))
    return math.isqrt(num_bytes // (4 * config.num_heads))


def one_head_config(config: EncoderConfig) -> EncoderConfig | None:
    """Return an encoder with one head and one layer per distinct attention configuration of `config`.

    Position settings, norms and masks are those of `config`. Returns None if a mechanism needs several heads,
    or for a module of the user.
    """
    if config.has_own_module:
        return None
    head_size = config.hidden_size // config.num_heads
    feed_forward = dataclasses.replace(
        config.layer_feed_forwards[0], intermediate_size=head_size, experts=None
    )
    try:
        attentions = tuple(_with_one_head(attention) for attention in dict.fromkeys(config.layer_attentions))
        return dataclasses.replace(
            config,
            hidden_size=max(_head_size(attention, head_size) for attention in attentions),
            num_layers=len(attentions),
            num_hidden_groups=None,
            attention=attentions,
            feed_forward=feed_forward,
            embeddings=dataclasses.replace(config.embeddings, size=None),
            convolution=None,
            per_layer_input=None,
            output_size=None,
        )
    except ConfigError:
        return None


def _with_one_head(attention: AttentionConfig) -> AttentionConfig:
    changes: dict[str, Any] = {"num_heads": 1}
    if hasattr(attention, "num_key_value_heads"):
        changes["num_key_value_heads"] = None
    if hasattr(attention, "output_projection"):
        changes["output_projection"] = True  # the value of one head may be smaller than the hidden size
    return dataclasses.replace(attention, **changes)


def _head_size(attention: AttentionConfig, default: int) -> int:
    size = getattr(attention, "head_size", None)
    return default if size is None else int(size)


def _hidden_states_error(subject: Subject, length: int) -> float:
    """Return max |ONNX - PyTorch fp32| of the hidden states of one text."""
    case = Case(1, length, Padding.NONE, with_attentions=False)
    inputs = make_clear_inputs(case, subject.config, subject.encoder)
    # Close the session before PyTorch runs, because both need memory for the scores of a layer.
    measured = Graph(subject.directory, embeddings_path(subject.directory)).run(inputs)[HIDDEN_OUTPUT]
    expected = run_fp32(subject.encoder, inputs, with_attentions=False)[HIDDEN_OUTPUT]
    return max_abs_difference(measured, expected)


def _probe_error(config: EncoderConfig, length: int, tracer: Tracer) -> tuple[float, float]:
    """Return max |ONNX - PyTorch fp32| of a newly initialized encoder, and its limit."""
    encoder = new_encoder(config, SEED)
    case = Case(1, length, Padding.NONE, with_attentions=False)
    inputs = make_clear_inputs(case, config, encoder)
    graph = embeddings_graph(tracer(encoder, config))
    with tempfile.TemporaryDirectory() as directory:
        write_embedded(Path(directory) / "probe.onnx", graph.proto, graph.weights)
        measured = Graph(Path(directory), "probe.onnx").run(inputs)[HIDDEN_OUTPUT]
    expected = run_fp32(encoder, inputs, with_attentions=False)[HIDDEN_OUTPUT]
    exact = run_float64(encoder, inputs, lambda _name, _output: None)
    error = max_abs_difference(measured, expected)
    return error, allowed_error(max_abs_difference(expected, exact))
