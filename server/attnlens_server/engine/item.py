"""One text on its way through the engine."""

import time
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from attnlens.v1.manifest_pb2 import Pooling


@dataclass(frozen=True, slots=True)
class AttentionSelection:
    """What to keep of a layer's attention weights.

    Attributes:
        heads: the numbers of the K heads to keep or to average, in this order; None: all, K = H.
        is_mean: keep only the mean over these heads.
    """

    heads: tuple[int, ...] | None = None
    is_mean: bool = False


ALL_HEADS = AttentionSelection()


@dataclass(frozen=True, slots=True)
class TokenPooling:
    """How the token vectors of a text become one vector; see `pool`.

    Attributes:
        pooling: never unspecified.
        num_excluded: how many tokens at the beginning don't count.
    """

    pooling: Pooling.ValueType
    num_excluded: int = 0


@dataclass(frozen=True, slots=True)
class ItemResult:
    """What the session computed for one text.

    Attributes:
        outputs: by graph output name, this text's part without padding: `last_hidden_state` (T, D), or
            pooled (D,); `attentions.N` (K, T, T), or (1, T, T) for the mean over heads.
        queue_s: seconds in the queue.
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
        attention: what to keep of each `attentions.N` among the outputs.
        pooling: reduces `last_hidden_state`; None: all token vectors are kept.
        queued_at: on the same clock, when the queue took it.
        future: resolves to an ItemResult; cancelling it drops the item unless it already runs.
    """

    input_ids: npt.NDArray[np.int64]
    output_names: tuple[str, ...]
    deadline: float | None = None
    attention: AttentionSelection = ALL_HEADS
    pooling: TokenPooling | None = None
    queued_at: float = field(default_factory=time.monotonic)
    future: "Future[ItemResult]" = field(default_factory=Future)

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.input_ids)

    def is_dead(self, now: float) -> bool:
        """True where nobody waits for the result any more."""
        return self.future.cancelled() or (self.deadline is not None and now >= self.deadline)
