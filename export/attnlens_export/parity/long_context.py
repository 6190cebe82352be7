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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from attnlens.v1.manifest_pb2 import LongContext as LongContextMessage
from attnlens_export.graph.names import HIDDEN_OUTPUT, embeddings_path
from attnlens_export.graph.trace import TracedGraph, embeddings_graph, trace
from attnlens_export.graph.write import write_embedded
from attnlens_export.parity.grid import SEED, Case, Inputs, Padding
from attnlens_export.parity.measure import Subject
from attnlens_export.parity.reference import (
    allowed_error,
    make_clear_inputs,
    max_abs_difference,
    run_float64,
    run_fp32,
)
from attnlens_export.parity.sessions import Graph
from attnlens_export.progress import StageProgress
from attnlens_export.results import Comparison, Errors, Result
from attnlens_model import AttentionConfig, ConfigError, Encoder, EncoderConfig, new_encoder

MAX_SCORE_BYTES = 2**28
"""Maximum size of the attention scores (H, T, T) of one layer, in fp32. Up to seven such tensors exist
at a time."""
MAX_MEMORY_SHARE = 0.15
"""Maximum share of memory for the scores of one layer."""
PROBE_TOKENS = 4096
"""Maximum length of the one-head encoder: 128 MiB of scores in float64, up to seven times."""

Tracer = Callable[[Encoder, EncoderConfig], TracedGraph]


@dataclass(frozen=True)
class LongContext(Result):
    """Errors on inputs that exceed the parity grid.

    Attributes:
        message: Entry of the manifest.
    """

    may_be_empty: ClassVar[bool] = True  # a module of the user, and no memory for a longer text

    message: LongContextMessage = field(default_factory=LongContextMessage)


def measure_long_context(
    subject: Subject, parity: Result, progress: StageProgress, tracer: Tracer = trace
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
    on_grid = Errors.merged([errors for errors in parity.errors if errors.graph == path])
    if on_grid.num_tokens >= config.max_tokens:
        return None
    longest = min(config.max_tokens, longest_length(config))
    message = LongContextMessage(
        max_tokens=config.max_tokens,
        hidden_states_tokens=max(longest, on_grid.num_tokens),
        hidden_states_limit=allowed_error(on_grid.torch_max_abs_error_float64),
    )
    comparisons = []
    if longest > on_grid.num_tokens:
        progress(f"hidden states, 1x{longest}", 0, 2)
        message.hidden_states_error = _hidden_states_error(subject, longest)
        error, limit = message.hidden_states_error, message.hidden_states_limit
        comparisons.append(Comparison(path, f"1x{longest}", error, limit, what="error of hidden states"))
    probe = one_head_config(config)
    if probe is not None:
        message.probe_tokens = min(config.max_tokens, PROBE_TOKENS)
        inputs = f"1x{message.probe_tokens}"
        progress(f"positions, {inputs}", 1, 2)
        message.probe_error, message.probe_limit = _probe_error(probe, message.probe_tokens, tracer)
        what = "error of positions in a one-head encoder"
        comparisons.append(Comparison(path, inputs, message.probe_error, message.probe_limit, what=what))
    progress("", 2, 2)
    return LongContext(
        title="Longer inputs",
        reference="PyTorch in fp32",
        inputs="1 text",
        comparisons=tuple(comparisons),
        remarks=(_describe(message),),
        message=message,
    )


def store_long_text(subject: Subject) -> None:
    """Run the longest text in PyTorch, if it is longer than the inputs of the grid."""
    longest = min(subject.config.max_tokens, longest_length(subject.config))
    if longest > max(case.length for case in subject.cases):
        subject.references.fp32(_long_inputs(subject, longest))


def _long_inputs(subject: Subject, length: int) -> Inputs:
    case = Case(1, length, Padding.NONE, with_attentions=False)
    return subject.references.inputs(case, subject.config)


def _describe(message: LongContextMessage) -> str:
    """Return one line with the maximum length of each comparison."""
    line = f"hidden states compared up to {message.hidden_states_tokens:,} of {message.max_tokens:,} tokens"
    if message.hidden_states_tokens == message.max_tokens:
        return line
    if message.probe_tokens:
        line += f", positions with one head up to {message.probe_tokens:,}"
    return f"{line}; beyond that only position tables, bit for bit"


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
    if config.has_own_module:  # it returns those of all layers, multiplied by the mask
        num_bytes //= 2 * config.num_layers
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
    inputs = _long_inputs(subject, length)
    measured = Graph(subject.directory, embeddings_path(subject.directory)).run(inputs)[HIDDEN_OUTPUT]
    return max_abs_difference(measured, subject.references.fp32(inputs)[HIDDEN_OUTPUT])


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
