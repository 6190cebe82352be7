"""From jobs to plans: checked, the model's defaults filled in. All that is wrong is told at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attnlens.patterns import Band, BlockTable, Pattern
from attnlens.pooling import Pooling
from attnlens.reductions import AttentionReduction, TextUnits
from attnlens_server.bundle import Kind, Layout, Model, Output, OutputRole, RowSum
from attnlens_server.config import ServerConfig
from attnlens_server.engine import HeadSelection, Wanted, WantedReduction
from attnlens_server.errors import FieldViolation, InvalidFieldsError, ModelNotFoundError
from attnlens_server.serving.input_checks import InputChecks
from attnlens_server.serving.jobs import (
    AttentionQuery,
    AttentionView,
    DataType,
    EmbedJob,
    EncodeJob,
    TokenizeJob,
)
from attnlens_server.serving.reduction_checks import reduction_problems

MAX_QUERIES = 16


@dataclass(frozen=True, slots=True)
class EmbedPlan:
    """A checked EmbedJob.

    Attributes:
        prompt: goes before each text.
        pooling: of the token vectors.
        normalize_first: scale to length 1 before components are cut off, as the publisher does.
        dimensions: how many components are kept.
        normalize: scale to length 1 at the end.
        data_type: of the result.
    """

    prompt: str
    pooling: Pooling
    normalize_first: bool
    dimensions: int
    normalize: bool
    data_type: DataType


@dataclass(frozen=True, slots=True)
class QueryPlan:
    """A checked AttentionQuery.

    Attributes:
        index: its number in the job.
        role: what the outputs mean.
        outputs: one for each layer, in the order asked for; all have the same number of heads, the same row
            sum, and come in the same layout.
        heads: the heads to return or to average, from 0.
        view: what to make of them.
        reduction: what to make of the weights between tokens; None: nothing.
    """

    index: int
    role: OutputRole
    outputs: tuple[Output, ...]
    heads: tuple[int, ...]
    view: AttentionView
    reduction: AttentionReduction | None = None

    @property
    def layout(self) -> Layout:
        """Where the axes of what is returned, or reduced, are."""
        return result_layout(self.outputs[0], self.view, is_reduced=self.reduction is not None)

    @property
    def parts(self) -> tuple[tuple[Output, ...], ...]:
        """The outputs that each part of a stream is made of: one, or all that a reduction joins."""
        if self.reduction is not None and self.reduction.joins_layers:
            return (self.outputs,)
        return tuple((output,) for output in self.outputs)

    @property
    def num_result_heads(self) -> int:
        """How many maps there are of a layer, or of joined layers."""
        return 1 if self.view is AttentionView.HEAD_MEAN else len(self.heads)

    @property
    def row_sum(self) -> RowSum:
        """What the rows of the outputs sum to."""
        return self.outputs[0].row_sum

    def num_values(self, num_tokens: int) -> int:
        """Return how many numbers a layer of a text has."""
        if self.layout is Layout.DENSE:
            return self.num_result_heads * num_tokens**2
        return self.outputs[0].num_values(num_tokens, self.num_result_heads)

    def pattern_bytes(self, num_tokens: int) -> int:
        """Return the size of what says which blocks a layer of a text has."""
        table = self.outputs[0].pattern
        if self.layout is not Layout.BLOCKS or not isinstance(table, BlockTable):
            return 0
        return 4 * len(self.heads) * table.num_slots * -(-num_tokens // table.block_size)

    def wanted(self, output: Output) -> Wanted:
        """Return what the engine is asked for, of one of the outputs."""
        is_mean, is_dense = self.view is AttentionView.HEAD_MEAN, self.layout is Layout.DENSE
        selection = HeadSelection(self.heads, is_mean=is_mean, is_dense=is_dense)
        return Wanted(output.name, output.layout, selection, output.pattern)

    def wanted_reduction(self, outputs: Sequence[Output], units: TextUnits | None) -> WantedReduction | None:
        """Return what the engine is asked for, of a part of the outputs; None: nothing is reduced."""
        if self.reduction is None:
            return None
        is_mean = self.view is AttentionView.HEAD_MEAN
        # Where words and special tokens come first, the mean has to wait for them.
        selection = HeadSelection(self.heads, is_mean=is_mean and not self.reduction.has_units, is_dense=True)
        layers = tuple(
            Wanted(output.name, output.layout, selection, output.pattern)
            for output in sorted(outputs, key=lambda output: output.layer or 0)
        )
        return WantedReduction(layers, self.reduction, units, is_mean_of_heads=is_mean)


def result_layout(output: Output, view: AttentionView, *, is_reduced: bool = False) -> Layout:
    """Return the layout in which a view of an output comes, or is reduced."""
    if is_reduced and output.pattern is not None:
        return Layout.DENSE
    is_mean_of_blocks = view is AttentionView.HEAD_MEAN and output.layout is Layout.BLOCKS
    is_dense = output.pattern is not None and (view is AttentionView.DENSE or is_mean_of_blocks)
    return Layout.DENSE if is_dense else output.layout


def _form(output: Output, view: AttentionView, *, is_reduced: bool) -> tuple[object, ...]:
    """Return what the outputs of a query must have in common."""
    layout, pattern = result_layout(output, view, is_reduced=is_reduced), output.pattern
    shape = None if pattern is None or layout is Layout.DENSE else (_unit(pattern), pattern.width)
    return output.num_heads, output.row_sum, layout, shape


def _unit(pattern: Pattern) -> int:
    return pattern.window_radius if isinstance(pattern, Band) else pattern.block_size


Part = tuple[QueryPlan, tuple[Output, ...]]
"""What one message of a stream has of the attention of a text: one layer, or several that are joined."""


@dataclass(frozen=True, slots=True)
class EncodePlan:
    """A checked EncodeJob.

    Attributes:
        prompt: goes before each text.
        hidden_state: the token vectors; None: not asked for.
        queries: what to return of the attention.
        data_type: of the result.
    """

    prompt: str
    hidden_state: Output | None
    queries: tuple[QueryPlan, ...]
    data_type: DataType

    @property
    def kind(self) -> Kind:
        """Which graph has it all."""
        return "attention" if self.queries else "embeddings"

    @property
    def parts(self) -> tuple[Part, ...]:
        """The attention parts of each text in a stream, in order."""
        return tuple((query, outputs) for query in self.queries for outputs in query.parts)

    @property
    def with_rows(self) -> Mapping[int, AttentionReduction]:
        """What asks for some rows of each text, by the number of the query."""
        asked = {query.index: query.reduction for query in self.queries}
        return {index: reduction for index, reduction in asked.items() if reduction and reduction.rows}

    @property
    def needs_units(self) -> bool:
        """Whether the words and special tokens of texts must be known."""
        return any(query.reduction is not None and query.reduction.needs_text for query in self.queries)

    def wanted(self, parts: Sequence[Part], *, with_hidden_state: bool = True) -> tuple[Wanted, ...]:
        """Return what the engine is asked for as it is: the token vectors first."""
        hidden = self.hidden_state if with_hidden_state else None
        return ((Wanted(hidden.name, hidden.layout),) if hidden else ()) + tuple(
            query.wanted(output) for query, outputs in parts if query.reduction is None for output in outputs
        )

    def wanted_reductions(
        self, parts: Sequence[Part], units: TextUnits | None
    ) -> tuple[WantedReduction, ...]:
        """Return what the engine is asked for reduced, of a text with these units."""
        wanted = (query.wanted_reduction(outputs, units) for query, outputs in parts)
        return tuple(reduction for reduction in wanted if reduction is not None)


class Checks:
    """Checks jobs against one model and one configuration."""

    def __init__(
        self, model: Model, config: ServerConfig, *, max_tokens: int, has_tokenizer: bool, takes_pairs: bool
    ) -> None:
        self._model = model
        self.inputs = self._inputs = InputChecks(
            model, config, max_tokens=max_tokens, has_tokenizer=has_tokenizer, takes_pairs=takes_pairs
        )

    def model_name(self, name: str) -> None:
        """Make sure that the model is the one that is here.

        Raises:
            ModelNotFoundError: it is another.
        """
        if name not in ("", self._model.name):
            raise ModelNotFoundError(name, self._model.name)

    def embed(self, job: EmbedJob) -> EmbedPlan:
        """Check a job and fill in the model's defaults.

        Raises:
            ModelNotFoundError, InvalidFieldsError.
        """
        self.model_name(job.model)
        model = self._model
        prompt, violations = self._inputs.check(job)
        if not 0 <= job.dimensions <= model.max_dimensions:
            text = f"is {job.dimensions}: it must be from 1 to {model.max_dimensions}, or 0 for all"
            violations.append(FieldViolation("dimensions", text))
        if violations:
            raise InvalidFieldsError(violations)
        is_published = not job.dimensions and job.normalize is None
        normalize = model.normalize if job.normalize is None else job.normalize
        return EmbedPlan(
            prompt=prompt,
            pooling=job.pooling or model.pooling,
            normalize_first=normalize and is_published,
            dimensions=job.dimensions or model.embedding_size,
            normalize=normalize and not is_published,
            data_type=job.data_type,
        )

    def encode(self, job: EncodeJob) -> EncodePlan:
        """Check a job.

        Raises:
            ModelNotFoundError, InvalidFieldsError.
        """
        self.model_name(job.model)
        prompt, violations = self._inputs.check(job)
        if len(job.attention) > MAX_QUERIES:
            text = f"has more than {MAX_QUERIES} queries: send several requests"
            violations.append(FieldViolation("attention", text))
        queries = [
            self._query(index, query, violations) for index, query in enumerate(job.attention[:MAX_QUERIES])
        ]
        for index, query in enumerate(job.attention[:MAX_QUERIES]):
            violations += reduction_problems(f"attention[{index}]", query, self._model, job.inputs)
        if violations:
            raise InvalidFieldsError(violations)
        wants_hidden = job.last_hidden_state or not queries
        kind: Kind = "attention" if queries else "embeddings"
        return EncodePlan(
            prompt=prompt,
            hidden_state=self._model.outputs.hidden_state(kind) if wants_hidden else None,
            queries=tuple(query for query in queries if query is not None),
            data_type=job.data_type,
        )

    def tokenize(self, job: TokenizeJob) -> str:
        """Check a job and return the prompt.

        Raises:
            ModelNotFoundError, InvalidFieldsError.
        """
        self.model_name(job.model)
        prompt, violations = self._inputs.check(job)
        if violations:
            raise InvalidFieldsError(violations)
        return prompt

    def _query(self, index: int, query: AttentionQuery, violations: list[FieldViolation]) -> QueryPlan | None:
        """Return a checked query; what is wrong is added to `violations`."""
        field = f"attention[{index}]"
        by_layer = self._model.outputs.layers(query.role)
        if not by_layer:
            roles = ", ".join(_role_name(role) for role in self._model.outputs.roles)
            text = f"is {_role_name(query.role)}: the model has {roles}"
            violations.append(FieldViolation(f"{field}.role", text))
            return None
        found: list[FieldViolation] = []
        outputs = _select_layers(f"{field}.layers", query.layers, by_layer, self._model.num_layers, found)
        is_reduced = query.reduction is not None
        if len({_form(output, query.view, is_reduced=is_reduced) for output in outputs}) > 1:
            found.append(FieldViolation(f"{field}.layers", _difference(outputs, query.view)))
        num_heads = outputs[0].num_heads if outputs else max(output.num_heads for output in by_layer.values())
        heads = _select(f"{field}.heads", query.heads, num_heads, found)
        violations += found
        return None if found else QueryPlan(index, query.role, outputs, heads, query.view, query.reduction)


def _difference(outputs: Sequence[Output], view: AttentionView) -> str:
    """Say why outputs can't be the answer to one query."""
    counts = ", ".join(str(count) for count in sorted({output.num_heads for output in outputs}))
    if "," in counts:
        return f"have different numbers of heads ({counts}): ask for them in queries of their own"
    layouts = sorted({result_layout(output, view).name for output in outputs})
    names = " and ".join(f"OUTPUT_LAYOUT_{name}" for name in layouts)
    return (
        f"are laid out in different ways ({names}, or of different widths): ask for them in queries of their "
        "own, or for ATTENTION_VIEW_DENSE"
    )


