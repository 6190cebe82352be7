"""What runs together, and what the graph gets of it. B texts, T tokens of a row, with padding."""

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


def pad(items: Sequence[Item], length: int, pad_token_id: int) -> GraphInputs:
    """Return the inputs of texts of at most `length` tokens; padding on the right."""
    shape = (len(items), length)
    input_ids = np.full(shape, pad_token_id, dtype=np.int64)
    attention_mask = np.zeros(shape, dtype=np.int64)
    token_type_ids = np.zeros(shape, dtype=np.int64)
    for row, item in enumerate(items):
        input_ids[row, : item.num_tokens] = item.input_ids
        attention_mask[row, : item.num_tokens] = 1
        if item.token_type_ids is not None:
            token_type_ids[row, : item.num_tokens] = item.token_type_ids
    return GraphInputs(input_ids, attention_mask, token_type_ids)
