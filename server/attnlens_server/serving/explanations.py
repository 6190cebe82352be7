"""Graph runs and scores of Explain and Compare.

Shapes: T tokens, W words, D hidden size, E dimensions of an embedding, L layers, H heads.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np

from attnlens.explanations import (
    MAX_MEASURED_TOKENS,
    MIN_MEASURED_TOKENS,
    ExplainLevel,
    ExplainMethod,
    Float64Array,
    PairMatrix,
    exclude_token,
    interaction_matrix,
    leave_one_out_effects,
    output_matrix,
    output_shares,
    pooling_weights,
    received_attention,
    rollout,
    sum_over_words,
    to_unit_length,
)
from attnlens.pooling import FloatArray, Pooling, finish
from attnlens.reductions import TextUnits
from attnlens_server.bundle import Bundle, Kind, Layout, Model, OutputRole
from attnlens_server.engine import (
    Engine,
    HeadSelection,
    Item,
    ItemResult,
    RequestedOutput,
    Target,
    WeightedPooling,
)
from attnlens_server.errors import FieldViolation, InvalidFieldsError
from attnlens_server.serving.admission import Slots
from attnlens_server.serving.execution import ItemRunner, Workers
from attnlens_server.serving.requests import ExplanationPlan
from attnlens_server.serving.results import (
    Clock,
    Explanation,
    PairMatrixResult,
    SourceSums,
    TokenScores,
    check_finite,
    usage,
)
from attnlens_server.text import EncodedInput, Tokens, TokenSource
from attnlens_server.text.tokens import Span

Result = TypeVar("Result")

# Limits of the further runs that one call has in the queue.
MAX_QUEUED_RUNS = 32
MAX_QUEUED_BATCHES = 4

MAX_INLINE_TEXTS = 128
"""Texts whose items and results are handled on the event loop, at about 20 us each."""
_TINY = 1e-24  # added to |p|^2 in the contributions graph

_EMBEDDING = RequestedOutput("embedding", Layout.PER_TEXT)
_SCORES = RequestedOutput("token_contributions")
_BASELINE = RequestedOutput("baseline", Layout.PER_TEXT)
_HEADS = RequestedOutput("head_contributions", Layout.PER_TEXT)


@dataclass(frozen=True, slots=True)
class Text:
    """A tokenized text.

    Attributes:
        encoded: Token ids.
        weights: Pooling weights (T,).
        is_removable: For each token, whether leave-one-out may remove it.
    """

    encoded: EncodedInput
    weights: FloatArray
    is_removable: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Vectors:
    """Vectors of a text.

    Attributes:
        embedding: Embedding p (E,), not normalized.
        hidden_state: Token vectors (T, D), or None if not needed.
    """

    embedding: Float64Array
    hidden_state: FloatArray | None


@dataclass(frozen=True, slots=True)
class Contributions:
    """Outputs of the contributions graph for a text.

    Attributes:
        embedding: Embedding p (E,), not normalized.
        scores: Contributions of tokens (T,).
        baseline: Contribution of the biases.
        heads: Contributions of heads (L, H), or None if not requested.
    """

    embedding: Float64Array
    scores: Float64Array
    baseline: float
    heads: Float64Array | None


@dataclass(frozen=True, slots=True)
class Call:
    """A running Explain or Compare call.

    Attributes:
        plan: Validated request.
        deadline: Deadline on the monotonic clock, or None.
        slots: Queue slots of the call.
        clock: Durations of the request.
    """

    plan: ExplanationPlan
    deadline: float | None
    slots: Slots
    clock: Clock


class Runs:
    """Runs the graphs of one bundle.

    Attributes:
        is_fp32: Whether embeddings or logits are computed in fp32, as explanations are.
        vector_kind: Graph that computes vectors in fp32.
    """

    def __init__(self, bundle: Bundle, engine: Engine, runner: ItemRunner, workers: Workers) -> None:
        self.is_fp32 = bundle.precision == "fp32"
        has_fp32_vectors = self.is_fp32 or bundle.model.classifier is not None
        self.vector_kind: Kind = "embeddings" if has_fp32_vectors else "attention"
        self._model = bundle.model
        self._dense = bundle.dense
        self._engine = engine
        self._runner = runner
        self._workers = workers
        graph = bundle.model.contributions
        self._gates = np.ones(graph.heads if graph else (0, 0), dtype=np.float32)
        self._width = bundle.model.max_dimensions

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
                scale = direction_scale * (_norm_in_graph(embedding) if plan.keeps_length else 1.0)
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


def _norm_in_graph(embedding: Float64Array) -> float:
    """Return |p| as the contributions graph computes it, not 0."""
    return float(np.sqrt(embedding @ embedding + _TINY))


def weights_of(encoded: EncodedInput, plan: ExplanationPlan) -> FloatArray:
    """Return the pooling weights (T,) of a text."""
    return pooling_weights(plan.pooling, encoded.num_tokens, encoded.num_excluded)


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


async def input_matrix(first: Text, second: Text, runs: Runs, call: Call) -> Float64Array:
    """Return the input matrix (T + 1, T' + 1) of two texts, the biases last.

    The shorter text gets one run per dimension.

    Raises:
        RequestError: A run failed, or the deadline passed.
    """
    if first.encoded.num_tokens < second.encoded.num_tokens:
        return (await input_matrix(second, first, runs, call)).T
    portions = [portion async for portion in runs.sweep(second, unit_vectors(call.plan.dimensions), call)]
    vectors = np.concatenate(portions).T  # (T' + 1, E)
    return np.concatenate([portion async for portion in runs.sweep(first, vectors, call)]).T


@dataclass(frozen=True, slots=True)
class GraphResults:
    """Results of all graphs for one text. None or empty if not needed.

    Attributes:
        text: The text.
        tokens: Tokens of the text.
        direction: Direction d (E,), or None for p / |p|.
        contributions: Results of the contributions graph.
        vectors: Vectors of the text.
        attention: Mean over heads (T, T) of the last layers.
        masked_embeddings: p / |p| without each token, (T, E).
        norms: |c| / |p| of each token or word, (T,) or (W,).
    """

    text: Text
    tokens: Tokens
    direction: Float64Array | None
    contributions: Contributions | None
    vectors: Vectors | None
    attention: Sequence[FloatArray]
    masked_embeddings: Float64Array | None
    norms: Float64Array | None = None

    @property
    def embedding(self) -> Float64Array:
        """Embedding p (E,), not normalized."""
        source = self.vectors or self.contributions
        assert source is not None  # noqa: S101 - one of the two graphs always runs
        return source.embedding


def direction_of(embedding: Float64Array, field: str) -> Float64Array:
    """Return p / |p| of the text `field`.

    Raises:
        InvalidFieldsError: The embedding is zero or not finite.
    """
    length = float(np.linalg.norm(embedding))
    if not (np.isfinite(length) and length > 0):
        problem = f"has an embedding of norm {length:g}, which has no direction: send another text"
        raise InvalidFieldsError([FieldViolation(field, problem)])
    return to_unit_length(embedding)


def explanation(results: GraphResults, field: str, plan: ExplanationPlan, model: Model) -> Explanation:
    """Return the explanation of the text `field`.

    Raises:
        InvalidFieldsError: The embedding has no direction, or scores overflow.
        InvalidResultError: A logit is not finite.
    """
    if plan.keeps_length:
        own = results.embedding
        check_finite(own[None], [field])
    else:
        own = direction_of(results.embedding, field)
    direction = own if results.direction is None else results.direction
    words = words_of(results.tokens) if plan.level is ExplainLevel.WORDS else []
    is_measured = _is_measured(results, plan, model, own)
    scores = []
    for method in plan.methods:
        values, baseline, expected_sum = _values(method, results, plan, (own, direction))
        if words and method is not ExplainMethod.CONTRIBUTION_NORM:
            values = sum_over_words(values, words)
        measured = model.faithfulness.get(int(method)) if is_measured else None
        scores.append(
            TokenScores(
                method,
                _as_float32(values, field, plan),
                baseline,
                expected_sum,
                measured.rank_correlation if measured else None,
            )
        )
    heads = results.contributions.heads if results.contributions else None
    value = float(direction @ own)
    return Explanation(
        results.tokens,
        usage(results.text.encoded),
        words,
        value,
        tuple(scores),
        None if heads is None else _as_float32(heads, field, plan),
        _sums_by_source(results.contributions, results.tokens) if plan.is_logit else None,
    )


def _is_measured(results: GraphResults, plan: ExplanationPlan, model: Model, own: Float64Array) -> bool:
    """Return whether the model's faithfulness was measured for this kind of question.

    The export explains tokens of short texts without a prompt towards the text's own embedding, with the
    default pooling and dimensions. For classifiers it explains the highest logit, and for rerankers the logit
    of a pair.

    Args:
        results: Results of the text.
        plan: Validated request.
        model: The model.
        own: p / |p| (E,), or the logits.
    """
    classifier, num_removable = model.classifier, sum(results.text.is_removable)
    is_short = results.text.encoded.num_tokens <= MAX_MEASURED_TOKENS
    if plan.level is ExplainLevel.WORDS or not is_short or num_removable < MIN_MEASURED_TOKENS:
        return False
    is_reranker = classifier is not None and classifier.is_reranker
    measured_sources = {TokenSource.TEXT, TokenSource.SECOND_TEXT} if is_reranker else {TokenSource.TEXT}
    if plan.prompt or set(results.tokens.sources) - {TokenSource.SPECIAL} != measured_sources:
        return False
    if plan.pooling is not model.pooling:
        return False
    if classifier is None:
        return results.direction is None and plan.dimensions == model.embedding_size
    direction = results.direction
    return direction is not None and np.array_equal(direction, np.eye(len(own))[own.argmax()])


def _sums_by_source(contributions: Contributions | None, tokens: Tokens) -> SourceSums | None:
    if contributions is None:
        return None
    sums = dict.fromkeys(TokenSource, 0.0)
    for source, score in zip(tokens.sources, contributions.scores.tolist(), strict=True):
        sums[source] += score
    return SourceSums(
        text=sums[TokenSource.TEXT],
        second_text=sums[TokenSource.SECOND_TEXT],
        prompt=sums[TokenSource.PROMPT],
        special_tokens=sums[TokenSource.SPECIAL],
        token_ids=sums[TokenSource.IDS],
        baseline=contributions.baseline,
    )


def words_of_document(text: Explanation) -> tuple[list[Span], list[float]]:
    """Return the spans in code points of a reranked document's words or tokens, and their contributions."""
    rows = [row for row, source in enumerate(text.tokens.sources) if source is TokenSource.SECOND_TEXT]
    units = text.unit_ids or range(len(text.tokens.ids))
    spans: dict[int, Span] = {}
    for row in rows:
        start, end = text.tokens.chars[row]
        first, last = spans.get(units[row], (start, end))
        spans[units[row]] = min(first, start), max(last, end)
    [scores] = (each for each in text.scores if each.method is ExplainMethod.CONTRIBUTIONS)
    return list(spans.values()), [float(scores.values[unit]) for unit in spans]


def _as_float32(values: Float64Array, field: str, plan: ExplanationPlan) -> FloatArray:
    """Convert scores to float32.

    Raises:
        InvalidFieldsError: A score overflows.
    """
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float32)
    if np.isinf(rounded).any():
        largest = float(np.nanmax(np.abs(values)))
        problem = f"has scores up to {largest:.3g}, which overflow float32: send another text"
        if plan.direction is not None:
            field = "direction"
            problem = f"is too long, since a score of {largest:.3g} overflows float32: shorten it"
        raise InvalidFieldsError([FieldViolation(field, problem)])
    return rounded