def _role_name(role: OutputRole) -> str:
    return f"OUTPUT_ROLE_{role.name}"


def _select_layers(
    field: str,
    numbers: Sequence[int],
    by_layer: Mapping[int, Output],
    num_layers: int,
    violations: list[FieldViolation],
) -> tuple[Output, ...]:
    """Return the outputs of the layers; empty means all. What is wrong is added to `violations`."""
    if not numbers:
        return tuple(by_layer[layer] for layer in sorted(by_layer))
    layers = _select(field, numbers, num_layers, violations)
    for index, layer in enumerate(layers):
        if layer not in by_layer:
            known = ", ".join(str(known) for known in sorted(by_layer))
            text = f"is {numbers[index]}: that layer has no such output, these have: {known}"
            violations.append(FieldViolation(f"{field}[{index}]", text))
    return tuple(by_layer[layer] for layer in layers if layer in by_layer)


def _select(
    field: str, numbers: Sequence[int], count: int, violations: list[FieldViolation]
) -> tuple[int, ...]:
    """Resolve negative numbers; empty means all. What is wrong is added to `violations`."""
    if not numbers:
        return tuple(range(count))
    if len(numbers) > count:
        text = f"has more than {count} numbers: the model has {count}, each may be requested once"
        violations.append(FieldViolation(field, text))
        return ()
    chosen: list[int] = []
    for index, number in enumerate(numbers):
        resolved = number + count if number < 0 else number
        if not 0 <= resolved < count:
            text = f"is {number}: the model has {count}, so use 0 to {count - 1}, or -{count} to -1"
            violations.append(FieldViolation(f"{field}[{index}]", text))
        elif resolved in chosen:
            violations.append(FieldViolation(f"{field}[{index}]", f"is {number}: it was asked for before"))
        else:
            chosen.append(resolved)
    return tuple(chosen)
