"""Explanations."""

from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from attnlens.explanations import (
    ExplainLevel,
    ExplainMethod,
    Float64Array,
    PairMatrix,
    interaction_matrix,
    leave_one_out_effects,
    output_matrix,
    output_shares,
    pooling_weights,
    received_attention,
    rollout,
    sum_over_words,
    unit,
    without_token,
)
from attnlens.pooling import FloatArray, Pooling, finish
from attnlens.reductions import TextUnits
from attnlens_server.bundle import Bundle, Kind, Layout, Model, OutputRole
from attnlens_server.engine import Engine, HeadSelection, Item, ItemResult, Target, Wanted, WeightedPooling
from attnlens_server.errors import FieldViolation, InvalidFieldsError
from attnlens_server.serving.admission import Slots
from attnlens_server.serving.execution import ItemRunner, Workers
from attnlens_server.serving.results import Explanation, PairMatrixResult, TokenScores, usage
from attnlens_server.serving.validation import (
    CONTRIBUTION_NORM,
    CONTRIBUTIONS,
    LEAVE_ONE_OUT,
    OUTPUT_SHARE,
    RECEIVED_ATTENTION,
    ROLLOUT,
    ExplanationPlan,
)
from attnlens_server.text import EncodedInput, Tokens, TokenSource

RUNS_AT_A_TIME = 32  # further runs of a call that are queued at a time, and within
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
        is_removable: for each token whether a run without it is meant to be made.
    """

    encoded: EncodedInput
    weights: FloatArray
    is_removable: tuple[bool, ...]


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
    scores: Float64Array
    baseline: float
    heads: Float64Array | None


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
        slots: Queue slots of the call.
        clock: counts its runs.
    """

    plan: ExplanationPlan
    deadline: float | None
    slots: Slots
    clock: Clock = field(default_factory=Clock)


