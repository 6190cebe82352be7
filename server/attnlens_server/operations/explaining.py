"""Steps that Explain, Compare and the explanations of Score share."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from attnlens.costs import input_matrix_cost, masked_runs_cost, sweeps_cost
from attnlens.explanations import ExplainLevel, ExplainMethod, Float64Array, PairMatrix
from attnlens.pooling import Pooling
from attnlens_server.bundle import Model, OutputRole, RowSum
from attnlens_server.clients import Client
from attnlens_server.core.admission import Budget, Slots
from attnlens_server.core.loaded_model import LoadedModel
from attnlens_server.core.process import Process
from attnlens_server.core.reply_costs import (
    DESCRIBING_BYTES,
    TEXT_MEMORY_BYTES,
    TOKEN_ID_BYTES,
    TOKEN_MEMORY_BYTES,
    ReplyCosts,
)
from attnlens_server.errors import (
    FieldViolation,
    InputTooLongError,
    InvalidFieldsError,
    NotSupportedError,
    TooExpensiveError,
)
from attnlens_server.operations.explanations import (
    Call,
    Explanation,
    ExplanationPlan,
    ExplanationRequest,
    GraphResults,
    Text,
    Vectors,
    direction_of,
    explanation,
    weights_of,
    words_of,
)
from attnlens_server.operations.graph_runs import Runs, num_masked_runs
from attnlens_server.operations.inputs import check_dimensions, rename_error
from attnlens_server.operations.operation import Operation, TextSources
from attnlens_server.text import EncodedInput, Input, Tokens, TokenSource

Described = tuple[Text, Tokens]
"""A text to explain, and its tokens."""

_CHEAPER = "request fewer dimensions, or omit leave-one-out, contribution norms and the matrix"
_FLOAT, _DOUBLE = 4, 8
_SCORES_BYTES = 64  # per method in a message, without its values
NO_CONTRIBUTIONS = (
    "the bundle has no contributions graph, because an earlier version of attnlens exported it, or for a "
    "reason that the export printed"
)
_UNAVAILABLE = {
    ExplainMethod.OUTPUT_SHARE: "embeddings of this model are not sums of token vectors",
    ExplainMethod.ROLLOUT: "some layers of the model have no attention weights that sum to 1",
    ExplainMethod.RECEIVED_ATTENTION: "the last layer of the model has no attention weights that sum to 1",
}


@dataclass(frozen=True, slots=True)
class ExplanationCosts:
    """Sizes and memory of explanations of one model, in bytes.

    Attributes:
        reply: Costs of replies.
        hidden_size: Hidden size D.
        max_dimensions: Maximum number of components of an embedding.
        heads: Number of heads in all layers.
        num_layers: Number of layers L.
    """

    reply: ReplyCosts
    hidden_size: int
    max_dimensions: int
    heads: int
    num_layers: int

    def message_bytes(self, tokens: Tokens, plan: ExplanationPlan) -> int:
        """Return an upper bound on the size of a text in a message."""
        count = len(tokens.ids)
        scores = len(plan.methods) * (_FLOAT * count + _SCORES_BYTES)
        words = 5 * count
        heads = _FLOAT * self.heads if plan.head_contributions else 0
        sums = _SCORES_BYTES if plan.is_logit else 0
        return self.reply.text_bytes + self.reply.tokens_bytes(tokens) + scores + words + heads + sums

    def matrix_bytes(self, num_tokens: tuple[int, int], plan: ExplanationPlan) -> int:
        """Return the size of a pair's matrix in a message."""
        rows, columns = num_tokens
        if plan.needs_input_matrix:
            return _FLOAT * (rows + 1) * (columns + 1) + 2 * _SCORES_BYTES
        return 0 if plan.matrix is None else _FLOAT * rows * columns

    def sweep_bytes(self, num_tokens: tuple[int, int], plan: ExplanationPlan) -> int:
        """Return the working memory of a pair's input matrix: two arrays (T + 1, E)."""
        return 2 * _DOUBLE * (min(num_tokens) + 1) * plan.dimensions if plan.needs_input_matrix else 0

    def memory_bytes(self, tokens: Tokens, plan: ExplanationPlan) -> int:
        """Return the memory of a text until its scores are computed."""
        count = len(tokens.ids)
        size = TEXT_MEMORY_BYTES + count * (TOKEN_ID_BYTES + TOKEN_MEMORY_BYTES)
        size += _DOUBLE * (2 * self.max_dimensions + 2 * self.heads) + len(plan.methods) * _DOUBLE * count
        if plan.needs_token_vectors:
            size += (_FLOAT + _DOUBLE) * count * self.hidden_size
        if plan.needs_masked_runs:
            size += count * (_DOUBLE * 2 * plan.dimensions + _FLOAT * count)
        if ExplainMethod.ROLLOUT in plan.methods:
            size += _FLOAT * self.num_layers * count**2
        elif ExplainMethod.RECEIVED_ATTENTION in plan.methods:
            size += _FLOAT * count**2
        return size


