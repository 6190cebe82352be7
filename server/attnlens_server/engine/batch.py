"""What runs together, and what the graph gets of it.

Letters: B texts, T tokens of a row, with padding, E components of an embedding, L layers, H heads.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from attnlens_server.engine.item import Item


class Batch(NamedTuple):
    """Items that run together."""

    items: list[Item]
    """Oldest first."""
    has_whole_machine: bool
    """True where nothing else waits or runs."""


class GraphInputs(NamedTuple):
    """The inputs of a graph, each (B, T) int64. One that takes no token types gets the first two."""

    input_ids: npt.NDArray[np.int64]
    attention_mask: npt.NDArray[np.int64]
    token_type_ids: npt.NDArray[np.int64]


class ContributionInputs(NamedTuple):
    """The inputs of the graph of contributions: those above, and a `Target` of each text."""

    input_ids: npt.NDArray[np.int64]
    attention_mask: npt.NDArray[np.int64]
    token_type_ids: npt.NDArray[np.int64]
    pooling_weights: npt.NDArray[np.float32]
    """(B, T), 0 for padding."""
    takes_maximum: npt.NDArray[np.float32]
    """(B,), 1 or 0."""
    direction: npt.NDArray[np.float32]
    """(B, E)."""
    towards_itself: npt.NDArray[np.float32]
    """(B,)."""
    num_dimensions: npt.NDArray[np.int64]
    """(B,)."""
    head_gates: npt.NDArray[np.float32]
    """(B, L, H)."""


Inputs = GraphInputs | ContributionInputs


def pad(items: Sequence[Item], length: int, pad_token_id: int) -> Inputs:
    """Return the inputs of texts of at most `length` tokens; padding on the right.

    Where they have targets, all have.
    """
    inputs = _pad_ids(items, length, pad_token_id)
    targets = [item.target for item in items if item.target is not None]
    if not targets:
        return inputs
    weights = np.zeros((len(targets), length), dtype=np.float32)
    for row, target in enumerate(targets):
        weights[row, : len(target.pooling_weights)] = target.pooling_weights
    return ContributionInputs(
        *inputs,
        pooling_weights=weights,
        takes_maximum=np.array([target.takes_maximum for target in targets], dtype=np.float32),
        direction=np.stack([target.direction for target in targets]),
        towards_itself=np.array([target.towards_itself for target in targets], dtype=np.float32),
        num_dimensions=np.array([target.num_dimensions for target in targets], dtype=np.int64),
        head_gates=np.stack([target.head_gates for target in targets]),
    )


def _pad_ids(items: Sequence[Item], length: int, pad_token_id: int) -> GraphInputs:
    shape = (len(items), length)
    input_ids = np.full(shape, pad_token_id, dtype=np.int64)
    attention_mask = np.zeros(shape, dtype=np.int64)
    token_type_ids = np.zeros(shape, dtype=np.int64)
    for row, item in enumerate(items):
        input_ids[row, : item.num_tokens] = item.input_ids
        attention_mask[row, : item.num_tokens] = 1
        if item.left_out is not None:
            attention_mask[row, item.left_out] = 0
        if item.token_type_ids is not None:
            token_type_ids[row, : item.num_tokens] = item.token_type_ids
    return GraphInputs(input_ids, attention_mask, token_type_ids)
