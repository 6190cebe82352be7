"""From jobs to plans: checked, the model's defaults filled in. All that is wrong is told at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attnlens.explanations import ExplainLevel, ExplainMethod, Float64Array, PairMatrix
from attnlens.pooling import Pooling
from attnlens_server.bundle import Model, OutputRole, RowSum
from attnlens_server.config import ServerConfig
from attnlens_server.errors import FieldViolation, InvalidFieldsError, NotSupportedError
from attnlens_server.serving.explanations.fields import rename
from attnlens_server.serving.explanations.jobs import CompareJob, ExplainJob, ExplanationJob
from attnlens_server.serving.input_checks import InputChecks
from attnlens_server.serving.jobs import Job

CONTRIBUTIONS, OUTPUT_SHARE = ExplainMethod.CONTRIBUTIONS, ExplainMethod.OUTPUT_SHARE
LEAVE_ONE_OUT, ROLLOUT = ExplainMethod.LEAVE_ONE_OUT, ExplainMethod.ROLLOUT
RECEIVED_ATTENTION = ExplainMethod.RECEIVED_ATTENTION
CONTRIBUTION_NORM = ExplainMethod.CONTRIBUTION_NORM


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplanationPlan:
    """A checked job.

    Attributes:
        prompt: goes before each of the inputs.
        other_prompt: goes before each of the other texts.
        truncate: cut what is too long.
        pooling: of the token vectors.
        dimensions: E, how many components an embedding has.
        methods: each once.
        level: what scores are about.
        head_contributions: whether they are wanted.
        direction: d, (E,); None: of a text.
        matrix: of a comparison; None: not wanted.
    """

    prompt: str
    other_prompt: str
    truncate: bool
    pooling: Pooling
    dimensions: int
    methods: tuple[ExplainMethod, ...]
    level: ExplainLevel
    head_contributions: bool
    direction: Float64Array | None = None
    matrix: PairMatrix | None = None

    @property
    def needs_contributions(self) -> bool:
        """Whether the graph of contributions is run."""
        return CONTRIBUTIONS in self.methods

    @property
    def needs_token_vectors(self) -> bool:
        """Whether all token vectors of each text are wanted."""
        return OUTPUT_SHARE in self.methods or self.matrix is PairMatrix.OUTPUT

    @property
    def needs_input_matrix(self) -> bool:
        """Whether the graph of contributions is run for each component of an embedding."""
        return self.matrix is PairMatrix.INPUT

    @property
    def needs_norms(self) -> bool:
        """Whether the graph of contributions runs once per embedding component of each text."""
        return CONTRIBUTION_NORM in self.methods

    @property
    def needs_further_runs(self) -> bool:
        """Whether the model is run more than once for each text."""
        return self.needs_masked_runs or self.needs_input_matrix or self.needs_norms

    @property
    def needs_masked_runs(self) -> bool:
        """Whether the model is run without each token."""
        return LEAVE_ONE_OUT in self.methods or self.matrix is PairMatrix.INTERACTION


class ExplanationChecks:
    """Checks jobs against one model and one configuration.

    Attributes:
        methods: those that can be asked for.
        matrices: those that can be asked for.
    """

    def __init__(
        self,
        model: Model,
        config: ServerConfig,
        inputs: InputChecks,
        *,
        has_contributions: bool,
        has_dense: bool,
    ) -> None:
        self._model = model
        self._is_on = config.explain
        self._inputs = inputs
        self._has_dense = has_dense
        self._has_contributions = has_contributions
        has_all, has_last = _attention_of(model)
        possible = {
            CONTRIBUTIONS: has_contributions,
            OUTPUT_SHARE: not has_dense,
            LEAVE_ONE_OUT: True,
            ROLLOUT: has_all,
            RECEIVED_ATTENTION: has_last,
            CONTRIBUTION_NORM: has_contributions,
        }
        matrices = {
            PairMatrix.OUTPUT: not has_dense,
            PairMatrix.INTERACTION: True,
            PairMatrix.INPUT: has_contributions,
        }
        self.methods = tuple(method for method, can in possible.items() if can and self._is_on)
        self.matrices = tuple(matrix for matrix, can in matrices.items() if can and self._is_on)

    def explain(self, job: ExplainJob) -> ExplanationPlan:
        """Check a job.

        Raises:
            InvalidFieldsError, NotSupportedError.
        """
        self._check_on()
        prompt, violations = self._inputs.check(job)
        other_prompt = ""
        if texts := job.target.inputs:
            asked = Job(inputs=tuple(texts.values()), prompt=job.target_prompt)
            other_prompt, found = self._inputs.check(asked)
            violations += rename(found, tuple(texts), {"prompt": "target_prompt"})
        elif job.target_prompt is not None:
            text = "is set, but the target has no text to put it before: leave it out"
            violations.append(FieldViolation("target_prompt", text))
        violations += self._check_common(job)
        dimensions = job.dimensions or self._model.embedding_size
        direction = None
        if job.target.direction is not None:
            direction = np.asarray(job.target.direction, dtype=np.float64)
            violations += _check_direction(direction, dimensions)
        if violations:
            raise InvalidFieldsError(violations)
        return self._plan(job, prompt, other_prompt, direction=direction)

    def compare(self, job: CompareJob) -> ExplanationPlan:
        """Check a job.

        Raises:
            InvalidFieldsError, NotSupportedError.
        """
        self._check_on()
        violations: list[FieldViolation] = []
        prompts = []
        sides = (("a", job.inputs, job.prompt), ("b", job.seconds, job.prompt_b))
        for side, inputs, prompt in sides:
            own = job.violations if side == "a" else ()
            text, found = self._inputs.check(Job(inputs=inputs, prompt=prompt, violations=own))
            names = [f"pairs[{number}].{side}" for number in range(len(inputs))]
            violations += rename(found, names, {"inputs": "pairs", "prompt": f"prompt_{side}"})
            prompts.append(text)
        violations = list(dict.fromkeys(violations))  # both sides are too many
        violations += self._check_common(job)
        if job.matrix is PairMatrix.OUTPUT and (why := self._why_not_linear(job)):
            usable = (f"PAIR_MATRIX_{each.name}" for each in self.matrices if each is not PairMatrix.OUTPUT)
            text = f"is PAIR_MATRIX_OUTPUT, {why}: use {' or '.join(usable) or 'none'}"
            violations.append(FieldViolation("matrix", text))
        if violations:
            raise InvalidFieldsError(violations)
        if job.matrix is not None and job.matrix not in self.matrices:
            raise NotSupportedError(
                f"PAIR_MATRIX_{job.matrix.name} can't be used here: {_NO_CONTRIBUTIONS}: export it again"
            )
        return self._plan(job, *prompts, matrix=job.matrix)

    def _plan(
        self,
        job: ExplanationJob,
        prompt: str,
        other_prompt: str,
        *,
        direction: Float64Array | None = None,
        matrix: PairMatrix | None = None,
    ) -> ExplanationPlan:
        return ExplanationPlan(
            prompt=prompt,
            other_prompt=other_prompt,
            truncate=job.truncate,
            pooling=job.pooling or self._model.pooling,
            dimensions=job.dimensions or self._model.embedding_size,
            methods=self._methods(job.methods),
            level=job.level,
            head_contributions=job.head_contributions,
            direction=direction,
            matrix=matrix,
        )

    def _check_on(self) -> None:
        if not self._is_on:
            raise NotSupportedError(
                "Explain and Compare are not served here: the server was started with --no-explain"
            )

    def _methods(self, asked: Sequence[ExplainMethod]) -> tuple[ExplainMethod, ...]:
        """Return the methods of a job.

        Raises:
            NotSupportedError: one can't be used with this bundle or configuration.
        """
        methods = tuple(asked) or (CONTRIBUTIONS,)
        for method in methods:
            if method not in self.methods:
                is_contributions = method in (CONTRIBUTIONS, CONTRIBUTION_NORM)
                lacks_graph = is_contributions and not self._has_contributions
                why = self._without_contributions() if lacks_graph else _WHY_NOT[method]
                raise NotSupportedError(f"{_name(method)} can't be used here: {why}")
        return methods

    def _without_contributions(self) -> str:
        usable = ", ".join(_name(method) for method in self.methods)
        return f"{_NO_CONTRIBUTIONS}: export it again, or ask for {usable}"

    def _check_common(self, job: ExplanationJob) -> list[FieldViolation]:
        violations = []
        if not 0 <= job.dimensions <= self._model.max_dimensions:
            text = f"is {job.dimensions}: it must be from 1 to {self._model.max_dimensions}, or 0 for all"
            violations.append(FieldViolation("dimensions", text))
        for number, method in enumerate(job.methods):
            field = f"methods[{number}]"
            if method in job.methods[:number]:
                violations.append(FieldViolation(field, f"is {_name(method)}: it was asked for before"))
            elif method is OUTPUT_SHARE and (why := self._why_not_linear(job)):
                text = f"is {_name(method)}, {why}: use {_name(CONTRIBUTIONS)}"
                violations.append(FieldViolation(field, text))
        if job.head_contributions and job.methods and CONTRIBUTIONS not in job.methods:
            text = f"is set, but {_name(CONTRIBUTIONS)} is not among the methods: add it"
            violations.append(FieldViolation("head_contributions", text))
        has_ids = any(given.token_ids is not None for given in (*job.inputs, *job.others))
        if job.level is ExplainLevel.WORDS and has_ids:
            text = (
                "is EXPLAIN_LEVEL_WORDS, and inputs given as ids have no words: send text, or ask for tokens"
            )
            violations.append(FieldViolation("level", text))
        return violations

    def _why_not_linear(self, job: ExplanationJob) -> str:
        """Say why an embedding is not a weighted sum of token vectors; empty: it is."""
        if self._has_dense:
            return "and with the model's dense layers an embedding is no sum of token vectors"
        if (job.pooling or self._model.pooling) is Pooling.MAX:
            return "and the maximum is no sum of token vectors"
        return ""


_NO_CONTRIBUTIONS = (
    "the bundle has no graph of contributions: an earlier version of attnlens exported it, or the export "
    "said why there is none"
)
_WHY_NOT = {
    OUTPUT_SHARE: "an embedding of this model is no sum of token vectors",
    ROLLOUT: "not every layer of the model has attention weights that sum to 1",
    RECEIVED_ATTENTION: "the last layer of the model has no attention weights that sum to 1",
}


def _name(method: ExplainMethod) -> str:
    return f"EXPLAIN_METHOD_{method.name}"


def _attention_of(model: Model) -> tuple[bool, bool]:
    """Say whether all layers, and whether the last one, have weights whose rows sum to 1."""
    outputs = model.outputs.layers(OutputRole.ATTENTION_WEIGHTS)
    sums = [layer in outputs and outputs[layer].row_sum is RowSum.ONE for layer in range(model.num_layers)]
    return all(sums), sums[-1]


def _check_direction(direction: Float64Array, dimensions: int) -> list[FieldViolation]:
    if direction.shape != (dimensions,):
        text = f"has the shape {list(direction.shape)}: the embedding has the shape [{dimensions}]"
    elif not np.isfinite(direction).all():
        text = "has a NaN or an infinity: send finite numbers"
    elif not direction.any():
        text = "is all zeros, which is no direction: send another one"
    else:
        return []
    return [FieldViolation("direction", text)]
