"""Attention queries: selection of layers and heads, reductions, and results."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from attnlens.patterns import Band, BlockTable, Pattern
from attnlens.pooling import FloatArray
from attnlens.reductions import MAX_ROWS, AttentionReduction, Reduced, SqrtUint8, resolve_rows
from attnlens_server.bundle import Kind, Layout, Model, Output, OutputRole, RowSum
from attnlens_server.engine import HeadSelection, ItemResult, RequestedOutput, RequestedReduction
from attnlens_server.errors import FieldViolation, InvalidFieldsError
from attnlens_server.operations.values import DataType
from attnlens_server.text import EncodedInput, Input

MAX_QUERIES = 16


class AttentionView(IntEnum):
    """Form of an attention output. The values are those of `attnlens.v1.AttentionView`."""

    FULL = 1
    HEAD_MEAN = 2
    DENSE = 3


@dataclass(frozen=True, slots=True)
class AttentionQuery:
    """Selection of attention outputs. Empty `layers` or `heads` select all."""

    role: OutputRole = OutputRole.ATTENTION_WEIGHTS
    layers: Sequence[int] = ()
    heads: Sequence[int] = ()
    view: AttentionView = AttentionView.FULL
    reduction: AttentionReduction | None = None


@dataclass(frozen=True, slots=True)
class QueryPlan:
    """Validated AttentionQuery.

    Attributes:
        index: Position of the query in the request.
        role: Role of the outputs.
        outputs: One output per layer, in the requested order. All have the same number of heads, row sum and
            layout.
        heads: Heads to return or to average, from 0.
        view: Form of the result.
        reduction: Reduction of the weights, or None.
    """

    index: int
    role: OutputRole
    outputs: tuple[Output, ...]
    heads: tuple[int, ...]
    view: AttentionView
    reduction: AttentionReduction | None = None

    @property
    def layout(self) -> Layout:
        """Layout of the arrays that are returned or reduced."""
        return result_layout(self.outputs[0], self.view, is_reduced=self.reduction is not None)

    @property
    def parts(self) -> tuple[tuple[Output, ...], ...]:
        """Outputs of each part of a stream: one layer, or all layers that a reduction joins."""
        if self.reduction is not None and self.reduction.joins_layers:
            return (self.outputs,)
        return tuple((output,) for output in self.outputs)

    @property
    def num_result_heads(self) -> int:
        """Number of maps per layer of the result."""
        return 1 if self.view is AttentionView.HEAD_MEAN else len(self.heads)

    @property
    def row_sum(self) -> RowSum:
        """Row sum of the outputs."""
        return self.outputs[0].row_sum

    def num_values(self, num_tokens: int) -> int:
        """Return the number of values per layer for a text of this length."""
        if self.layout is Layout.DENSE:
            return self.num_result_heads * num_tokens**2
        return self.outputs[0].num_values(num_tokens, self.num_result_heads)

    def pattern_bytes(self, num_tokens: int) -> int:
        """Return the size of the block table per layer for a text of this length, in bytes."""
        table = self.outputs[0].pattern
        if self.layout is not Layout.BLOCKS or not isinstance(table, BlockTable):
            return 0
        return 4 * len(self.heads) * table.num_slots * -(-num_tokens // table.block_size)

    def engine_output(self, output: Output) -> RequestedOutput:
        """Return the engine's form of one of the outputs."""
        is_mean, is_dense = self.view is AttentionView.HEAD_MEAN, self.layout is Layout.DENSE
        selection = HeadSelection(self.heads, is_mean=is_mean, is_dense=is_dense)
        return RequestedOutput(output.name, output.layout, selection, output.pattern)

    def engine_reduction(self, outputs: Sequence[Output]) -> RequestedReduction | None:
        """Return the engine's form of the reduction of some outputs, or None if there is no reduction."""
        if self.reduction is None:
            return None
        is_mean = self.view is AttentionView.HEAD_MEAN
        # Words and special tokens are reduced per head, before the mean over heads.
        selection = HeadSelection(self.heads, is_mean=is_mean and not self.reduction.has_units, is_dense=True)
        layers = tuple(
            RequestedOutput(output.name, output.layout, selection, output.pattern)
            for output in sorted(outputs, key=lambda output: output.layer or 0)
        )
        return RequestedReduction(layers, self.reduction, is_mean_of_heads=is_mean)


