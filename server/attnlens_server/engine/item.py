"""One text on its way through the engine.

Letters: T tokens, D hidden size, E components of an embedding, L layers, H heads, K of them.
"""

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from attnlens.patterns import Pattern
from attnlens.pooling import Pooling
from attnlens.reductions import AttentionReduction, Reduced, TextUnits
from attnlens_server.bundle import Layout


@dataclass(frozen=True, slots=True)
class HeadSelection:
    """What to keep of an output that has heads.

    Attributes:
        heads: the numbers of the K heads to keep or to average, in this order; None: all, K = H.
        is_mean: keep only the mean over these heads.
        is_dense: put a band or blocks together as dense weights, before the mean.
    """

    heads: tuple[int, ...] | None = None
    is_mean: bool = False
    is_dense: bool = False


@dataclass(frozen=True, slots=True)
class TokenPooling:
    """How the token vectors of a text become one vector; see `attnlens.pooling.pool`.

    Attributes:
        pooling: which formula.
        num_excluded: how many tokens at the beginning don't count.
    """

    pooling: Pooling
    num_excluded: int = 0


@dataclass(frozen=True, slots=True)
class WeightedPooling:
    """The same with a weight for each token (T,); see `attnlens.explanations.pool_weighted`."""

    pooling: Pooling
    weights: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Target:
    """What contributions add up to: (direction + towards_itself * p / |p|) . p / |p|, p being the embedding.

    Attributes:
        pooling_weights: of the token vectors, (T,).
        takes_maximum: pool by the maximum over the tokens whose weight is above 0.
        direction: (E,) float32.
        towards_itself: see above.
        num_dimensions: how many components p has; the others are cut off.
        head_gates: (L, H) float32, what the output of each head is multiplied with.
    """

    pooling_weights: npt.NDArray[np.float32]
    takes_maximum: bool
    direction: npt.NDArray[np.float32]
    towards_itself: float
    num_dimensions: int
    head_gates: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Wanted:
    """An output of the graph, and what to keep of a text's part of it.

    Attributes:
        name: the graph's name for it.
        layout: where its axes are.
        keep: some heads, or the pooled vector; None: all.
        pattern: of a band or of blocks.
    """

    name: str
    layout: Layout = Layout.PER_TOKEN
    keep: HeadSelection | TokenPooling | WeightedPooling | None = None
    pattern: Pattern | None = None


@dataclass(frozen=True, slots=True)
class WantedReduction:
    """Weights between the tokens of a text, and what to make of them before anybody else sees them.

    Attributes:
        layers: one, or all that are joined, in ascending order; each comes as dense weights (K, T, T).
        reduction: what to do.
        units: of the text; None: not needed.
        is_mean_of_heads: average heads.
    """

    layers: tuple[Wanted, ...]
    reduction: AttentionReduction
    units: TextUnits | None = None
    is_mean_of_heads: bool = False


@dataclass(frozen=True, slots=True)
class ItemResult:
    """What came out for one text.

    Attributes:
        arrays: one for each `Wanted` of the item, without padding, in fp32: (T, D), pooled (D,); of what has
            heads (K, T, T), (T, K) or, of a band or blocks, (K, T, W); with the mean over heads K is 1. Of
            contributions (T,), (), (L, H) and (E,).
        queue_s: seconds in the queue.
        compute_s: seconds that the batch ran.
        reduced: one for each `WantedReduction` of the item.
    """

    arrays: tuple[npt.NDArray[np.float32], ...]
    queue_s: float
    compute_s: float
    reduced: tuple[Reduced, ...] = ()


@dataclass(eq=False, slots=True)
class Item:
    """A text to run.

    Attributes:
        input_ids: (T,) int64.
        wanted: what to return of it; an output may be wanted several times.
        token_type_ids: (T,) int64; None: zeros.
        reductions: what else to return of it, reduced.
        target: of contributions; None for the other graphs.
        left_out: the token that nothing attends to; None: all are there.
        is_background: Whether its call needs many runs. Items of other calls overtake it.
        deadline: on the clock of `time.monotonic`; past it the item is dropped unrun. None: never.
        queued_at: on the same clock; set by the queue.
        future: resolves to an ItemResult; cancelling it drops the item unless it already runs.
    """

    input_ids: npt.NDArray[np.int64]
    wanted: tuple[Wanted, ...]
    token_type_ids: npt.NDArray[np.int64] | None = None
    deadline: float | None = None
    reductions: tuple[WantedReduction, ...] = ()
    target: Target | None = None
    left_out: int | None = None
    is_background: bool = False
    queued_at: float = 0.0
    future: "Future[ItemResult]" = field(default_factory=Future)

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.input_ids)

    @property
    def output_names(self) -> Iterator[str]:
        """The graph's names for what it takes, some perhaps several times."""
        yield from (wanted.name for wanted in self.wanted)
        for reduction in self.reductions:
            yield from (wanted.name for wanted in reduction.layers)

    def is_dead(self, now: float) -> bool:
        """True where nobody waits for the result any more."""
        return self.future.cancelled() or (self.deadline is not None and now >= self.deadline)
