"""The inputs on which a graph must agree with the encoder.

| length               | batch sizes | rows                                                         |
|----------------------|-------------|--------------------------------------------------------------|
| 1, 2, 7, 16, 33      | 1, 2, 3, 8  | all live; larger batches padded right, left, in the middle   |
| 7, 33                | 3           | one row of nothing but padding                               |
| 128                  | 1, 2, 3, 8  | all live; padded left, in the middle, right                  |
| the longest possible | 1, 2        | all live; padded right                                       |
| edges, and 1 beyond  | 2, 3        | padded right and left; padded in the middle                  |
| 1 beyond edges       | 3           | padded right by 0, 1 and 2 tokens                            |

Edges are lengths at which the computation of a mechanism changes: a window, a number of blocks. A batch with
texts on both sides of an edge shows whether each text is computed by its own length or by that of the batch.

Dense attention maps grow with the square of the length, so the longest input can't always be compared:
`default_grid` ends where the maps of one layer, in float64, or those of all layers, in fp32, would take more
memory than `MAX_LAYER_MAP_BYTES` and `MAX_MAP_BYTES`. Where only the second is exceeded, hidden states are
still compared, and both are at the longest length whose maps fit.

Lengths above what the encoder takes are left out. At the long lengths, where a case costs seconds, more would
repeat what the others show. The first row of a batch is always full, the others have a random number of live
tokens. Ids are uniform over the whole vocabulary, the padding id among them; padding holds the padding id.
"""

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

import numpy as np
import numpy.typing as npt

from attnlens_export.graph.names import input_names, output_axes
from attnlens_model import EncoderConfig

SEED = 20_260_101
SHORT_LENGTHS = (1, 2, 7, 16, 33)
EMPTY_ROW_LENGTHS = (7, 33)
LONG_LENGTH = 128
LONGEST_BATCH_SIZE = 2
# While one layer's map is computed in float64, three or four more tensors of this size exist.
MAX_LAYER_MAP_BYTES = 2**28
# What an attention graph returns at once: 2 x 512 tokens of BERT-large are 0.8 GB.
MAX_MAP_BYTES = 2**30

IntArray = npt.NDArray[np.int64]


class Padding(StrEnum):
    """Where a row's padding is."""

    NONE = "none"
    RIGHT = "right"
    LEFT = "left"
    MIDDLE = "middle"
    EMPTY_ROW = "empty_row"
    """Padded right, and the second row has no live token at all."""
    STEPS = "steps"
    """Padded right, each row by one token more than the row before, as far as one is left."""


@dataclass(frozen=True)
class Case:
    """One input shape of the grid; without attention maps where they would take too much memory."""

    batch_size: int
    length: int
    padding: Padding
    with_attentions: bool = True

    def __str__(self) -> str:
        return f"{self.batch_size}x{self.length} {self.padding}"


@dataclass(frozen=True)
class Inputs:
    """The tensors of a case: each (B, T) int64, `token_type_ids` None for a graph that takes none."""

    input_ids: IntArray
    attention_mask: IntArray
    token_type_ids: IntArray | None

    def feed(self) -> dict[str, IntArray]:
        """Return the inputs by name."""
        named = {"input_ids": self.input_ids, "attention_mask": self.attention_mask}
        return named if self.token_type_ids is None else named | {"token_type_ids": self.token_type_ids}

    def alone(self, row: int) -> Self:
        """Return one row as a batch of its own, without the padding to its right."""
        live = np.flatnonzero(self.attention_mask[row])
        cut = (slice(row, row + 1), slice(0, int(live[-1]) + 1))
        types = None if self.token_type_ids is None else self.token_type_ids[cut]
        return type(self)(self.input_ids[cut], self.attention_mask[cut], types)


def default_grid(config: EncoderConfig, longest: int | None = None) -> list[Case]:
    """Return the grid for an encoder.

    Args:
        config: the encoder's configuration.
        longest: the longest length, all its attention maps included; None: what the limits of this module
            allow. Never more than the encoder takes.
    """
    edges = sorted({edge for attention in config.layer_attentions for edge in attention.edges})
    if longest is not None:
        return full_grid(min(longest, config.max_tokens), edges)
    both, hidden_only = longest_lengths(config)
    cases = full_grid(hidden_only, edges)
    if both < hidden_only:
        cases += [case for case in _longest_cases(both) if case not in cases]
    return [
        dataclasses.replace(case, with_attentions=map_bytes(case, config) <= MAX_MAP_BYTES) for case in cases
    ]