def _values(
    method: ExplainMethod,
    results: GraphResults,
    plan: ExplanationPlan,
    directions: tuple[Float64Array, Float64Array],
) -> tuple[Float64Array, float | None, float | None]:
    """Return the scores (T,) of a method, its baseline, and the expected sum of both.

    Contribution norms are (W,) if scores are per word. Methods that only rank tokens have no baseline or sum.
    """
    own, direction = directions
    weights, target = results.text.weights, float(direction @ own)
    if method is ExplainMethod.CONTRIBUTIONS:
        assert results.contributions is not None  # noqa: S101 - the plan needs them; so below
        return results.contributions.scores.astype(np.float64), results.contributions.baseline, target
    if method is ExplainMethod.OUTPUT_SHARE:
        assert results.vectors is not None  # noqa: S101
        assert results.vectors.hidden_state is not None  # noqa: S101
        length = 1.0 if plan.is_dot else float(np.linalg.norm(results.embedding))
        return output_shares(results.vectors.hidden_state, weights, direction, length), 0.0, target
    if method is ExplainMethod.LEAVE_ONE_OUT:
        assert results.masked_embeddings is not None  # noqa: S101
        return leave_one_out_effects(direction, own, results.masked_embeddings), None, None
    if method is ExplainMethod.CONTRIBUTION_NORM:
        assert results.norms is not None  # noqa: S101
        return results.norms, None, None
    if method is ExplainMethod.ROLLOUT:
        rows = np.ones_like(weights) if plan.pooling is Pooling.MAX else weights
        return rollout(results.attention, rows), None, None
    return received_attention(results.attention[-1]), None, None


