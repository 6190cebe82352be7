"""Graph runs of explanations.

Shapes: T tokens, W words, D hidden size, E dimensions of an embedding, L layers, H heads.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

import numpy as np

from attnlens.explanations import ExplainMethod, Float64Array, exclude_token, sum_over_words, to_unit_length
from attnlens.pooling import FloatArray, Pooling, finish
from attnlens_server.bundle import Kind, Layout, OutputRole
from attnlens_server.core.execution import Workers
from attnlens_server.core.loaded_model import LoadedModel
from attnlens_server.engine import (
    HeadSelection,
    Item,
    ItemResult,
    RequestedOutput,
    Target,
    WeightedPooling,
)
from attnlens_server.operations.explanations import (
    Call,
    Contributions,
    ExplanationPlan,
    Text,
    Vectors,
    norm_in_graph,
)

Result = TypeVar("Result")

# Limits of the further runs that one call has in the queue.
# Limits of the further runs that one call has in the queue.
MAX_QUEUED_RUNS = 32
MAX_QUEUED_BATCHES = 4

MAX_INLINE_TEXTS = 128
"""Texts whose items and results are handled on the event loop, at about 20 us each."""

_EMBEDDING = RequestedOutput("embedding", Layout.PER_TEXT)
_SCORES = RequestedOutput("token_contributions")
_BASELINE = RequestedOutput("baseline", Layout.PER_TEXT)
_HEADS = RequestedOutput("head_contributions", Layout.PER_TEXT)


class Runs:
    """Runs the graphs of one bundle.

    Attributes:
        is_fp32: Whether embeddings or logits are computed in fp32, as explanations are.
        vector_kind: Graph that computes vectors in fp32.
    """

    def __init__(self, model: LoadedModel, workers: Workers) -> None:
        self.is_fp32 = model.precision == "fp32"
        has_fp32_vectors = self.is_fp32 or model.spec.classifier is not None
        self.vector_kind: Kind = "embeddings" if has_fp32_vectors else "attention"
        self._model = model.spec
        self._dense = model.dense
        self._engine = model.engine
        self._runner = model.runner
        self._workers = workers
        graph = model.spec.contributions
        self._gates = np.ones(graph.heads if graph else (0, 0), dtype=np.float32)
        self._width = model.spec.max_dimensions

    def first_slots(self, plan: ExplanationPlan, num_texts: int, num_vectors: int) -> dict[Kind, int]:
        """Return the queue slots that a call needs to start, for each graph.

        Args:
            plan: Plan of the call.
            num_texts: Number of explained texts.
            num_vectors: Number of texts whose embeddings are needed first.
        """
        vectors = 0 if self.needs_no_vectors(plan) else num_texts
        slots = Counter(self._kept_slots(plan))
        slots |= Counter({self.vector_kind: max(num_vectors, vectors)})
        slots |= Counter({"contributions": num_texts if plan.needs_contributions else 0})
        slots |= Counter({"attention": num_texts if self._layers(plan) else 0})
        return dict(slots)

    def _kept_slots(self, plan: ExplanationPlan) -> dict[Kind, int]:
        """Return the slots that a call keeps for further runs: one per graph."""
        kept: dict[Kind, int] = {self.vector_kind: 1} if plan.needs_masked_runs else {}
        return kept | {"contributions": 1} if plan.needs_input_matrix or plan.needs_norms else kept

    def _release(self, kind: Kind, call: Call) -> None:
        """Release the slots for the first runs of a graph."""
        call.slots.shrink_to(kind, self._kept_slots(call.plan).get(kind, 0))

    def needs_no_vectors(self, plan: ExplanationPlan) -> bool:
        """Return whether the contributions graph alone is enough."""
        return plan.needs_contributions and not plan.needs_token_vectors

    # --- One run per text -------------------------------------------------------------------------

    async def vectors(self, texts: Sequence[Text], call: Call, *, with_tokens: bool = False) -> list[Vectors]:
        """Return the embedding of each text and, if requested, its token vectors."""
        hidden = self._model.outputs.hidden_state(self.vector_kind)

        def make_items() -> list[Item]:
            items = []
            for text in texts:
                pooling = WeightedPooling(call.plan.pooling, text.weights)
                requested = [RequestedOutput(hidden.name, hidden.layout, pooling)]
                requested += [RequestedOutput(hidden.name, hidden.layout)] if with_tokens else []
                items.append(self._item(text, call, tuple(requested)))
            return items

        def read(results: Sequence[ItemResult]) -> list[Vectors]:
            embeddings = self._finish([result.arrays[0] for result in results], call.plan)
            return [
                Vectors(embedding, result.arrays[1] if with_tokens else None)
                for embedding, result in zip(embeddings, results, strict=True)
            ]

        return await self._run(self.vector_kind, call, len(texts), make_items, read)

    async def contributions(
        self, texts: Sequence[Text], directions: Sequence[Float64Array | None], call: Call
    ) -> list[Contributions]:
        """Return the contributions of each text towards a direction (E,), or None for its own embedding."""
        plan = call.plan
        requested = (_EMBEDDING, _SCORES, _BASELINE, *([_HEADS] if plan.head_contributions else []))
        scales: list[float] = []

        def make_items() -> list[Item]:
            items = []
            for text, direction in zip(texts, directions, strict=True):
                scales.append(1.0 if direction is None else _scale_of(direction))
                item = self._item(text, call, requested)
                item.target = self._target(text, None if direction is None else direction / scales[-1], plan)
                items.append(item)
            return items

        def read(results: Sequence[ItemResult]) -> list[Contributions]:
            found = []
            for result, direction_scale in zip(results, scales, strict=True):
                embedding = result.arrays[0][: plan.dimensions].astype(np.float64)
                scale = direction_scale * (norm_in_graph(embedding) if plan.keeps_length else 1.0)
                found.append(
                    Contributions(
                        embedding,
                        result.arrays[1].astype(np.float64) * scale,
                        float(result.arrays[2]) * scale,
                        result.arrays[3].astype(np.float64) * scale if plan.head_contributions else None,
                    )
                )
            return found

        found = await self._run("contributions", call, len(texts), make_items, read)
        self._release("contributions", call)
        return found

    async def attention(self, texts: Sequence[Text], call: Call) -> list[list[FloatArray]]:
        """Return the mean over heads (T, T) of the layers that the methods need, first layer first."""
        layers = self._layers(call.plan)
        if not layers:
            return [[] for _ in texts]
        outputs = self._model.outputs.layers(OutputRole.ATTENTION_WEIGHTS)
        mean = HeadSelection(is_mean=True, is_dense=True)
        requested = tuple(
            RequestedOutput(outputs[layer].name, outputs[layer].layout, mean, outputs[layer].pattern)
            for layer in layers
        )

        def make_items() -> list[Item]:
            return [self._item(text, call, requested) for text in texts]

        def read(results: Sequence[ItemResult]) -> list[list[FloatArray]]:
            return [[array[0] for array in result.arrays] for result in results]

        found = await self._run("attention", call, len(texts), make_items, read)
        self._release("attention", call)
        return found

    async def _run(
        self,
        kind: Kind,
        call: Call,
        num_texts: int,
        make_items: Callable[[], list[Item]],
        read: Callable[[Sequence[ItemResult]], list[Result]],
    ) -> list[Result]:
        """Run a graph once for each text. Items and results of many texts are handled in worker threads."""
        is_slow = num_texts > MAX_INLINE_TEXTS
        items = await self._workers.run_if(is_slow, make_items)
        results = await self._runner.run(items, kind, call.slots.client, call.clock)
        return await self._workers.run_if(is_slow, read, results)

    # --- One run per direction --------------------------------------------------------------------

    async def sweep(
        self, text: Text, directions: Iterable[Float64Array], call: Call
    ) -> AsyncIterator[Float64Array]:
        """Yield the contributions of each token, then of the biases, towards directions (E,).

        Each array has the shape (N, T + 1), for the next N directions.
        """
        remaining = iter(directions)
        while True:
            with call.slots.portion("contributions", self._max_queued(text)) as count:
                items = []
                for direction in islice(remaining, count):
                    item = self._item(text, call, (_SCORES, _BASELINE))
                    item.target = self._target(text, direction, call.plan)
                    items.append(item)
                if not items:
                    return
                results = await self._runner.run(items, "contributions", call.slots.client, call.clock)
            rows = [np.append(result.arrays[0], result.arrays[1]) for result in results]
            yield np.asarray(rows, dtype=np.float64)

    async def contribution_norms(self, text: Text, words: Sequence[int], call: Call) -> Float64Array:
        """Return |c(t)| / |p| for each token, (T,), or for each word, (W,).

        The graph returns d . c(t) / |p| for a direction d, so unit vectors give the components of c(t) / |p|.

        Args:
            text: The text.
            words: Index of each token's word, (T,). Empty for tokens.
            call: The call.
        """
        squares = np.zeros(max(words) + 1 if words else text.encoded.num_tokens)
        async for portion in self.sweep(text, unit_vectors(call.plan.dimensions), call):
            components = portion[:, :-1]  # without the biases
            if words:
                components = sum_over_words(components, words, axis=1)
            squares += np.square(components).sum(axis=0)
        return np.sqrt(squares)

    # --- One run per token ------------------------------------------------------------------------

    async def masked_embeddings(self, texts: Sequence[Text], call: Call) -> list[Float64Array]:
        """Return p / |p| without each token of each text, (T, E). NaN for tokens that cannot be removed.

        For logits and dot products, p is returned instead.
        """
        plan = call.plan
        embeddings = await self._workers.run(_unset_rows, texts, plan)
        runs = (
            (number, token, weights)
            for number, text in enumerate(texts)
            for token, weights in _masked_weights(text, plan)
        )
        hidden = self._model.outputs.hidden_state(self.vector_kind)
        self._release(self.vector_kind, call)
        for first in runs:  # at the start of each portion
            with call.slots.portion(self.vector_kind, self._max_queued(texts[first[0]])) as count:
                portion = [first, *islice(runs, count - 1)]
                items = []
                for number, token, weights in portion:
                    pooling = WeightedPooling(plan.pooling, weights)
                    requested = RequestedOutput(hidden.name, hidden.layout, pooling)
                    item = self._item(texts[number], call, (requested,))
                    item.masked_token = token
                    items.append(item)
                results = await self._runner.run(items, self.vector_kind, call.slots.client, call.clock)
            pooled = [result.arrays[0] for result in results]
            finished = await self._workers.run(self._finish, pooled, plan)
            rows = finished if plan.keeps_length else to_unit_length(finished)
            for (number, token, _), embedding in zip(portion, rows, strict=True):
                embeddings[number][token] = embedding
        return embeddings

    def _item(self, text: Text, call: Call, requested: tuple[RequestedOutput, ...]) -> Item:
        return Item(
            text.encoded.input_ids,
            requested,
            text.encoded.token_type_ids,
            call.deadline,
            is_background=call.plan.needs_further_runs,
        )

    def _max_queued(self, text: Text) -> int:
        """Return the number of further runs of a text that may be queued."""
        max_runs = MAX_QUEUED_BATCHES * self._engine.max_batch_tokens // text.encoded.num_tokens
        return max(1, min(MAX_QUEUED_RUNS, max_runs))

    def _target(self, text: Text, direction: Float64Array | None, plan: ExplanationPlan) -> Target:
        padded = np.zeros(self._width, dtype=np.float32)
        if direction is not None:
            padded[: plan.dimensions] = direction
        return Target(
            pooling_weights=text.weights,
            takes_maximum=plan.pooling is Pooling.MAX,
            direction=padded,
            towards_itself=float(direction is None),
            num_dimensions=plan.dimensions,
            head_gates=self._gates,
        )

    def _layers(self, plan: ExplanationPlan) -> range:
        """Return the layers whose attention is needed."""
        count = self._model.num_layers
        if ExplainMethod.ROLLOUT in plan.methods:
            return range(count)
        return range(count - 1, count) if ExplainMethod.RECEIVED_ATTENTION in plan.methods else range(0)

    def _finish(self, pooled: Sequence[FloatArray], plan: ExplanationPlan) -> Float64Array:
        """Return the embeddings (N, E) of pooled vectors (D,), not normalized."""
        vectors = finish(np.stack(pooled), self._dense, dimensions=plan.dimensions)
        return vectors.astype(np.float64)


def unit_vectors(size: int) -> Iterator[Float64Array]:
    """Yield the rows of the identity matrix (E, E)."""
    for place in range(size):
        vector = np.zeros(size)
        vector[place] = 1
        yield vector


def _scale_of(direction: Float64Array) -> float:
    """Return the power of two by which to divide a direction so that fp32 products don't overflow.

    Scaling by a power of two is exact, except for results out of range.
    """
    _, exponent = np.frexp(np.linalg.norm(direction))
    return float(np.ldexp(1.0, exponent))


def num_masked_runs(text: Text) -> int:
    """Return the number of runs without one of the text's tokens: those of `_masked_weights`."""
    num_removable = text.is_removable.count(True)
    weighted = np.flatnonzero(text.weights)
    if len(weighted) > 1:
        return num_removable
    return num_removable - text.is_removable[weighted[0]] if len(weighted) else 0


def _unset_rows(texts: Sequence[Text], plan: ExplanationPlan) -> list[Float64Array]:
    return [np.full((text.encoded.num_tokens, plan.dimensions), np.nan) for text in texts]


def _masked_weights(text: Text, plan: ExplanationPlan) -> Iterator[tuple[int, FloatArray]]:
    """Yield each removable token and the pooling weights of the other tokens."""
    for token, is_removable in enumerate(text.is_removable):
        weights = exclude_token(text.weights, plan.pooling, token) if is_removable else None
        if weights is not None:
            yield token, weights
