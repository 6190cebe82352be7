"""Items of work, batches of items, graph inputs, and the part of a batch's outputs that belongs to an item.

Shapes: B texts in a batch, T tokens of a text, T' tokens of a padded row, D hidden size, E embedding size,
L layers, H heads, K selected heads, W columns of a band or of blocks.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, overload

import numpy as np
import numpy.typing as npt

from attnlens.explanations import pool_weighted
from attnlens.patterns import Band, Pattern
from attnlens.pooling import Pooling, pool
from attnlens.reductions import AttentionReduction, Reduced, TextUnits, reduce
from attnlens_server.bundle import Layout
from attnlens_server.clients import ANONYMOUS, Client
from attnlens_server.errors import InvalidResultError


@dataclass(frozen=True, slots=True)
class HeadSelection:
    """Selection of heads from an output that has a head axis.

    Attributes:
        heads: Indices of the K heads to return or to average, in this order. None selects all heads.
        is_mean: Whether to return the mean over the selected heads.
        is_dense: Whether to convert a band or blocks to dense weights before averaging.
    """

    heads: tuple[int, ...] | None = None
    is_mean: bool = False
    is_dense: bool = False


@dataclass(frozen=True, slots=True)
class TokenPooling:
    """Pooling of token vectors into one vector. See `attnlens.pooling.pool`.

    Attributes:
        pooling: Pooling method.
        num_excluded: Number of leading tokens to exclude, e.g. those of a prompt.
    """

    pooling: Pooling
    num_excluded: int = 0


@dataclass(frozen=True, slots=True)
class WeightedPooling:
    """Pooling with one weight per token, shape (T,). See `attnlens.explanations.pool_weighted`."""

    pooling: Pooling
    weights: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Target:
    """Scalar that contributions add up to, as a function of the embedding p.

    The target is (direction + towards_itself * p / |p|) . p / |p|.

    Attributes:
        pooling_weights: Pooling weight of each token, shape (T,).
        takes_maximum: Whether to pool by the maximum over the tokens with a positive weight.
        direction: (E,) float32.
        towards_itself: Weight of the normalized embedding itself in the direction.
        num_dimensions: Number of leading components of p to keep.
        head_gates: (L, H) float32, factors applied to the output of each head.
    """

    pooling_weights: npt.NDArray[np.float32]
    takes_maximum: bool
    direction: npt.NDArray[np.float32]
    towards_itself: float
    num_dimensions: int
    head_gates: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """A requested graph output, and which part of it to return.

    Attributes:
        name: Output name in the graph.
        layout: Order of the output's axes.
        keep: Heads to select or pooling to apply. None returns the whole output.
        pattern: Sparsity pattern, if the output is a band or blocks.
    """

    name: str
    layout: Layout = Layout.PER_TOKEN
    keep: HeadSelection | TokenPooling | WeightedPooling | None = None
    pattern: Pattern | None = None


@dataclass(frozen=True, slots=True)
class RequestedReduction:
    """A requested reduction of attention weights, computed before the weights leave the engine.

    Attributes:
        layers: Attention outputs in ascending layer order, each returned as dense weights (K, T, T).
        reduction: Reduction to apply.
        is_mean_of_heads: Whether to average over heads.
    """

    layers: tuple[RequestedOutput, ...]
    reduction: AttentionReduction
    is_mean_of_heads: bool = False


@dataclass(frozen=True, slots=True)
class ItemResult:
    """Result for one text.

    Attributes:
        arrays: One fp32 array without padding per requested output: token vectors (T, D), an embedding
            (D,), dense attention (K, T, T), head gates (T, K), or a band or blocks (K, T, W). K is 1 for the
            mean over heads. The contributions graph returns (T,), (), (L, H) and (E,).
        queue_s: Time in the queue, in seconds.
        compute_s: Compute time of the batch, in seconds.
        reduced: One reduction per `RequestedReduction` of the item.
    """

    arrays: tuple[npt.NDArray[np.float32], ...]
    queue_s: float
    compute_s: float
    reduced: tuple[Reduced, ...] = ()


class Elapsed(NamedTuple):
    """Times of an item, in seconds."""

    queue_s: float
    compute_s: float


@dataclass(eq=False, slots=True)
class Item:
    """One run of the model on one text.

    Attributes:
        input_ids: (T,) int64.
        requested: Outputs to return. The same graph output may be requested several times.
        token_type_ids: (T,) int64. None means zeros.
        reductions: Reductions to return.
        units: Words and special tokens of the text. None if no reduction needs them.
        target: Target of the contributions graph. None for all other graphs.
        masked_token: Index of the token to mask for leave-one-out. If None, no token is masked.
        is_background: Whether the item belongs to a call with many runs, or to a bulk client. Other items
            overtake it.
        deadline: `time.monotonic` time after which the item is dropped if it has not started. None if the
            call has no deadline.
        is_light: Whether the express lane may run the item, because it belongs to a small call of an
            interactive client while other clients have calls.
        queued_at: `time.monotonic` time at which the item was queued.
        started_at: `time.monotonic` time at which its batch started, or 0.
        client: Sender of the item.
        turn: Position in the queue, see `scheduler.Turns`.
        future: Resolves to an `ItemResult`. Canceling it drops the item unless it is already running.
        is_abandoned: Whether nobody needs the result. A long batch of such items is stopped.
    """

    input_ids: npt.NDArray[np.int64]
    requested: tuple[RequestedOutput, ...]
    token_type_ids: npt.NDArray[np.int64] | None = None
    deadline: float | None = None
    reductions: tuple[RequestedReduction, ...] = ()
    units: TextUnits | None = None
    target: Target | None = None
    masked_token: int | None = None
    is_background: bool = False
    is_light: bool = False
    queued_at: float = 0.0
    started_at: float = 0.0
    client: Client = ANONYMOUS
    turn: float = 0.0
    future: "Future[ItemResult]" = field(default_factory=Future)
    is_abandoned: bool = False

    def abandon(self) -> None:
        """Drop the item, or stop its batch if all other items of the batch are abandoned, too."""
        self.is_abandoned = True
        self.future.cancel()  # no effect on a running or finished item

    def elapsed(self, now: float) -> Elapsed:
        """Return the times of the item in the queue and in a batch until now, or until its result."""
        if self.future.done() and not self.future.cancelled() and self.future.exception() is None:
            result = self.future.result()
            return Elapsed(result.queue_s, result.compute_s)
        if not self.started_at:
            return Elapsed(now - self.queued_at if self.queued_at else 0.0, 0.0)
        return Elapsed(self.started_at - self.queued_at, now - self.started_at)

    @property
    def num_tokens(self) -> int:
        """Number of tokens, T."""
        return len(self.input_ids)

    @property
    def output_names(self) -> Iterator[str]:
        """Names of the graph outputs that the item needs, possibly repeated."""
        yield from (requested.name for requested in self.requested)
        for reduction in self.reductions:
            yield from (requested.name for requested in reduction.layers)

    def is_dead(self, now: float) -> bool:
        """Return whether the item was abandoned or canceled, or its deadline has passed."""
        return (
            self.is_abandoned
            or self.future.cancelled()
            or (self.deadline is not None and now >= self.deadline)
        )


class Batch(NamedTuple):
    """Items that run together."""

    items: list[Item]
    """In the order of the queue."""
    has_whole_machine: bool
    """Whether no other batch is running or waiting."""


class GraphInputs(NamedTuple):
    """Inputs of a graph, each (B, T') int64. A graph without token types uses the first two."""

    input_ids: npt.NDArray[np.int64]
    attention_mask: npt.NDArray[np.int64]
    token_type_ids: npt.NDArray[np.int64]


class ContributionInputs(NamedTuple):
    """Inputs of the contributions graph: those of `GraphInputs` and the fields of each text's `Target`."""

    input_ids: npt.NDArray[np.int64]
    attention_mask: npt.NDArray[np.int64]
    token_type_ids: npt.NDArray[np.int64]
    pooling_weights: npt.NDArray[np.float32]
    """(B, T'), 0 for padding."""
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
    """Return the graph inputs for items of at most `length` tokens, padded on the right.

    Either all items have a target or none has.
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
        if item.masked_token is not None:
            attention_mask[row, item.masked_token] = 0
        if item.token_type_ids is not None:
            token_type_ids[row, : item.num_tokens] = item.token_type_ids
    return GraphInputs(input_ids, attention_mask, token_type_ids)


class BatchOutputs(Protocol):
    """Outputs of a batch, in host or device memory."""

    def part(self, row: int, num_tokens: int, requested: RequestedOutput) -> npt.NDArray[np.float32]:
        """Return a requested output of one text, as described in `ItemResult.arrays`.

        The array does not share memory with the batch.
        """


@dataclass(frozen=True, slots=True)
class HostOutputs:
    """Outputs in host memory.

    Attributes:
        arrays: Arrays by graph output name: (B, T', D), (B, T', H), (B, H, T', T') or (B, H, T', W). The
            contributions graph returns (B, T') and (B, ...).
        are_reused: Whether the next batch of this thread overwrites the arrays.
    """

    arrays: dict[str, npt.NDArray[np.float32]]
    are_reused: bool = False

    def part(self, row: int, num_tokens: int, requested: RequestedOutput) -> npt.NDArray[np.float32]:
        """Return a requested output of one text.

        The array is copied if the memory is reused or if the batch has other texts. Otherwise, a slow
        consumer of one small text would keep the outputs of the whole batch in memory.
        """
        batch = self.arrays[requested.name]
        if requested.layout is Layout.PER_TEXT:
            return np.array(batch[row])
        if requested.layout is Layout.PER_TOKEN:
            part, head_axis = batch[row, :num_tokens], 1  # (T, D) or (T, H)
        else:
            num_columns = num_tokens if requested.layout is Layout.DENSE else None
            part, head_axis = batch[row, :, :num_tokens, :num_columns], 0  # (H, T, T) or (H, T, W)
        match requested.keep:
            case TokenPooling(pooling, num_excluded):
                part = pool(part, pooling, num_excluded)  # (D,)
            case WeightedPooling(pooling, weights):
                part = pool_weighted(part, weights, pooling)  # (D,)
            case HeadSelection(heads, is_mean, is_dense):
                if heads is not None and heads != tuple(range(part.shape[head_axis])):
                    part = part[list(heads)] if head_axis == 0 else part[:, list(heads)]  # a copy
                if is_dense and requested.pattern is not None:
                    part = to_dense(part, requested.pattern, heads)
                if is_mean:
                    part = part.mean(axis=head_axis, keepdims=True)
        base = part.base
        is_shared = isinstance(base, np.ndarray) and (self.are_reused or base.size > part.size)
        return part.copy() if is_shared or part is batch else part


def is_finite(array: npt.NDArray[np.float32]) -> bool:
    """Return whether no value is NaN or infinite."""
    return 0 not in np.isfinite(array).tobytes()  # `all` takes several times as long for an embedding


def to_dense(
    weights: npt.NDArray[np.float32], pattern: Pattern, heads: tuple[int, ...] | None
) -> npt.NDArray[np.float32]:
    """Return the dense weights (K, T, T) of a band or of blocks (K, T, W).

    Args:
        weights: Weights of the selected heads.
        pattern: Sparsity pattern of all heads.
        heads: Indices of the selected heads. None if all heads are selected.
    """
    if isinstance(pattern, Band):
        return pattern.dense(weights)
    table = pattern if heads is None else pattern.of_heads(heads)
    return table.at(weights.shape[1]).dense(weights)


def reductions(outputs: BatchOutputs, row: int, item: Item) -> tuple[Reduced, ...]:
    """Return the reductions of an item. Equal requests are computed once and share the result."""
    results: dict[RequestedReduction, Reduced] = {}
    for requested in item.reductions:
        if requested not in results:
            results[requested] = reduced(outputs, row, item.num_tokens, requested, item.units)
    return tuple(results[requested] for requested in item.reductions)


def reduced(
    outputs: BatchOutputs, row: int, num_tokens: int, requested: RequestedReduction, units: TextUnits | None
) -> Reduced:
    """Return one reduction of a text. Only one layer's weights are in memory at a time.

    Raises:
        InvalidResultError: A weight is NaN or infinite.
    """
    layers = _Layers(outputs, row, num_tokens, requested.layers)
    [result] = reduce(layers, requested.reduction, units, is_mean_of_heads=requested.is_mean_of_heads)
    return result


class _Layers(Sequence[npt.NDArray[np.float32]]):
    """Attention weights (K, T, T) of several layers of a text, read from the batch on access."""

    def __init__(
        self, outputs: BatchOutputs, row: int, num_tokens: int, requested: tuple[RequestedOutput, ...]
    ) -> None:
        self._outputs = outputs
        self._row = row
        self._num_tokens = num_tokens
        self._requested = requested

    def __len__(self) -> int:
        return len(self._requested)

    @overload
    def __getitem__(self, index: int) -> npt.NDArray[np.float32]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[npt.NDArray[np.float32]]: ...
    def __getitem__(self, index: int | slice) -> npt.NDArray[np.float32] | Sequence[npt.NDArray[np.float32]]:
        if isinstance(index, slice):
            return _Layers(self._outputs, self._row, self._num_tokens, self._requested[index])
        weights = self._outputs.part(self._row, self._num_tokens, self._requested[index])
        if not is_finite(weights):
            raise InvalidResultError
        return weights
