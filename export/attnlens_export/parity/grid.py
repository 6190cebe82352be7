"""The parity grid: input shapes on which a graph is compared with the PyTorch encoder.

| batch size | length   | padding                                                        |
|------------|----------|----------------------------------------------------------------|
| 1          | 1        | none                                                           |
| 8          | 9        | right; one text consists of padding only                       |
| 8          | 16       | middle                                                         |
| 8          | 33       | left                                                           |
| 2          | 128      | left                                                           |
| 1          | maximum  | none                                                           |
| 3          | edge + 1 | right by 0, 1 and 2 tokens                                     |
| 2          | edge     | left                                                           |

An edge is a length at which the computation of a mechanism changes, such as a window or a number of blocks. A
batch with texts on both sides of an edge shows whether each text is computed by its own length or by the
length of the batch. No encoder has more than three edges per distinct attention configuration.

The cases were chosen by mutants, graphs of encoders of many kinds in which a node or a constant is wrong
(`tests/graph_mutants.py`), and for what only a runtime can get wrong.

The size of dense attention weights grows with the square of the length. `default_grid` therefore ends at the
length at which one layer in float64 needs `MAX_LAYER_MAP_BYTES`. Attention is compared up to the length at
which all layers in fp32 need `MAX_MAP_BYTES`.

Lengths above the encoder's maximum are shortened to it, except those of edges, which are omitted. The first
text of a batch has no padding, the others have a random number of tokens. Token ids are drawn uniformly from
the whole vocabulary, including the padding id.

Shapes: B texts in a batch, T tokens.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

import numpy as np
import numpy.typing as npt

from attnlens_export.graph.names import input_names, output_axes
from attnlens_model import EncoderConfig

SEED = 20_260_101
LONG_LENGTH = 128
# The float64 computation of a layer needs three or four more tensors of this size.
MAX_LAYER_MAP_BYTES = 2**27
# All outputs of an attention graph. BERT-large returns 0.4 GB for 512 tokens.
MAX_MAP_BYTES = 2**29

IntArray = npt.NDArray[np.int64]


class Padding(StrEnum):
    """Position of the padding in a text."""

    NONE = "none"
    RIGHT = "right"
    LEFT = "left"
    MIDDLE = "middle"
    EMPTY_ROW = "empty_row"
    """Right. The second text consists of padding only."""
    STEPS = "steps"
    """Right. Each text has one token less than the previous one, but at least one."""


@dataclass(frozen=True)
class Case:
    """An input shape of the grid.

    Attributes:
        with_attentions: Whether attention is compared. False if it needs too much memory.
    """

    batch_size: int
    length: int
    padding: Padding
    with_attentions: bool = True

    def __str__(self) -> str:
        return f"{self.batch_size}x{self.length} {self.padding}"


@dataclass(frozen=True)
class Inputs:
    """Graph inputs of a case, each (B, T) int64. `token_type_ids` is None if the graph has no such input."""

    input_ids: IntArray
    attention_mask: IntArray
    token_type_ids: IntArray | None

    def feed(self) -> dict[str, IntArray]:
        """Return the graph inputs by name."""
        named = {"input_ids": self.input_ids, "attention_mask": self.attention_mask}
        return named if self.token_type_ids is None else named | {"token_type_ids": self.token_type_ids}

    def alone(self, row: int) -> Self:
        """Return one text as a batch of size 1, without the padding on its right."""
        tokens = np.flatnonzero(self.attention_mask[row])
        window = (slice(row, row + 1), slice(0, int(tokens[-1]) + 1))
        types = None if self.token_type_ids is None else self.token_type_ids[window]
        return type(self)(self.input_ids[window], self.attention_mask[window], types)


def default_grid(config: EncoderConfig, longest: int | None = None) -> list[Case]:
    """Return the grid for an encoder.

    Args:
        config: Configuration of the encoder.
        longest: Maximum length, up to the encoder's own maximum. Attention is compared at this length, too.
            If None, the memory limits of this module apply.
    """
    edges = sorted({edge for attention in config.layer_attentions for edge in attention.edges})
    if longest is not None:
        cases = full_grid(min(longest, config.max_tokens), edges)
        return _supported(cases, config)
    with_attentions, hidden_only = longest_lengths(config)
    cases = [*full_grid(hidden_only, edges), Case(1, with_attentions, Padding.NONE)]
    return [
        replace(case, with_attentions=map_bytes(case, config) <= MAX_MAP_BYTES)
        for case in _supported(cases, config)
    ]


def _supported(cases: Sequence[Case], config: EncoderConfig) -> list[Case]:
    """Return distinct cases. Modules of the user need to support only padding on the right."""
    if config.has_own_module:
        kept = Padding.NONE, Padding.RIGHT, Padding.STEPS
        cases = [case if case.padding in kept else replace(case, padding=Padding.RIGHT) for case in cases]
    return [*dict.fromkeys(cases)]


def longest_lengths(config: EncoderConfig) -> tuple[int, int]:
    """Return the maximum length at which attention is compared, and that for hidden states."""
    lengths = range(1, config.max_tokens + 1)
    layers = range(config.num_layers)

    def layer_bytes(length: int) -> int:
        """Return the size of the largest layer in float64."""
        return 8 * max(_num_values(config, layer, length) for layer in layers)

    def all_bytes(length: int) -> int:
        return map_bytes(Case(1, length, Padding.NONE), config)

    # At least 1: if a single token needs more memory, the encoder can't run either.
    hidden_only = max(1, bisect_right(lengths, MAX_LAYER_MAP_BYTES, key=layer_bytes))
    with_attentions = max(1, min(hidden_only, bisect_right(lengths, MAX_MAP_BYTES, key=all_bytes)))
    # A module returns the attention weights of all layers in every run.
    return with_attentions, with_attentions if config.has_own_module else hidden_only


def map_bytes(case: Case, config: EncoderConfig) -> int:
    """Return the size of the attention outputs of all layers for a case, in fp32."""
    layers = range(config.num_layers)
    return 4 * case.batch_size * sum(_num_values(config, layer, case.length) for layer in layers)


def _num_values(config: EncoderConfig, layer: int, length: int) -> int:
    """Return the number of values in the attention outputs of a layer for one text."""
    shapes = [output_axes(output)[1:] for output in config.layer_outputs(layer)]
    return sum(math.prod(axis if isinstance(axis, int) else length for axis in axes) for axes in shapes)


def full_grid(max_length: int, edges: Sequence[int] = ()) -> list[Case]:
    """Return all cases of the table in the module docstring up to `max_length` tokens."""
    cases = [
        Case(1, 1, Padding.NONE),
        Case(8, min(9, max_length), Padding.EMPTY_ROW),
        Case(8, min(16, max_length), Padding.MIDDLE),
        Case(8, min(33, max_length), Padding.LEFT),
        Case(2, min(LONG_LENGTH, max_length), Padding.LEFT),
        Case(1, max_length, Padding.NONE),
    ]
    for edge in edges:
        cases += [Case(3, edge + 1, Padding.STEPS), Case(2, edge, Padding.LEFT)]
    return [case for case in dict.fromkeys(cases) if case.length <= max_length]


def small_grid(max_length: int) -> list[Case]:
    """Return a few cases for tests. They cover every kind of padding, but do not verify a bundle."""
    length = min(7, max_length)
    return [
        Case(1, length, Padding.NONE),
        Case(2, length, Padding.LEFT),
        Case(3, length, Padding.MIDDLE),
        Case(3, length, Padding.EMPTY_ROW),
        Case(2, min(33, max_length), Padding.RIGHT),
    ]


def make_inputs(case: Case, config: EncoderConfig, seed: int = SEED) -> Inputs:
    """Draw the graph inputs of a case. The same arguments always give the same inputs."""
    key = (seed, case.batch_size, case.length, list(Padding).index(case.padding))
    generator = np.random.default_rng(key)
    shape = (case.batch_size, case.length)
    mask = np.stack([_row_mask(case, row, generator) for row in range(case.batch_size)])
    ids = generator.integers(0, config.embeddings.vocab_size, shape, dtype=np.int64)
    has_types = "token_type_ids" in input_names(config)
    types = generator.integers(0, config.embeddings.type_vocab_size, shape) if has_types else None
    return Inputs(np.where(mask == 1, ids, config.embeddings.pad_token_id), mask, types)


def _row_mask(case: Case, row: int, generator: np.random.Generator) -> IntArray:
    mask = np.ones(case.length, dtype=np.int64)
    if case.padding is Padding.EMPTY_ROW and row == 1:
        return np.zeros_like(mask)
    if row == 0 or case.padding is Padding.NONE or case.length == 1:
        return mask
    if case.padding is Padding.STEPS:
        mask[max(1, case.length - row) :] = 0
        return mask
    padded = int(generator.integers(1, case.length))
    if case.padding is Padding.LEFT:
        mask[:padded] = 0
    elif case.padding is Padding.MIDDLE:
        start = int(generator.integers(1, case.length - padded + 1))
        mask[start : start + padded] = 0
    else:
        mask[case.length - padded :] = 0
    return mask