def result_layout(output: Output, view: AttentionView, *, is_reduced: bool = False) -> Layout:
    """Return the layout in which a view of an output is returned or reduced."""
    if is_reduced and output.pattern is not None:
        return Layout.DENSE
    is_mean_of_blocks = view is AttentionView.HEAD_MEAN and output.layout is Layout.BLOCKS
    is_dense = output.pattern is not None and (view is AttentionView.DENSE or is_mean_of_blocks)
    return Layout.DENSE if is_dense else output.layout


Part = tuple[QueryPlan, tuple[Output, ...]]
"""A query and the outputs of one part of a stream: one layer, or all layers that a reduction joins."""


@dataclass(frozen=True, slots=True)
class EncodePlan:
    """Validated EncodeRequest.

    Attributes:
        prompt: Text that precedes each input.
        hidden_state: Output with the token vectors, or None if they are not requested.
        queries: Attention queries.
        data_type: Element type of the result.
    """

    prompt: str
    hidden_state: Output | None
    queries: tuple[QueryPlan, ...]
    data_type: DataType

    @property
    def kind(self) -> Kind:
        """Graph that has all outputs."""
        return "attention" if self.queries else "embeddings"

    @property
    def parts(self) -> tuple[Part, ...]:
        """Attention parts of each text in a stream, in order."""
        return tuple((query, outputs) for query in self.queries for outputs in query.parts)

    @property
    def row_selections(self) -> Mapping[int, AttentionReduction]:
        """Reductions that select rows, by the index of their query."""
        reductions = {query.index: query.reduction for query in self.queries}
        return {index: reduction for index, reduction in reductions.items() if reduction and reduction.rows}

    @property
    def needs_units(self) -> bool:
        """Whether reductions need the words and special tokens of texts."""
        return any(query.reduction is not None and query.reduction.needs_text for query in self.queries)

    def outputs(
        self, parts: Sequence[Part], *, with_hidden_state: bool = True
    ) -> tuple[RequestedOutput, ...]:
        """Return the engine outputs that are returned unreduced, the token vectors first."""
        hidden = self.hidden_state if with_hidden_state else None
        return ((RequestedOutput(hidden.name, hidden.layout),) if hidden else ()) + tuple(
            query.engine_output(output)
            for query, outputs in parts
            if query.reduction is None
            for output in outputs
        )

    def reduced_outputs(self, parts: Sequence[Part]) -> tuple[RequestedReduction, ...]:
        """Return the engine outputs that are reduced."""
        reductions = (query.engine_reduction(outputs) for query, outputs in parts)
        return tuple(reduction for reduction in reductions if reduction is not None)


@dataclass(frozen=True, slots=True)
class AttentionResult:
    """Result of one query for one text, in fp32.

    Attributes:
        query: The query.
        layers: Layer of each array.
        arrays: Arrays (K, T, T), (T, K) or, for a band or blocks, (K, T, W). K is the number of heads, 1 for
            a mean over heads.
        patterns: Pattern of each array that is a band or blocks, for the heads of the query.
    """

    query: QueryPlan
    layers: tuple[int, ...]
    arrays: tuple[FloatArray, ...]
    patterns: tuple[Pattern, ...] = ()


@dataclass(frozen=True, slots=True)
class ReducedAttention:
    """Reduced result of one query for one text.

    Attributes:
        query: The query.
        layers: Layer of each part, or all layers that are joined in the only part.
        parts: Results of the reduction.
    """

    query: QueryPlan
    layers: tuple[int, ...]
    parts: tuple[Reduced, ...]


class AttentionParts:
    """Iterator over the attention outputs of a text, in the order of the queries."""

    def __init__(self, result: ItemResult, *, has_hidden_state: bool) -> None:
        self._arrays = iter(result.arrays[1 if has_hidden_state else 0 :])
        self._reduced = iter(result.reduced)

    def take(
        self, query: QueryPlan, parts: Sequence[tuple[Output, ...]]
    ) -> AttentionResult | ReducedAttention:
        """Return the result of a query for its next parts."""
        outputs = [output for part in parts for output in part]
        if query.reduction is None:
            return attention_result(query, outputs, [next(self._arrays) for _ in outputs])
        layers = tuple(output.layer or 0 for output in outputs)
        return ReducedAttention(query, layers, tuple(next(self._reduced) for _ in parts))


