"""One text on its way through the engine."""

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class ItemResult:
    """What the session computed for one text.

    Attributes:
        outputs: by graph output name, this text's slice without padding: `last_hidden_state` (T, D),
            `attentions.N` (H, T, T).
        queue_s: seconds between submission and the start of the batch.
        compute_s: seconds that the batch ran.
    """

    outputs: dict[str, npt.NDArray[np.float32]]
    queue_s: float
    compute_s: float


@dataclass(eq=False, slots=True)
class Item:
    """A text to run.

    Attributes:
        input_ids: (T,) int64.
        output_names: the graph outputs to keep.
        deadline: on the clock of `time.monotonic`; past it the item is dropped unrun. None: never.
        submitted_at: on the same clock.
        future: resolves to an ItemResult; cancelling it drops the item unless it already runs.
    """

    input_ids: npt.NDArray[np.int64]
    output_names: tuple[str, ...]
    deadline: float | None = None
    submitted_at: float = field(default_factory=time.monotonic)
    future: "Future[ItemResult]" = field(default_factory=Future)

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.input_ids)

    def is_dead(self, now: float) -> bool:
        """True where nobody waits for the result any more."""
        return self.future.cancelled() or (self.deadline is not None and now >= self.deadline)


def slice_item(
    arrays: dict[str, npt.NDArray[Any]], row: int, num_tokens: int, names: tuple[str, ...]
) -> dict[str, npt.NDArray[np.float32]]:
    """Cut row `row` out of a batch's outputs: `(B, T', D)` to `(T, D)`, `(B, H, T', T')` to `(H, T, T)`.

    Attention is copied where others share the batch, lest a slow reader of one small text hold on to the
    weights of all of them.
    """
    outputs = {}
    for name in names:
        batch = arrays[name]
        if name.startswith("attentions."):
            weights = batch[row, :, :num_tokens, :num_tokens]
            outputs[name] = weights.copy() if len(batch) > 1 else weights
        else:
            outputs[name] = batch[row, :num_tokens]
    return outputs