class Runs:
    """Runs the graphs of one bundle.

    Attributes:
        vector_kind: the graph that vectors are of.
    """

    def __init__(self, bundle: Bundle, engine: Engine, runner: ItemRunner, workers: Workers) -> None:
        self.vector_kind: Kind = "embeddings" if bundle.precision == "fp32" else "attention"
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
        """Return the slots that a call keeps for further runs, one for each graph that has any."""
        kept: dict[Kind, int] = {self.vector_kind: 1} if plan.needs_masked_runs else {}
        return kept | {"contributions": 1} if plan.needs_input_matrix or plan.needs_norms else kept

    def _release(self, kind: Kind, call: Call) -> None:
        """Release the slots for the first runs of a graph."""
        call.slots.shrink_to(kind, self._kept_slots(call.plan).get(kind, 0))

    def needs_no_vectors(self, plan: ExplanationPlan) -> bool:
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
        scales = [1.0 if direction is None else _scale_of(direction) for direction in directions]
        for text, direction, scale in zip(texts, directions, scales, strict=True):
            item = self._item(text, call, wanted)
            item.target = self._target(text, None if direction is None else direction / scale, plan)
            items.append(item)
        results = await self._runner.run(items, "contributions")
        self._release("contributions", call)
        call.clock.add(results)
        return [
            Contributions(
                result.arrays[0][: plan.dimensions].astype(np.float64),
                result.arrays[1].astype(np.float64) * scale,
                float(result.arrays[2]) * scale,
                result.arrays[3].astype(np.float64) * scale if plan.head_contributions else None,
            )
            for result, scale in zip(results, scales, strict=True)
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
        self._release("attention", call)
        call.clock.add(results)
        return [[array[0] for array in result.arrays] for result in results]

    # --- a run a direction ------------------------------------------------------------------------

    async def sweep(
        self, text: Text, directions: Iterable[Float64Array], call: Call
    ) -> AsyncIterator[Float64Array]:
        """Yield the contributions of each token, then of the biases, towards directions (E,).

        Each array has the shape (N, T + 1), for the next N directions.
        """
        waiting = iter(directions)
        while True:
            with call.slots.portion("contributions", self._fitting(text)) as count:
                items = []
                for direction in islice(waiting, count):
                    item = self._item(text, call, (_SCORES, _BASELINE))
                    item.target = self._target(text, direction, call.plan)
                    items.append(item)
                if not items:
                    return
                results = await self._runner.run(items, "contributions")
            call.clock.add(results)
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
        self._release(self.vector_kind, call)
        while places:
            with call.slots.portion(self.vector_kind, self._fitting(texts[places[0][0]])) as count:
                portion = places[:count]
                del places[:count]
                items = []
                for number, token, weights in portion:
                    pooling = WeightedPooling(plan.pooling, weights)
                    wanted = Wanted(hidden.name, hidden.layout, pooling)
                    item = self._item(texts[number], call, (wanted,))
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
        return Item(
            text.encoded.input_ids,
            wanted,
            text.encoded.token_type_ids,
            call.deadline,
            is_background=call.plan.needs_further_runs,
        )

    def _fitting(self, text: Text) -> int:
        """Return the number of further runs of a text that are queued at a time."""
        fitting = BATCHES_AT_A_TIME * self._engine.max_batch_tokens // text.encoded.num_tokens
        return max(1, min(RUNS_AT_A_TIME, fitting))

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


def unit_vectors(size: int) -> Iterator[Float64Array]:
    """Yield the rows of the identity matrix (E, E)."""
    for place in range(size):
        vector = np.zeros(size)
        vector[place] = 1
        yield vector


def _scale_of(direction: Float64Array) -> float:
    """Return the power of two by which a direction is divided, so that fp32 products don't overflow.

    Dividing and multiplying by a power of two changes no bits of a result in range.
    """
    _, exponent = np.frexp(np.linalg.norm(direction))
    return float(np.ldexp(1.0, exponent))


def weights_of(encoded: EncodedInput, plan: ExplanationPlan) -> FloatArray:
    """Return the weights (T,) with which the token vectors of a text are pooled."""
    return pooling_weights(plan.pooling, encoded.num_tokens, encoded.num_excluded)


def _left_weights(text: Text, plan: ExplanationPlan) -> Iterator[tuple[int, FloatArray]]:
    """Yield the tokens that can be left out, with the weights of the others."""
    for token, can_be in enumerate(text.is_removable):
        weights = without_token(text.weights, plan.pooling, token) if can_be else None
        if weights is not None:
            yield token, weights


async def input_matrix(first: Text, second: Text, runs: Runs, call: Call) -> Float64Array:
    """Return N, (T + 1, T' + 1), the biases last. The shorter text gets the runs with unit vectors.

    Raises:
        RequestError: a run failed, or the deadline passed.
    """
    if first.encoded.num_tokens < second.encoded.num_tokens:
        return (await input_matrix(second, first, runs, call)).T
    portions = [portion async for portion in runs.sweep(second, unit_vectors(call.plan.dimensions), call)]
    vectors = np.concatenate(portions).T  # (T' + 1, E)
    return np.concatenate([portion async for portion in runs.sweep(first, vectors, call)]).T


@dataclass(frozen=True, slots=True)
class Found:
    """What the graphs brought of one text; None or empty: it was not needed.

    Attributes:
        text: the text.
        tokens: its tokens.
        direction: d, (E,); None: p / |p|.
        contributions: of the graph of contributions.
        vectors: of the graph of vectors.
        attention: the mean over heads of some layers, the last one last.
        left_out: p / |p| without each token, (T, E).
        norms: |c| / |p| of each token or word, (T,) or (W,).
    """

    text: Text
    tokens: Tokens
    direction: Float64Array | None
    contributions: Contributions | None
    vectors: Vectors | None
    attention: Sequence[FloatArray]
    left_out: Float64Array | None
    norms: Float64Array | None = None

    @property
    def embedding(self) -> Float64Array:
        """p, (E,)."""
        source = self.vectors or self.contributions
        assert source is not None  # noqa: S101 - one of them is always run
        return source.embedding


def direction_of(embedding: Float64Array, field: str) -> Float64Array:
    """Return p / |p|.

    Raises:
        InvalidFieldsError: p has no direction.
    """
    length = float(np.linalg.norm(embedding))
    if not (np.isfinite(length) and length > 0):
        text = f"has an embedding of length {length:g}, which has no direction: send another text"
        raise InvalidFieldsError([FieldViolation(field, text)])
    return unit(embedding)


def explanation(found: Found, field: str, plan: ExplanationPlan, model: Model) -> Explanation:
    """Return the explanation of a text, which the request calls `field`.

    Raises:
        InvalidFieldsError: Its embedding has no direction, or its scores overflow.
    """
    own = direction_of(found.embedding, field)
    direction = own if found.direction is None else found.direction
    words = words_of(found.tokens) if plan.level is ExplainLevel.WORDS else []
    scores = []
    for method in plan.methods:
        values, baseline, expected_sum = _values(method, found, plan, (own, direction))
        if words and method is not CONTRIBUTION_NORM:
            values = sum_over_words(values, words)
        measured = model.faithfulness.get(int(method))
        scores.append(
            TokenScores(
                method,
                _as_float32(values, field, plan),
                baseline,
                expected_sum,
                measured.rank_correlation if measured else None,
            )
        )
    heads = found.contributions.heads if found.contributions else None
    value = float(direction @ own)
    return Explanation(
        found.tokens,
        usage(found.text.encoded),
        words,
        value,
        tuple(scores),
        None if heads is None else _as_float32(heads, field, plan),
    )


def _as_float32(values: Float64Array, field: str, plan: ExplanationPlan) -> FloatArray:
    """Round scores to float32; NaN, the score of a token that can't be left out, stays.

    Raises:
        InvalidFieldsError: A score overflows.
    """
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float32)
    if np.isinf(rounded).any():
        largest = float(np.nanmax(np.abs(values)))
        text = f"has scores up to {largest:.3g}, which overflow float32"
        if plan.direction is not None:
            field, text = (
                "direction",
                f"is too long: a score is {largest:.3g}, which overflows float32. Shorten it",
            )
        raise InvalidFieldsError([FieldViolation(field, text)])
    return rounded