class ExplanationOperation(Operation):
    """An operation with explanations.

    Attributes:
        methods: Methods that the model and the configuration support.
    """

    def __init__(self, process: Process, model: LoadedModel) -> None:
        super().__init__(process, model)
        spec = model.spec
        self._runs = Runs(model, process.workers)
        num_layers, num_heads = spec.contributions.heads if spec.contributions else (0, 0)
        self._explanation_costs = ExplanationCosts(
            model.costs, spec.hidden_size, spec.max_dimensions, num_layers * num_heads, spec.num_layers
        )
        outputs = spec.outputs.layers(OutputRole.ATTENTION_WEIGHTS)
        has_weights = [
            layer in outputs and outputs[layer].row_sum is RowSum.ONE for layer in range(spec.num_layers)
        ]
        has_contributions = model.engine.has_contributions
        methods = {
            ExplainMethod.CONTRIBUTIONS: has_contributions,
            ExplainMethod.OUTPUT_SHARE: not model.dense,
            ExplainMethod.LEAVE_ONE_OUT: True,
            ExplainMethod.ROLLOUT: all(has_weights),
            ExplainMethod.RECEIVED_ATTENTION: has_weights[-1],
            ExplainMethod.CONTRIBUTION_NORM: has_contributions and spec.classifier is None,
        }
        self.methods = tuple(
            each for each, is_supported in methods.items() if is_supported and model.config.explain
        )

    # --- Validation -------------------------------------------------------------------------------

    def _make_plan(
        self,
        request: ExplanationRequest,
        prompt: str,
        other_prompt: str,
        *,
        direction: Float64Array | None = None,
        matrix: PairMatrix | None = None,
    ) -> ExplanationPlan:
        methods = tuple(request.methods) or (ExplainMethod.CONTRIBUTIONS,)
        is_logit = self._spec.classifier is not None
        for method in methods:
            if method not in self.methods:
                raise NotSupportedError(f"{_name(method)} is not supported: {self._unavailability(method)}")
        return ExplanationPlan(
            prompt=prompt,
            other_prompt=other_prompt,
            truncate=request.truncate,
            pooling=request.pooling or self._spec.pooling,
            dimensions=self._spec.max_dimensions
            if is_logit
            else request.dimensions or self._spec.embedding_size,
            methods=methods,
            level=request.level,
            head_contributions=request.head_contributions,
            direction=direction,
            matrix=matrix,
            is_logit=is_logit,
        )

    def _check_enabled(self) -> None:
        if not self._model.config.explain:
            raise NotSupportedError("explanations are disabled: start the server without --no-explain")

    def _unavailability(self, method: ExplainMethod) -> str:
        """Return the reason why a method is not supported, and the remedy."""
        usable = ", ".join(_name(each) for each in self.methods)
        if method is ExplainMethod.CONTRIBUTION_NORM and self._spec.classifier is not None:
            return f"it scores parts of embeddings, which classifiers lack: use {usable}"
        if method in (ExplainMethod.CONTRIBUTIONS, ExplainMethod.CONTRIBUTION_NORM):
            return f"{NO_CONTRIBUTIONS}: export the model again, or use {usable}"
        return f"{_UNAVAILABLE[method]}: use {usable}"

    def _check_common(self, request: ExplanationRequest) -> Iterator[FieldViolation]:
        if self._spec.classifier is None:
            yield from check_dimensions(request.dimensions, self._spec)
        for number, method in enumerate(request.methods):
            field = f"methods[{number}]"
            if method in request.methods[:number]:
                yield FieldViolation(field, f"is {_name(method)}, which is listed twice: remove it")
            elif method is ExplainMethod.OUTPUT_SHARE and (reason := self._nonlinearity(request)):
                remedy = f"use {_name(ExplainMethod.CONTRIBUTIONS)}"
                yield FieldViolation(field, f"is {_name(method)}, but {reason}: {remedy}")
        contributions = ExplainMethod.CONTRIBUTIONS
        if request.head_contributions and request.methods and contributions not in request.methods:
            problem = f"is set, but methods does not contain {_name(contributions)}: add it"
            yield FieldViolation("head_contributions", problem)
        has_ids = any(given.token_ids is not None for given in (*request.inputs, *request.other_inputs))
        if request.level is ExplainLevel.WORDS and has_ids:
            problem = "is EXPLAIN_LEVEL_WORDS, but token ids have no words: send text, or use tokens"
            yield FieldViolation("level", problem)

    def _nonlinearity(self, request: ExplanationRequest) -> str:
        """Return why embeddings are not weighted sums of token vectors, or "" if they are."""
        if self._spec.classifier is not None:
            return "logits are not sums of token vectors"
        if self._model.dense:
            return "embeddings of models with dense layers are not sums of token vectors"
        if (request.pooling or self._spec.pooling) is Pooling.MAX:
            return "the maximum is not a sum of token vectors"
        return ""

    # --- Tokenization -----------------------------------------------------------------------------

    async def _described_texts(
        self,
        inputs: Sequence[Input],
        plan: ExplanationPlan,
        budget: Budget,
        fields: Sequence[str] = (),
        *,
        prompt: str | None = None,
    ) -> list[Described]:
        """Return texts to explain with their tokens.

        Raises:
            ResponseTooLargeError: The response would exceed the limit. Raised as soon as this is known.
        """
        message_bytes = 0

        def reserve(texts: list[Described]) -> None:
            nonlocal message_bytes
            budget.count_tokens(sum(text.encoded.num_tokens for text, _ in texts))
            message_bytes += self._reserve_explanations(texts, message_bytes, plan, budget)

        prompt = plan.prompt if prompt is None else prompt
        tokenize = partial(self._describe_texts, inputs, plan=plan, fields=fields, prompt=prompt)
        sources = TextSources(inputs, self._encoder.surroundings(prompt), DESCRIBING_BYTES, budget)
        return await self._in_portions(sources, tokenize, reserve)

    def _describe_texts(
        self,
        inputs: Sequence[Input],
        portion: range,
        *,
        plan: ExplanationPlan,
        fields: Sequence[str],
        prompt: str,
    ) -> list[Described]:
        try:
            encoded = self._encoder.encode(
                inputs, portion, prompt=prompt, truncate=plan.truncate, with_records=True
            )
        except (InputTooLongError, InvalidFieldsError) as error:
            raise (rename_error(error, fields) if fields else error) from None
        return [self._explained_text(text, self._encoder.describe(text), plan) for text in encoded]

    @staticmethod
    def _explained_text(encoded: EncodedInput, tokens: Tokens, plan: ExplanationPlan) -> Described:
        is_removable = tuple(source is not TokenSource.SPECIAL for source in tokens.sources)
        return Text(encoded.without_record(), weights_of(encoded, plan), is_removable), tokens

    # --- Limits -----------------------------------------------------------------------------------

    def _reserve_explanations(
        self, texts: Sequence[Described], message_bytes: int, plan: ExplanationPlan, budget: Budget
    ) -> int:
        """Reserve memory for the explanations of some texts, and return their size in the message.

        Args:
            texts: Texts.
            message_bytes: Size of the explanations that are already in the message.
            plan: Plan of the call.
            budget: Resources of the call.

        Raises:
            ResponseTooLargeError: The response would exceed the limit.
        """
        added = sum(self._explanation_costs.message_bytes(tokens, plan) for _, tokens in texts)
        self._costs.check("the response", message_bytes + added, "send fewer or shorter texts")
        memory_bytes = sum(self._explanation_costs.memory_bytes(tokens, plan) for _, tokens in texts)
        num_tokens = sum(text.encoded.num_tokens for text, _ in texts)
        budget.memory.grow(
            memory_bytes
            + self._costs.serialization_copies * added
            + budget.conversion.memory_bytes(added, num_tokens, len(texts))
        )
        return added

    @contextmanager
    def _explanation_slots(
        self, plan: ExplanationPlan, num_texts: int, num_vectors: int, client: Client
    ) -> Iterator[Slots]:
        """Acquire the queue slots for the first runs of a call. `Runs` releases them as it proceeds."""
        slots = Slots(self._process.admission, client)
        try:
            slots.acquire(self._runs.first_slots(plan, num_texts, num_vectors))
            yield slots
        finally:
            slots.release()

    def _further_runs_cost(
        self, texts: Sequence[Text], plan: ExplanationPlan, pairs: Sequence[tuple[Text, Text]] = ()
    ) -> int:
        """Return the cost of all runs beyond the first one of each text, in tokens.

        Raises:
            TooExpensiveError: The cost exceeds the limit.
        """
        costs = {}
        if plan.needs_masked_runs:
            is_method = ExplainMethod.LEAVE_ONE_OUT in plan.methods
            runs = ((text.encoded.num_tokens, num_masked_runs(text)) for text in texts)
            field = _method_field(plan, ExplainMethod.LEAVE_ONE_OUT) if is_method else "matrix"
            costs[field] = sum(masked_runs_cost(length, num_runs) for length, num_runs in runs)
        if plan.needs_norms:
            costs[_method_field(plan, ExplainMethod.CONTRIBUTION_NORM)] = sum(
                sweeps_cost(text.encoded.num_tokens, plan.dimensions) for text in texts
            )
        if plan.needs_input_matrix:
            lengths = ((first.encoded.num_tokens, second.encoded.num_tokens) for first, second in pairs)
            costs["matrix"] = sum(input_matrix_cost(both, plan.dimensions) for both in lengths)
        if sum(costs.values()) > self._model.config.max_computed_tokens:
            raise TooExpensiveError(costs, self._model.config.max_computed_tokens, _CHEAPER)
        return sum(costs.values())

    # --- Graph runs -------------------------------------------------------------------------------

    async def _run_graphs(
        self,
        described: Sequence[Described],
        directions: Sequence[Float64Array | None],
        call: Call,
        vectors: Sequence[Vectors] | None = None,
    ) -> list[GraphResults]:
        """Run all graphs that the plan needs, except for `vectors` if they are given."""
        plan, runs = call.plan, self._runs
        texts = [text for text, _ in described]
        if vectors is None and not runs.needs_no_vectors(plan):
            vectors = await runs.vectors(texts, call, with_tokens=plan.needs_token_vectors)
        contributions = (
            await runs.contributions(texts, directions, call) if plan.needs_contributions else None
        )
        attention = await runs.attention(texts, call)
        masked = await runs.masked_embeddings(texts, call) if plan.needs_masked_runs else None
        norms: list[Float64Array | None] = [None] * len(texts)
        if plan.needs_norms:
            for index, (text, tokens) in enumerate(described):
                words = words_of(tokens) if plan.level is ExplainLevel.WORDS else []
                norms[index] = await runs.contribution_norms(text, words, call)
        return [
            GraphResults(
                text,
                tokens,
                directions[index],
                contributions[index] if contributions else None,
                vectors[index] if vectors else None,
                attention[index],
                masked[index] if masked else None,
                norms[index],
            )
            for index, (text, tokens) in enumerate(described)
        ]


def directions_of(vectors: Sequence[Vectors], fields: Sequence[str]) -> list[Float64Array]:
    """Return p / |p| of the texts `fields`.

    Raises:
        InvalidFieldsError: An embedding is zero or not finite.
    """
    return [direction_of(each.embedding, field) for each, field in zip(vectors, fields, strict=True)]


def explained_texts(
    found: Sequence[GraphResults], fields: Sequence[str], plan: ExplanationPlan, model: Model
) -> list[Explanation]:
    """Return the explanations of the texts `fields`."""
    return [explanation(each, field, plan, model) for each, field in zip(found, fields, strict=True)]


def _method_field(plan: ExplanationPlan, method: ExplainMethod) -> str:
    return f"methods[{plan.methods.index(method)}]"


def _name(method: ExplainMethod) -> str:
    return f"EXPLAIN_METHOD_{method.name}"