def attention_result(
    query: QueryPlan, outputs: Sequence[Output], arrays: Sequence[FloatArray]
) -> AttentionResult:
    """Return the result of a query for some of its layers."""
    patterns = tuple(
        output.pattern if isinstance(output.pattern, Band) else output.pattern.of_heads(query.heads)
        for output in outputs
        if output.pattern is not None and query.layout is not Layout.DENSE
    )
    return AttentionResult(query, tuple(output.layer or 0 for output in outputs), tuple(arrays), patterns)


# --- Validation -----------------------------------------------------------------------------------


def plan_query(
    index: int, query: AttentionQuery, model: Model, violations: list[FieldViolation]
) -> QueryPlan | None:
    """Return the plan of a query with this index, or add its violations and return None."""
    field = f"attention[{index}]"
    by_layer = model.outputs.layers(query.role)
    if not by_layer:
        roles = ", ".join(_role_name(role) for role in model.outputs.roles)
        problem = f"is {_role_name(query.role)}: the model has {roles}"
        violations.append(FieldViolation(f"{field}.role", problem))
        return None
    found: list[FieldViolation] = []
    outputs = _select_layers(f"{field}.layers", query.layers, by_layer, model.num_layers, found)
    is_reduced = query.reduction is not None
    if len({_result_form(output, query.view, is_reduced=is_reduced) for output in outputs}) > 1:
        found.append(FieldViolation(f"{field}.layers", _difference(outputs, query.view)))
    num_heads = outputs[0].num_heads if outputs else max(output.num_heads for output in by_layer.values())
    heads = _select(f"{field}.heads", query.heads, num_heads, found)
    violations += found
    return None if found else QueryPlan(index, query.role, outputs, heads, query.view, query.reduction)


def _result_form(output: Output, view: AttentionView, *, is_reduced: bool) -> tuple[object, ...]:
    """Return the properties that all outputs of a query must share."""
    layout, pattern = result_layout(output, view, is_reduced=is_reduced), output.pattern
    shape: tuple[int, int] | None = None
    if pattern is not None and layout is not Layout.DENSE:
        block = pattern.window_radius if isinstance(pattern, Band) else pattern.block_size
        shape = (block, pattern.width)
    return output.num_heads, output.row_sum, layout, shape