def _values(
    method: ExplainMethod, found: Found, plan: ExplanationPlan, directions: tuple[Float64Array, Float64Array]
) -> tuple[Float64Array, float | None, float | None]:
    """Return the scores of a method, its baseline and the sum of both, which is the target.

    The scores have the shape (T,), except those of CONTRIBUTION_NORM, which are of words already if the plan
    asks for words. A method that is for ranking only has neither a baseline nor a sum.
    """
    own, direction = directions
    weights, target = found.text.weights, float(direction @ own)
    if method is CONTRIBUTIONS:
        assert found.contributions is not None  # noqa: S101 - the plan has seen to it, and so below
        return found.contributions.scores.astype(np.float64), found.contributions.baseline, target
    if method is OUTPUT_SHARE:
        assert found.vectors is not None  # noqa: S101
        assert found.vectors.hidden_state is not None  # noqa: S101
        length = float(np.linalg.norm(found.embedding))
        return output_shares(found.vectors.hidden_state, weights, direction, length), 0.0, target
    if method is LEAVE_ONE_OUT:
        assert found.left_out is not None  # noqa: S101
        return leave_one_out_effects(direction, own, found.left_out), None, None
    if method is CONTRIBUTION_NORM:
        assert found.norms is not None  # noqa: S101
        return found.norms, None, None
    if method is ROLLOUT:
        rows = np.ones_like(weights) if plan.pooling is Pooling.MAX else weights
        return rollout(found.attention, rows), None, None
    return received_attention(found.attention[-1]), None, None


def matrix(
    first: Found, second: Found, plan: ExplanationPlan, of_inputs: Float64Array | None
) -> PairMatrixResult | None:
    """Return what a plan wants of each pair of tokens, or of words.

    Args:
        first: T tokens.
        second: T' tokens.
        plan: says what is wanted.
        of_inputs: the input matrix with its baselines last, (T + 1, T' + 1), where the plan wants it.
    """
    match plan.matrix:
        case None:
            return None
        case PairMatrix.INTERACTION:
            found = _interaction(first, second)
        case PairMatrix.OUTPUT:
            found = _output(first, second, plan)
        case PairMatrix.INPUT:
            assert of_inputs is not None  # noqa: S101 - the plan has seen to it
            found = of_inputs
    if plan.level is ExplainLevel.WORDS:
        found = _over_words(found, words_of(first.tokens), axis=0)
        found = _over_words(found, words_of(second.tokens), axis=1)
    values = found.astype(np.float32)
    if plan.matrix is not PairMatrix.INPUT:
        return PairMatrixResult(values)
    return PairMatrixResult(values[:-1, :-1], values[-1, :-1], values[:-1, -1], float(found[-1, -1]))


def _over_words(cells: Float64Array, words: list[int], axis: int) -> Float64Array:
    """Add up the cells of each word; a row or column behind those of tokens stays by itself."""
    rest = cells.shape[axis] - len(words)
    return sum_over_words(cells, words + [max(words) + 1] * rest, axis)


def _interaction(first: Found, second: Found) -> Float64Array:
    assert first.left_out is not None  # noqa: S101 - the plan has seen to it
    assert second.left_out is not None  # noqa: S101
    return interaction_matrix(
        (unit(first.embedding), first.left_out), (unit(second.embedding), second.left_out)
    )


def _output(first: Found, second: Found, plan: ExplanationPlan) -> Float64Array:
    sides = []
    for side in (first, second):
        assert side.vectors is not None  # noqa: S101 - the plan has seen to it
        assert side.vectors.hidden_state is not None  # noqa: S101
        sides.append((side.vectors.hidden_state, side.text.weights))
    lengths = float(np.linalg.norm(first.embedding) * np.linalg.norm(second.embedding))
    return output_matrix(sides[0], sides[1], lengths, plan.dimensions)


def words_of(tokens: Tokens) -> list[int]:
    """Return the number of each token's word, from 0 in the order in which words begin.

    The tokens of a word have one text and one `word_index`; one that has none is a word of its own.
    """
    is_special = [source is TokenSource.SPECIAL for source in tokens.sources]
    is_second = [source is TokenSource.SECOND_TEXT for source in tokens.sources]
    return [int(word) for word in TextUnits.of(tokens.words, is_special, is_second).words]
