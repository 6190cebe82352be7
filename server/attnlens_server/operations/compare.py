"""Compare: how much each token of two texts contributes to their similarity.

Shapes: T tokens, W words, E dimensions of an embedding.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from attnlens.explanations import (
    ExplainLevel,
    Float64Array,
    PairMatrix,
    interaction_matrix,
    output_matrix,
    sum_over_words,
    to_unit_length,
)
from attnlens.pooling import FloatArray
from attnlens.similarity import Similarity
from attnlens_server.bundle import Model
from attnlens_server.core.admission import Budget
from attnlens_server.core.loaded_model import LoadedModel
from attnlens_server.core.process import Process
from attnlens_server.core.usage import Clock, Timings
from attnlens_server.errors import FieldViolation, InvalidFieldsError, NotSupportedError
from attnlens_server.operations.explaining import (
    NO_CONTRIBUTIONS,
    ExplanationOperation,
    directions_of,
    explained_texts,
)
from attnlens_server.operations.explanations import (
    Call,
    Explanation,
    ExplanationPlan,
    ExplanationRequest,
    GraphResults,
    Text,
    norm_in_graph,
    words_of,
)
from attnlens_server.operations.graph_runs import MAX_INLINE_TEXTS, Runs, unit_vectors
from attnlens_server.operations.inputs import Prompt, Request, rename
from attnlens_server.text import Input


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRequest(ExplanationRequest):
    """Request for the contribution of each token to the similarity of two texts.

    `inputs` and `prompt` belong to the first text of each pair, `second_inputs` and `prompt_b` to the second.
    """

    second_inputs: Sequence[Input]
    prompt_b: Prompt | None = None
    matrix: PairMatrix | None = None

    @property
    def other_inputs(self) -> Sequence[Input]:
        """Second text of each pair."""
        return self.second_inputs


@dataclass(frozen=True, slots=True)
class PairMatrixResult:
    """Scores of each pair of tokens, or words, of two texts.

    The baselines belong to input matrices, and are None for others.

    Attributes:
        values: Scores (T, T') or (W, W').
        baseline_row: Biases of the first text with tokens or words of the second, (T',) or (W',).
        baseline_column: Tokens or words of the first text with biases of the second, (T,) or (W,).
        baseline: Biases of both.
    """

    values: FloatArray
    baseline_row: FloatArray | None = None
    baseline_column: FloatArray | None = None
    baseline: float | None = None

    @property
    def nbytes(self) -> int:
        """Size of all arrays in bytes."""
        arrays = (self.values, self.baseline_row, self.baseline_column)
        return sum(array.nbytes for array in arrays if array is not None)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Explanation of the similarity of two texts. `matrix` is None if not requested."""

    a: Explanation
    b: Explanation
    similarity: float
    matrix: PairMatrixResult | None


@dataclass(frozen=True, slots=True)
class CompareResult:
    """Result of Compare. `similarity` is the function that compares embeddings."""

    pairs: list[Comparison]
    timings: Timings
    similarity: Similarity