def _difference(outputs: Sequence[Output], view: AttentionView) -> str:
    """Explain why outputs cannot be combined in one query."""
    counts = ", ".join(str(count) for count in sorted({output.num_heads for output in outputs}))
    if "," in counts:
        return f"have different numbers of heads ({counts}): request them in separate queries"
    layouts = sorted({result_layout(output, view).name for output in outputs})
    names = " and ".join(f"OUTPUT_LAYOUT_{name}" for name in layouts)
    return (
        f"have different layouts ({names}) or widths: request them in separate queries, or use "
        "ATTENTION_VIEW_DENSE"
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
    """Return the outputs of the layers, or of all layers if `numbers` is empty."""
    if not numbers:
        return tuple(by_layer[layer] for layer in sorted(by_layer))
    layers = _select(field, numbers, num_layers, violations)
    for index, layer in enumerate(layers):
        if layer not in by_layer:
            available = ", ".join(str(each) for each in sorted(by_layer))
            problem = f"is {numbers[index]}, a layer without this output: use {available}"
            violations.append(FieldViolation(f"{field}[{index}]", problem))
    return tuple(by_layer[layer] for layer in layers if layer in by_layer)


def _select(
    field: str, numbers: Sequence[int], count: int, violations: list[FieldViolation]
) -> tuple[int, ...]:
    """Resolve negative numbers. An empty list selects all."""
    if not numbers:
        return tuple(range(count))
    if len(numbers) > count:
        problem = f"has more than {count} numbers, the number in the model: list each once"
        violations.append(FieldViolation(field, problem))
        return ()
    selected: list[int] = []
    for index, number in enumerate(numbers):
        resolved = number + count if number < 0 else number
        if not 0 <= resolved < count:
            problem = f"is {number}, but the model has {count}: use 0 to {count - 1}, or -{count} to -1"
            violations.append(FieldViolation(f"{field}[{index}]", problem))
        elif resolved in selected:
            problem = f"is {number}, which is listed twice: remove it"
            violations.append(FieldViolation(f"{field}[{index}]", problem))
        else:
            selected.append(resolved)
    return tuple(selected)


def check_reduction(
    field: str, query: AttentionQuery, model: Model, inputs: Sequence[Input]
) -> Iterator[FieldViolation]:
    """Yield violations of a query's reduction, except those that depend on tokens.

    Args:
        field: Path of the query.
        query: Query, with or without a reduction.
        model: Model of the outputs.
        inputs: Inputs of the request.
    """
    reduction = query.reduction
    if reduction is None:
        return
    path = f"{field}.reduction"
    for name, problem in reduction.problems():
        yield FieldViolation(f"{path}.{name}", problem)
    if model.max_positions < len(reduction.rows) <= MAX_ROWS:
        problem = f"has {len(reduction.rows)} numbers, but texts have at most {model.max_positions} tokens"
        yield FieldViolation(f"{path}.rows", f"{problem}: send fewer")
    if query.role is OutputRole.HEAD_GATES:
        yield FieldViolation(path, "is not supported for OUTPUT_ROLE_HEAD_GATES: omit it")
        return
    if reduction.layers == "rollout" and query.view is not AttentionView.HEAD_MEAN:
        problem = f"is ATTENTION_VIEW_{query.view.name}, but rollout uses the mean over heads: omit the view"
        yield FieldViolation(f"{field}.view", problem)
    row_sums = {output.row_sum for output in model.outputs.layers(query.role).values()}
    yield from _check_row_sums(path, reduction, row_sums)
    yield from _check_text_inputs(path, reduction, inputs)


def _check_row_sums(
    path: str, reduction: AttentionReduction, row_sums: set[RowSum]
) -> Iterator[FieldViolation]:
    others = sorted(row_sums - {RowSum.ONE})
    if reduction.needs_distributions is not None and others:
        name, reason = reduction.needs_distributions
        problem = f"needs ROW_SUM_ONE, {reason}, but this output has ROW_SUM_{others[0].name}: omit it"
        yield FieldViolation(f"{path}.{name}", problem)
    others = sorted(row_sums - {RowSum.ONE, RowSum.GATE})
    if isinstance(reduction.form, SqrtUint8) and others:
        problem = (
            f"needs weights from 0 to 1, but this output has ROW_SUM_{others[0].name}: use dense weights"
        )
        yield FieldViolation(f"{path}.sqrt_uint8", problem)


def _check_text_inputs(
    path: str, reduction: AttentionReduction, inputs: Sequence[Input]
) -> Iterator[FieldViolation]:
    """Yield violations for token ids if a reduction needs words or special tokens."""
    index = next((index for index, given in enumerate(inputs) if given.token_ids is not None), None)
    if index is None:
        return
    for name, is_set, units, remedy in (
        ("level", reduction.level == "words", "words", "send text, or use tokens"),
        ("special_tokens", reduction.special_tokens == "drop", "special tokens", "send text, or keep them"),
        ("statistics.received", reduction.sums_content_rows, "special tokens", "send text, or set all_rows"),
    ):
        if is_set:
            problem = f"has no known {units}, which {path}.{name} needs: {remedy}"
            yield FieldViolation(f"inputs[{index}].token_ids", problem, index)


def check_rows(
    reductions: Mapping[int, AttentionReduction], first: int, inputs: Sequence[EncodedInput]
) -> None:
    """Check that texts have the rows that reductions select.

    Args:
        reductions: Reductions by the index of their query.
        first: Index of the first of `inputs` in the request.
        inputs: Tokenized texts, with units if a reduction needs them.

    Raises:
        InvalidFieldsError: A text is too short.
    """
    shapes = [encoded.shape for encoded in inputs] if reductions else []
    for number, reduction in reductions.items():
        for index, shape in enumerate(shapes, first):
            count = shape.num_units(reduction)
            try:
                resolve_rows(reduction.rows, count)
            except IndexError as error:
                [place] = error.args
                row = f"attention[{number}].reduction.rows[{place}] is {reduction.rows[place]}"
                remedy = f"use 0 to {count - 1}, or -{count} to -1" if count else "omit the text"
                violation = FieldViolation(
                    f"inputs[{index}]", f"has {count} rows, but {row}: {remedy}", index
                )
                raise InvalidFieldsError([violation]) from error
