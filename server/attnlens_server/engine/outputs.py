"""What a batch has brought, and each text's part of it.

Letters: B texts, T tokens of a text, T' tokens of a row of the batch, with padding, H heads, K of them.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from attnlens.pooling import pool
from attnlens_server.engine.item import AttentionSelection, Item


class BatchOutputs(Protocol):
    """The outputs of a batch, wherever they are."""

    def hidden_state(self, row: int, num_tokens: int) -> npt.NDArray[np.float32]:
        """Return the token vectors of a text, (T, D), perhaps a view of the batch's."""

    def attention(
        self, name: str, row: int, num_tokens: int, selection: AttentionSelection
    ) -> npt.NDArray[np.float32]:
        """Return a text's weights of the layer that is output `name`, (K, T, T) or, averaged, (1, T, T)."""


@dataclass(frozen=True, slots=True)
class HostOutputs:
    """Outputs in the memory of the process.

    Attributes:
        arrays: by graph output name, `last_hidden_state` (B, T', D), `attentions.N` (B, H, T', T').
    """

    arrays: dict[str, npt.NDArray[np.float32]]

    def hidden_state(self, row: int, num_tokens: int) -> npt.NDArray[np.float32]:
        """Return the token vectors of a text, (T, D), a view of the batch's."""
        return self.arrays["last_hidden_state"][row, :num_tokens]

    def attention(
        self, name: str, row: int, num_tokens: int, selection: AttentionSelection
    ) -> npt.NDArray[np.float32]:
        """Return a text's weights of a layer, (K, T, T) or, averaged, (1, T, T).

        They are copied where others share the batch, so that a slow reader of one small text cannot keep
        the weights of all of them in memory.
        """
        batch, heads = self.arrays[name], selection.heads
        weights = batch[row, :, :num_tokens, :num_tokens]
        if heads is not None and heads != tuple(range(len(weights))):
            weights = weights[list(heads)]  # (K, T, T), a copy
        elif len(batch) > 1 and not selection.is_mean:
            weights = weights.copy()
        return weights.mean(axis=0, keepdims=True) if selection.is_mean else weights


def slice_item(outputs: BatchOutputs, row: int, item: Item) -> dict[str, npt.NDArray[np.float32]]:
    """Return what `item`, row `row` of its batch, has asked for, by output name.

    No array is part of a larger one, so that nothing keeps a batch in memory.
    """
    return {
        name: _token_vectors(outputs, row, item)
        if name == "last_hidden_state"
        else outputs.attention(name, row, item.num_tokens, item.attention)
        for name in item.output_names
    }


def _token_vectors(outputs: BatchOutputs, row: int, item: Item) -> npt.NDArray[np.float32]:
    """Return the token vectors of a text, (T, D), or their pooled vector, (D,)."""
    vectors = outputs.hidden_state(row, item.num_tokens)
    if item.pooling is not None:
        vectors = pool(vectors, item.pooling.pooling, item.pooling.num_excluded)
    whole = vectors.base
    is_part = isinstance(whole, np.ndarray) and whole.size > vectors.size
    return vectors.copy() if is_part else vectors