class CompareOperation(ExplanationOperation):
    """Returns the contribution of each token of two texts to their similarity, for each pair of texts.

    Attributes:
        matrices: Matrices that the model and the configuration support.
    """

    def __init__(self, process: Process, model: LoadedModel) -> None:
        super().__init__(process, model)
        has_embeddings = model.spec.classifier is None
        matrices = {
            PairMatrix.OUTPUT: has_embeddings and not model.dense,
            PairMatrix.INTERACTION: has_embeddings,
            PairMatrix.INPUT: has_embeddings and model.engine.has_contributions,
        }
        self.matrices = tuple(
            each for each, is_supported in matrices.items() if is_supported and model.config.explain
        )

    async def __call__(self, request: CompareRequest, budget: Budget) -> CompareResult:
        """Return the contribution of each token of two texts to their similarity, for each pair of texts.

        Raises:
            RequestError: See `attnlens_server.errors`.
        """
        plan = await self._validated(request, self.plan)
        count = len(request.inputs)
        with self._explanation_slots(plan, 2 * count, 2 * count, budget.client) as slots:
            budget.charge_texts(2 * count)
            started = time.monotonic()
            fields = [f"pairs[{index}].{side}" for side in "ab" for index in range(count)]
            described = await self._described_texts(request.inputs, plan, budget, fields[:count])
            described += await self._described_texts(
                request.second_inputs, plan, budget, fields[count:], prompt=plan.other_prompt
            )
            texts = [text for text, _ in described]
            pairs = list(zip(texts[:count], texts[count:], strict=True))
            self._reserve_matrices(pairs, plan, budget)
            budget.charge_tokens(self._further_runs_cost(texts, plan, pairs))
            clock = Clock(budget.metrics)
            clock.add(tokenize_s=time.monotonic() - started)
            call = Call(plan, budget.deadline, slots, clock)
            vectors = await self._runs.vectors(texts, call, with_tokens=plan.needs_token_vectors)
            own = (
                [each.embedding for each in vectors]
                if plan.is_dot
                else await self._process.workers.run_if(
                    count > MAX_INLINE_TEXTS, directions_of, vectors, fields
                )
            )
            found = await self._run_graphs(described, own[count:] + own[:count], call, vectors)
            input_matrices = [
                await input_matrix(first, second, self._runs, call) if plan.needs_input_matrix else None
                for first, second in pairs
            ]
            compared = await self._process.workers.run(
                _compared, found, fields, plan, self._spec, input_matrices
            )
        return CompareResult(compared, clock.timings, self._spec.similarity)

    def plan(self, request: CompareRequest) -> ExplanationPlan:
        """Validate a Compare request.

        Raises:
            InvalidFieldsError: One or more fields are invalid.
            NotSupportedError: Explanations are disabled, or the model does not support a method or the
                matrix.
        """
        self._check_enabled()
        if self._spec.classifier is not None:
            raise NotSupportedError(
                f"the model {self._spec.name!r} is a classifier, and Compare needs embeddings: use Explain "
                "with a pair of texts"
            )
        violations: list[FieldViolation] = []
        prompts = []
        first = Request(inputs=request.inputs, prompt=request.prompt, violations=request.violations)
        second = Request(inputs=request.second_inputs, prompt=request.prompt_b)
        for side, texts in (("a", first), ("b", second)):
            prompt, found = self._inputs.validate(texts)
            paths = [f"pairs[{number}].{side}" for number in range(len(texts.inputs))]
            violations += rename(found, paths, {"inputs": "pairs", "prompt": f"prompt_{side}"})
            prompts.append(prompt)
        violations = list(dict.fromkeys(violations))  # too many pairs is found on both sides
        violations += self._check_common(request)
        matrix = request.matrix
        if matrix is PairMatrix.OUTPUT and (reason := self._nonlinearity(request)):
            usable = [f"PAIR_MATRIX_{each.name}" for each in self.matrices if each is not PairMatrix.OUTPUT]
            remedy = f"use {' or '.join(usable)}" if usable else "omit it"
            violations.append(FieldViolation("matrix", f"is PAIR_MATRIX_OUTPUT, but {reason}: {remedy}"))
        if violations:
            raise InvalidFieldsError(violations)
        if matrix is not None and matrix not in self.matrices:
            problem = f"PAIR_MATRIX_{matrix.name} is not supported: {NO_CONTRIBUTIONS}"
            raise NotSupportedError(f"{problem}: export the model again")
        # Embeddings of length 1 have equal dot products and cosines.
        is_dot = self._spec.similarity is Similarity.DOT and not self._spec.normalize
        return replace(self._make_plan(request, *prompts, matrix=matrix), is_dot=is_dot)

    def _reserve_matrices(
        self, pairs: Sequence[tuple[Text, Text]], plan: ExplanationPlan, budget: Budget
    ) -> None:
        """Reserve memory for the matrices of a comparison."""
        lengths = [(first.encoded.num_tokens, second.encoded.num_tokens) for first, second in pairs]
        matrix_bytes = sum(self._explanation_costs.matrix_bytes(length, plan) for length in lengths)
        sweep_bytes = max(self._explanation_costs.sweep_bytes(length, plan) for length in lengths)
        self._costs.check("the response", matrix_bytes, "send fewer or shorter texts")
        budget.memory.grow(
            5 * matrix_bytes + budget.conversion.memory_bytes(matrix_bytes, 0, 0) + sweep_bytes
        )


def _compared(
    found: Sequence[GraphResults],
    fields: Sequence[str],
    plan: ExplanationPlan,
    model: Model,
    input_matrices: Sequence[Float64Array | None],
) -> list[Comparison]:
    explained = explained_texts(found, fields, plan, model)
    count = len(found) // 2
    return [
        Comparison(
            explained[index],
            explained[count + index],
            explained[index].target_value,
            matrix(found[index], found[count + index], plan, input_matrices[index]),
        )
        for index in range(count)
    ]


# --- Matrices -------------------------------------------------------------------------------------


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
            lengths = norm_in_graph(first.embedding) * norm_in_graph(second.embedding)
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