def matrix(
    first: GraphResults, second: GraphResults, plan: ExplanationPlan, input_cells: Float64Array | None
) -> PairMatrixResult | None:
    """Return the matrix of a pair, or None if not requested.

    Args:
        first: Results of the first text.
        second: Results of the second text.
        plan: Validated request.
        input_cells: Input matrix (T + 1, T' + 1), the biases last, or None if not requested.
    """
    match plan.matrix:
        case None:
            return None
        case PairMatrix.INTERACTION:
            cells = _interaction(first, second, plan)
        case PairMatrix.OUTPUT:
            cells = _output(first, second, plan)
        case PairMatrix.INPUT:
            assert input_cells is not None  # noqa: S101 - the plan needs it
            lengths = _norm_in_graph(first.embedding) * _norm_in_graph(second.embedding)
            cells = input_cells * (lengths if plan.is_dot else 1.0)
    if plan.level is ExplainLevel.WORDS:
        cells = _over_words(cells, words_of(first.tokens), axis=0)
        cells = _over_words(cells, words_of(second.tokens), axis=1)
    values = cells.astype(np.float32)
    if plan.matrix is not PairMatrix.INPUT:
        return PairMatrixResult(values)
    return PairMatrixResult(values[:-1, :-1], values[-1, :-1], values[:-1, -1], float(cells[-1, -1]))