def longest_lengths(config: EncoderConfig) -> tuple[int, int]:
    """Return the longest input whose attention maps are compared, and whose hidden states are."""
    lengths = range(1, config.max_tokens + 1)
    layers = range(config.num_layers)

    def layer_bytes(length: int) -> int:
        """In float64, of the layer that takes most."""
        return 8 * LONGEST_BATCH_SIZE * max(_num_values(config, layer, length) for layer in layers)

    def all_bytes(length: int) -> int:
        return map_bytes(Case(LONGEST_BATCH_SIZE, length, Padding.NONE), config)

    # At least 1: an encoder of which one token takes more has no memory to run either.
    hidden_only = max(1, bisect_right(lengths, MAX_LAYER_MAP_BYTES, key=layer_bytes))
    return max(1, min(hidden_only, bisect_right(lengths, MAX_MAP_BYTES, key=all_bytes))), hidden_only


def map_bytes(case: Case, config: EncoderConfig) -> int:
    """Return the size of all that layers return of attention for a case, in fp32."""
    layers = range(config.num_layers)
    return 4 * case.batch_size * sum(_num_values(config, layer, case.length) for layer in layers)


def _num_values(config: EncoderConfig, layer: int, length: int) -> int:
    """Return how many numbers a layer returns of attention for a text."""
    shapes = [output_axes(output)[1:] for output in config.layer_outputs(layer)]
    return sum(math.prod(axis if isinstance(axis, int) else length for axis in axes) for axes in shapes)


def full_grid(max_length: int, edges: Sequence[int] = ()) -> list[Case]:
    """Return the grid of this module's table for an encoder that takes up to `max_length` tokens."""
    cases = dict.fromkeys((*_short_cases(), *_long_cases(max_length), *_edge_cases(edges)))
    return [case for case in cases if case.length <= max_length]


def small_grid(max_length: int) -> list[Case]:
    """Return a few cases that touch every kind of padding: for tests, not for a bundle to be trusted."""
    length = min(7, max_length)
    return [
        Case(1, length, Padding.NONE),
        Case(2, length, Padding.LEFT),
        Case(3, length, Padding.MIDDLE),
        Case(3, length, Padding.EMPTY_ROW),
        Case(2, min(33, max_length), Padding.RIGHT),
    ]


def make_inputs(case: Case, config: EncoderConfig, seed: int = SEED) -> Inputs:
    """Draw the tensors of a case; the same case and seed give the same tensors."""
    key = (seed, case.batch_size, case.length, list(Padding).index(case.padding))
    generator = np.random.default_rng(key)
    shape = (case.batch_size, case.length)
    mask = np.stack([_row_mask(case, row, generator) for row in range(case.batch_size)])
    ids = generator.integers(0, config.embeddings.vocab_size, shape, dtype=np.int64)
    has_types = "token_type_ids" in input_names(config)
    types = generator.integers(0, config.embeddings.type_vocab_size, shape) if has_types else None
    return Inputs(np.where(mask == 1, ids, config.embeddings.pad_token_id), mask, types)


def _short_cases() -> Iterator[Case]:
    for length in SHORT_LENGTHS:
        yield Case(1, length, Padding.NONE)
        for batch_size in (2, 3, 8):
            # A single token leaves no room for padding.
            for padding in (Padding.RIGHT, Padding.LEFT, Padding.MIDDLE) if length > 1 else (Padding.NONE,):
                yield Case(batch_size, length, padding)
        if length in EMPTY_ROW_LENGTHS:
            yield Case(3, length, Padding.EMPTY_ROW)


def _long_cases(max_length: int) -> Iterator[Case]:
    yield Case(1, LONG_LENGTH, Padding.NONE)
    yield Case(2, LONG_LENGTH, Padding.LEFT)
    yield Case(3, LONG_LENGTH, Padding.MIDDLE)
    yield Case(8, LONG_LENGTH, Padding.RIGHT)
    if max_length not in (*SHORT_LENGTHS, LONG_LENGTH):
        yield from _longest_cases(max_length)


def _longest_cases(length: int) -> Iterator[Case]:
    yield Case(1, length, Padding.NONE)
    yield Case(LONGEST_BATCH_SIZE, length, Padding.RIGHT)


def _edge_cases(edges: Sequence[int]) -> Iterator[Case]:
    for edge in edges:
        for length in (edge, edge + 1):
            yield Case(2, length, Padding.RIGHT)
            yield Case(2, length, Padding.LEFT if length > 1 else Padding.NONE)
        yield Case(3, edge + 1, Padding.MIDDLE)
        yield Case(3, edge + 1, Padding.STEPS)


def _row_mask(case: Case, row: int, generator: np.random.Generator) -> IntArray:
    mask = np.ones(case.length, dtype=np.int64)
    if row == 0 or case.padding is Padding.NONE:
        return mask
    if case.padding is Padding.EMPTY_ROW and row == 1:
        return np.zeros_like(mask)
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
