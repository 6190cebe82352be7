"""Running the graphs for explanations: what each needs of a text, and what comes out.

Vectors are those of the fp32 graph: of embeddings where these are served in fp32, else of attention.

Letters: T tokens of a text, D hidden size, E components of an embedding, L layers, H heads.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from attnlens.explanations import Float64Array, pooling_weights, unit, without_token
from attnlens.pooling import FloatArray, Pooling, finish
from attnlens_server.bundle import Bundle, Kind, Layout, OutputRole
from attnlens_server.engine import Engine, HeadSelection, Item, ItemResult, Target, Wanted, WeightedPooling
from attnlens_server.serving.explanations.checks import RECEIVED_ATTENTION, ROLLOUT, ExplanationPlan
from attnlens_server.serving.runner import ItemRunner
from attnlens_server.serving.workers import Workers
from attnlens_server.text import EncodedInput

# Runs without a token that wait at a time: those of one request never stand in the way of others for longer.
RUNS_AT_A_TIME = 32
BATCHES_AT_A_TIME = 4

_EMBEDDING = Wanted("embedding", Layout.PER_TEXT)
_SCORES = Wanted("token_contributions")
_BASELINE = Wanted("baseline", Layout.PER_TEXT)
_HEADS = Wanted("head_contributions", Layout.PER_TEXT)


@dataclass(frozen=True, slots=True)
class Text:
    """A text to explain.

    Attributes:
        encoded: its token ids.
        weights: with which token vectors are pooled, (T,).
        can_be_left_out: for each token whether a run without it is meant to be made.
    """

    encoded: EncodedInput
    weights: FloatArray
    can_be_left_out: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Vectors:
    """What a run brings of a text.

    Attributes:
        embedding: p, (E,), not scaled.
        hidden_state: (T, D); None: not wanted.
    """

    embedding: Float64Array
    hidden_state: FloatArray | None


@dataclass(frozen=True, slots=True)
class Contributions:
    """What the graph of contributions brings of a text.

    Attributes:
        embedding: p, (E,), not scaled.
        scores: (T,).
        baseline: what no token contributes.
        heads: (L, H); None: not wanted.
    """

    embedding: Float64Array
    scores: FloatArray
    baseline: float
    heads: FloatArray | None


@dataclass(slots=True)
class Clock:
    """The longest time that a run waited, and that one took, in seconds."""

    queue_s: float = 0.0
    compute_s: float = 0.0

    def add(self, results: Sequence[ItemResult]) -> None:
        """Count runs."""
        self.queue_s = max([self.queue_s, *(result.queue_s for result in results)])
        self.compute_s = max([self.compute_s, *(result.compute_s for result in results)])


@dataclass(frozen=True, slots=True)
class Call:
    """What the runs of a call have in common.

    Attributes:
        plan: of its job.
        deadline: on the clock of `time.monotonic`; None: never.
        clock: counts its runs.
    """

    plan: ExplanationPlan
    deadline: float | None
    clock: Clock = field(default_factory=Clock)


class Runs:
    """Runs the graphs of one bundle.

    Attributes:
        vector_kind: the graph that vectors are of.
    """

    def __init__(
        self, bundle: Bundle, engine: Engine, runner: ItemRunner, workers: Workers, *, max_queue: int
    ) -> None:
        self.vector_kind: Kind = "embeddings" if bundle.precision == "fp32" else "attention"
        self._model = bundle.model
        self._dense = bundle.dense
        self._engine = engine
        self._runner = runner
        self._workers = workers
        self._most_runs = min(RUNS_AT_A_TIME, max_queue)
        graph = bundle.model.contributions
        self._gates = np.ones(graph.heads if graph else (0, 0), dtype=np.float32)
        self._width = bundle.model.max_dimensions

    def places(self, plan: ExplanationPlan, num_texts: int, num_vectors: int) -> dict[Kind, int]:
        """Return how many texts of a call wait or run at most, at each graph.

        Args:
            plan: of the call.
            num_texts: how many are explained.
            num_vectors: of how many the vectors are needed first.
        """
        runs = self._most_runs if plan.needs_masked_runs else 0
        vectors = 0 if self.takes_no_vectors(plan) else num_texts
        places: dict[Kind, int] = {self.vector_kind: max(num_vectors, vectors, runs)}
        swept = num_texts if plan.needs_contributions else 0
        if plan.needs_input_matrix:
            swept = max(swept, self._most_runs)
        places["contributions"] = swept
        if self._layers(plan):
            places["attention"] = max(places.get("attention", 0), num_texts)
        return {kind: count for kind, count in places.items() if count}

    def takes_no_vectors(self, plan: ExplanationPlan) -> bool:
        """Whether the graph of contributions brings all that is needed of a text by itself."""
        return plan.needs_contributions and not plan.needs_token_vectors

    # --- one run a text ---------------------------------------------------------------------------

    async def vectors(self, texts: Sequence[Text], call: Call, *, with_tokens: bool = False) -> list[Vectors]:
        """Return the embedding of each text and, if wanted, the token vectors."""
        hidden = self._model.outputs.hidden_state(self.vector_kind)
        items = []
        for text in texts:
            pooling = WeightedPooling(call.plan.pooling, text.weights)
            wanted = [Wanted(hidden.name, hidden.layout, pooling)]
            wanted += [Wanted(hidden.name, hidden.layout)] if with_tokens else []
            items.append(self._item(text, call, tuple(wanted)))
        results = await self._runner.run(items, self.vector_kind)
        call.clock.add(results)
        embeddings = self._finish([result.arrays[0] for result in results], call.plan)
        return [
            Vectors(embedding, result.arrays[1] if with_tokens else None)
            for embedding, result in zip(embeddings, results, strict=True)
        ]

    async def contributions(
        self, texts: Sequence[Text], directions: Sequence[Float64Array | None], call: Call
    ) -> list[Contributions]:
        """Return what each token contributes, towards a direction (E,); None: the text's own embedding."""
        plan = call.plan
        wanted = (_EMBEDDING, _SCORES, _BASELINE, *([_HEADS] if plan.head_contributions else []))
        items = []
        for text, direction in zip(texts, directions, strict=True):
            item = self._item(text, call, wanted)
            item.target = self._target(text, direction, plan)
            items.append(item)
        results = await self._runner.run(items, "contributions")
        call.clock.add(results)
        return [
            Contributions(
                result.arrays[0][: plan.dimensions].astype(np.float64),
                result.arrays[1],
                float(result.arrays[2]),
                result.arrays[3] if plan.head_contributions else None,
            )
            for result in results
        ]

    async def attention(self, texts: Sequence[Text], call: Call) -> list[list[FloatArray]]:
        """Return the mean over heads (T, T) of the layers that the methods need, first layer first."""
        layers = self._layers(call.plan)
        if not layers:
            return [[] for _ in texts]
        outputs = self._model.outputs.layers(OutputRole.ATTENTION_WEIGHTS)
        mean = HeadSelection(is_mean=True, is_dense=True)
        wanted = tuple(
            Wanted(outputs[layer].name, outputs[layer].layout, mean, outputs[layer].pattern)
            for layer in layers
        )
        items = [self._item(text, call, wanted) for text in texts]
        results = await self._runner.run(items, "attention")
        call.clock.add(results)
        return [[array[0] for array in result.arrays] for result in results]

    # --- a run a direction ------------------------------------------------------------------------

    async def swept(self, text: Text, directions: Iterable[Float64Array], call: Call) -> Float64Array:
        """Return what each token, and last the biases, contribute towards N directions (E,): (N, T + 1)."""
        fitting = BATCHES_AT_A_TIME * self._engine.max_batch_tokens // text.encoded.num_tokens
        waiting = iter(directions)
        rows: list[FloatArray] = []
        while portion := list(islice(waiting, max(1, min(self._most_runs, fitting)))):
            items = []
            for direction in portion:
                item = self._item(text, call, (_SCORES, _BASELINE))
                item.target = self._target(text, direction, call.plan)
                items.append(item)
            results = await self._runner.run(items, "contributions")
            call.clock.add(results)
            rows += [np.append(result.arrays[0], result.arrays[1]) for result in results]
        return np.asarray(rows, dtype=np.float64)

    # --- a run a token ----------------------------------------------------------------------------

    def num_masked_runs(self, text: Text, plan: ExplanationPlan) -> int:
        """Return how often the model is run for a text without one of its tokens."""
        return sum(1 for _ in _left_weights(text, plan))

    async def left_out(self, texts: Sequence[Text], call: Call) -> list[Float64Array]:
        """Return for each text p / |p| without each of its tokens, (T, E); NaN where none can be left out."""
        plan = call.plan
        found = [np.full((text.encoded.num_tokens, plan.dimensions), np.nan) for text in texts]
        places = [
            (number, token, weights)
            for number, text in enumerate(texts)
            for token, weights in _left_weights(text, plan)
        ]
        hidden = self._model.outputs.hidden_state(self.vector_kind)
        while places:
            longest = texts[places[0][0]].encoded.num_tokens
            fitting = BATCHES_AT_A_TIME * self._engine.max_batch_tokens // longest
            portion = places[: max(1, min(self._most_runs, fitting))]
            del places[: len(portion)]
            items = []
            for number, token, weights in portion:
                pooling = WeightedPooling(plan.pooling, weights)
                item = self._item(texts[number], call, (Wanted(hidden.name, hidden.layout, pooling),))
                item.left_out = token
                items.append(item)
            results = await self._runner.run(items, self.vector_kind)
            call.clock.add(results)
            pooled = [result.arrays[0] for result in results]
            embeddings = await self._workers.run(self._finish, pooled, plan)
            for (number, token, _), embedding in zip(portion, unit(embeddings), strict=True):
                found[number][token] = embedding
        return found

    # ----------------------------------------------------------------------------------------------

    def _item(self, text: Text, call: Call, wanted: tuple[Wanted, ...]) -> Item:
        return Item(text.encoded.input_ids, wanted, text.encoded.token_type_ids, call.deadline)

    def _target(self, text: Text, direction: Float64Array | None, plan: ExplanationPlan) -> Target:
        given = np.zeros(self._width, dtype=np.float32)
        if direction is not None:
            given[: plan.dimensions] = direction
        return Target(
            pooling_weights=text.weights,
            takes_maximum=plan.pooling is Pooling.MAX,
            direction=given,
            towards_itself=float(direction is None),
            num_dimensions=plan.dimensions,
            head_gates=self._gates,
        )

    def _layers(self, plan: ExplanationPlan) -> range:
        """Return the layers whose attention the methods need."""
        count = self._model.num_layers
        if ROLLOUT in plan.methods:
            return range(count)
        return range(count - 1, count) if RECEIVED_ATTENTION in plan.methods else range(0)

    def _finish(self, pooled: Sequence[FloatArray], plan: ExplanationPlan) -> Float64Array:
        """Turn pooled vectors (D,) into embeddings (N, E), not scaled."""
        vectors = finish(np.stack(pooled), self._dense, dimensions=plan.dimensions)
        return vectors.astype(np.float64)


def weights_of(encoded: EncodedInput, plan: ExplanationPlan) -> FloatArray:
    """Return the weights (T,) with which the token vectors of a text are pooled."""
    return pooling_weights(plan.pooling, encoded.num_tokens, encoded.num_excluded)


def _left_weights(text: Text, plan: ExplanationPlan) -> Iterator[tuple[int, FloatArray]]:
    """Yield the tokens that can be left out, with the weights of the others."""
    for token, can_be in enumerate(text.can_be_left_out):
        weights = without_token(text.weights, plan.pooling, token) if can_be else None
        if weights is not None:
            yield token, weights