def _over_words(cells: Float64Array, words: list[int], axis: int) -> Float64Array:
    """Add up the cells of each word. A last row or column of biases is kept."""
    rest = cells.shape[axis] - len(words)
    return sum_over_words(cells, words + [max(words) + 1] * rest, axis)


def _interaction(first: GraphResults, second: GraphResults, plan: ExplanationPlan) -> Float64Array:
    assert first.masked_embeddings is not None  # noqa: S101 - the plan needs them
    assert second.masked_embeddings is not None  # noqa: S101
    own = [side.embedding if plan.is_dot else to_unit_length(side.embedding) for side in (first, second)]
    return interaction_matrix((own[0], first.masked_embeddings), (own[1], second.masked_embeddings))


def _output(first: GraphResults, second: GraphResults, plan: ExplanationPlan) -> Float64Array:
    sides = []
    for side in (first, second):
        assert side.vectors is not None  # noqa: S101 - the plan needs them
        assert side.vectors.hidden_state is not None  # noqa: S101
        sides.append((side.vectors.hidden_state, side.text.weights))
    lengths = float(np.linalg.norm(first.embedding) * np.linalg.norm(second.embedding))
    lengths = 1.0 if plan.is_dot else lengths
    return output_matrix(sides[0], sides[1], lengths, plan.dimensions)


def words_of(tokens: Tokens) -> list[int]:
    """Return the index of each token's word, numbered from 0 in order of appearance.

    Tokens of one text with the same `word_index` form a word. A token without one is a word of its own.
    """
    is_special = [source is TokenSource.SPECIAL for source in tokens.sources]
    is_second = [source is TokenSource.SECOND_TEXT for source in tokens.sources]
    return [int(word) for word in TextUnits.of(tokens.words, is_special, is_second).words]
