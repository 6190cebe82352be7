"""Request validation."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from attnlens.explanations import ExplainLevel, ExplainMethod, Float64Array, PairMatrix
from attnlens.patterns import Band, BlockTable, Pattern
from attnlens.pooling import Pooling
from attnlens.reductions import MAX_ROWS, AttentionReduction, SqrtUint8, TextUnits, resolve_rows
from attnlens_server.bundle import Kind, Layout, Model, Output, OutputRole, RowSum
from attnlens_server.config import ServerConfig
from attnlens_server.engine import HeadSelection, Wanted, WantedReduction
from attnlens_server.errors import (
    MAX_MESSAGE_BYTES,
    FieldViolation,
    InvalidFieldsError,
    NotSupportedError,
    RequestError,
    shortened,
)
from attnlens_server.serving.requests import (
    AttentionQuery,
    AttentionView,
    CompareRequest,
    DataType,
    EmbedRequest,
    EncodeRequest,
    ExplainRequest,
    ExplanationRequest,
    Prompt,
    Request,
    TokenizeRequest,
)
from attnlens_server.text import EncodedInput, Input, TokenIds

# Of prompts, in messages: a protocol may have little room for them.
MAX_NAMES = 20
MAX_NAME_CHARS = 40


class InputValidator:
    """RequestValidator inputs against one model and one configuration."""

    def __init__(
        self,
        model: Model,
        config: ServerConfig,
        *,
        max_tokens: int,
        has_tokenizer: bool,
        takes_pairs: bool,
    ) -> None:
        self._model = model
        self._config = config
        self._max_tokens = max_tokens
        self._has_tokenizer = has_tokenizer
        self._takes_pairs = takes_pairs

    def check(self, job: Request) -> tuple[str, list[FieldViolation]]:
        """Return what goes before each text, and what is wrong."""
        inputs, limit = job.inputs, self._config.max_inputs_per_request
        text, found = self._prompt(job.prompt)
        violations = [*job.violations, *found]
        if not inputs:
            violations.append(FieldViolation("inputs", "is empty: send at least one text"))
        elif len(inputs) > limit:
            what = f"has {len(inputs)} texts, a request may have {limit}: send several requests"
            violations.append(FieldViolation("inputs", what))
        else:
            prompt_bytes = len(text.encode())
            violations += self._check_total(inputs, prompt_bytes)
            for index, given in enumerate(inputs):
                violations += self._check(index, given, prompt_bytes)
                if given.token_ids is not None and text and job.prompt is not None:
                    what = "can't have a prompt, ids are used as they are: send text, or no prompt"
                    violations.append(FieldViolation(f"inputs[{index}].token_ids", what, index))
        return text, violations

    def _prompt(self, prompt: Prompt | None) -> tuple[str, list[FieldViolation]]:
        prompts = self._model.prompts
        if prompt is None:
            return prompts.get(self._model.default_prompt_name, ""), []
        if prompt.text is not None:
            return prompt.text, []
        if prompt.name is None:
            return "", [FieldViolation("prompt", "is empty: set name or text")]
        if prompt.name in prompts:
            return prompts[prompt.name], []
        shown = repr(prompt.name[:MAX_NAME_CHARS])
        text = f"is {shown}: {_known_names(sorted(prompts))}; its text can be sent instead"
        return "", [FieldViolation("prompt.name", text)]

    def _check_total(self, inputs: Sequence[Input], prompt_bytes: int) -> Iterator[FieldViolation]:
        limit = self._config.request_text_limit
        texts = [given.texts for given in inputs if given.texts]
        size = sum(_num_bytes(given) for given in texts) + len(texts) * prompt_bytes
        if size > limit:
            what = f"{size} bytes of text{_with_prompt(prompt_bytes)}"
            yield FieldViolation("inputs", f"has {what}, a request may have {limit}: send several requests")

    def _check(self, index: int, given: Input, prompt_bytes: int) -> Iterator[FieldViolation]:
        field = f"inputs[{index}]"
        if given.token_ids is not None:
            yield from self._check_ids(f"{field}.token_ids", given.token_ids, index)
        elif given.text_pair is not None:
            yield from self._check_texts(f"{field}.text_pair", given, prompt_bytes, index)
        elif given.text is not None:
            yield from self._check_texts(f"{field}.text", given, prompt_bytes, index)
        else:
            yield FieldViolation(field, "is empty: set text, text_pair or token_ids", index)

    def _check_texts(
        self, field: str, given: Input, prompt_bytes: int, index: int
    ) -> Iterator[FieldViolation]:
        limit = self._config.max_text_bytes
        if not self._has_tokenizer:
            text = "can't be used: this model has no tokenizer, send token_ids"
            yield FieldViolation(field, text, index)
        elif given.text_pair is not None and not self._takes_pairs:
            text = "can't be used: the model takes no pairs of texts, send text"
            yield FieldViolation(field, text, index)
        elif (size := prompt_bytes + _num_bytes(given.texts)) > limit:
            what = f"{size} bytes{_with_prompt(prompt_bytes)}"
            yield FieldViolation(field, f"has {what}, a text may have {limit}: send it in pieces", index)

    def _check_ids(self, field: str, given: TokenIds, index: int) -> Iterator[FieldViolation]:
        limit = self._config.max_text_bytes  # no text has more tokens than bytes
        if not given.input_ids:
            yield FieldViolation(f"{field}.input_ids", "is empty: send at least one id", index)
        elif len(given.input_ids) > limit:
            text = f"has {len(given.input_ids)} ids, an input may have {limit}: send it in pieces"
            yield FieldViolation(f"{field}.input_ids", text, index)
        else:
            yield from self._check_numbers(
                f"{field}.input_ids", given.input_ids, self._model.vocab_size, "an id", index
            )
        if given.token_type_ids and len(given.token_type_ids) != len(given.input_ids):
            counts = f"{len(given.token_type_ids)} numbers for {len(given.input_ids)} ids"
            text = f"has {counts}: send one for each id, or none"
            yield FieldViolation(f"{field}.token_type_ids", text, index)
        elif given.token_type_ids:
            count = max(1, self._model.type_vocab_size)
            yield from self._check_numbers(
                f"{field}.token_type_ids", given.token_type_ids, count, "a type", index
            )

    def _check_numbers(
        self, field: str, numbers: Sequence[int], count: int, name: str, index: int
    ) -> Iterator[FieldViolation]:
        used = numbers[: self._max_tokens]  # what is longer is refused or cut
        if min(used) < 0 or max(used) >= count:
            position = next(place for place, number in enumerate(used) if not 0 <= number < count)
            text = f"is {numbers[position]}: {name} must be from 0 to {count - 1}"
            yield FieldViolation(f"{field}[{position}]", text, index)


def _num_bytes(texts: Sequence[str]) -> int:
    return sum(len(text) if text.isascii() else len(text.encode()) for text in texts)


def _with_prompt(prompt_bytes: int) -> str:
    return " with the prompt" if prompt_bytes else ""


def _known_names(names: Sequence[str]) -> str:
    if not names:
        return "the model has no prompts"
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    shown = ", ".join(repr(name[:MAX_NAME_CHARS]) for name in names[:MAX_NAMES])
    return f"the model's prompts are {shown}{more}"


def reduction_problems(
    field: str, query: AttentionQuery, model: Model, inputs: Sequence[Input]
) -> Iterator[FieldViolation]:
    """Yield what is wrong with the reduction of a query, whatever tokens the texts have.

    Args:
        field: the path of the query.
        query: with or without a reduction.
        model: whose outputs it is of.
        inputs: of the job.
    """
    reduction = query.reduction
    if reduction is None:
        return
    path = f"{field}.reduction"
    for name, text in reduction.problems():
        yield FieldViolation(f"{path}.{name}", text)
    if model.max_positions < len(reduction.rows) <= MAX_ROWS:
        text = f"has {len(reduction.rows)} numbers: no text has more than {model.max_positions} tokens"
        yield FieldViolation(f"{path}.rows", text)
    if query.role is OutputRole.HEAD_GATES:
        text = "is of weights between tokens, and OUTPUT_ROLE_HEAD_GATES has none: leave it out"
        yield FieldViolation(path, text)
        return
    if reduction.layers == "rollout" and query.view is not AttentionView.HEAD_MEAN:
        text = f"is ATTENTION_VIEW_{query.view.name}: a rollout is of the mean over heads, leave the view out"
        yield FieldViolation(f"{field}.view", text)
    yield from _of_sums(
        path, reduction, {output.row_sum for output in model.outputs.layers(query.role).values()}
    )
    yield from _of_inputs(path, reduction, inputs)


def _of_sums(path: str, reduction: AttentionReduction, sums: set[RowSum]) -> Iterator[FieldViolation]:
    """Compare what a reduction needs with what rows sum to."""
    needs = reduction.needs_distributions
    others = sorted(sums - {RowSum.ONE})
    if needs is not None and others:
        name, reason = needs
        text = f"needs ROW_SUM_ONE, {reason}: this output has ROW_SUM_{others[0].name}, leave it out"
        yield FieldViolation(f"{path}.{name}", text)
    others = sorted(sums - {RowSum.ONE, RowSum.GATE})
    if isinstance(reduction.form, SqrtUint8) and others:
        text = f"needs weights from 0 to 1: this output has ROW_SUM_{others[0].name}, ask for dense weights"
        yield FieldViolation(f"{path}.sqrt_uint8", text)


def _of_inputs(path: str, reduction: AttentionReduction, inputs: Sequence[Input]) -> Iterator[FieldViolation]:
    """Refuse ids where words or special tokens must be known."""
    by_ids = next((index for index, given in enumerate(inputs) if given.token_ids is not None), None)
    if by_ids is None:
        return
    for name, is_asked, what, remedy in (
        ("level", reduction.level == "words", "words", "send text, or ask for tokens"),
        ("special_tokens", reduction.special_tokens == "drop", "special tokens", "send text, or keep them"),
        ("statistics.received", reduction.sums_content_rows, "special tokens", "send text, or set all_rows"),
    ):
        if is_asked:
            text = f"has {what} that are not known, and {path}.{name} needs them: {remedy}"
            yield FieldViolation(f"inputs[{by_ids}].token_ids", text, by_ids)


def check_rows(
    reductions: Mapping[int, AttentionReduction], first: int, inputs: Sequence[EncodedInput]
) -> None:
    """Make sure that texts have the rows that are asked for.

    Args:
        reductions: what is asked for, by the number of the query.
        first: the number of the first of `inputs` in the job.
        inputs: texts as tokens, with units where a query needs them.

    Raises:
        InvalidFieldsError: a text has not.
    """
    for number, reduction in reductions.items():
        for index, encoded in enumerate(inputs, first):
            try:
                resolve_rows(reduction.rows, encoded.num_units(reduction))
            except IndexError as error:
                [place] = error.args
                raise InvalidFieldsError([_missing_row(number, reduction, place, index, encoded)]) from error


def _missing_row(
    number: int, reduction: AttentionReduction, place: int, index: int, encoded: EncodedInput
) -> FieldViolation:
    asked = f"attention[{number}].reduction.rows[{place}] is {reduction.rows[place]}"
    count = encoded.num_units(reduction)
    there = f"use 0 to {count - 1}, or -{count} to -1" if count else "leave it out"
    return FieldViolation(f"inputs[{index}]", f"has {count} rows, and {asked}: {there}", index)


def rename(
    violations: Iterable[FieldViolation], inputs: Sequence[str], others: dict[str, str]
) -> list[FieldViolation]:
    """Return violations whose field begins with a field of a request.

    Args:
        violations: their fields begin with `inputs[NUMBER]`, or are among `others`.
        inputs: what each input is called in the request.
        others: the same for other fields: `{"inputs": "pairs", "prompt": "prompt_a"}`.
    """
    return [_rename(violation, inputs, others) for violation in violations]


def _rename(violation: FieldViolation, inputs: Sequence[str], others: dict[str, str]) -> FieldViolation:
    number = violation.input_index
    if number is not None:
        rest = violation.field.removeprefix(f"inputs[{number}]")
        return FieldViolation(inputs[number] + rest, violation.description)
    root, dot, rest = violation.field.partition(".")
    return replace(violation, field=others.get(root, root) + dot + rest)


def rename_error(error: RequestError, inputs: Sequence[str]) -> RequestError:
    """Put the names of a request's fields into an error about its inputs, and return it."""
    error.violations = tuple(rename(error.violations, inputs, {}))
    told = (f"{violation.field} {violation.description}" for violation in error.violations)
    error.message = shortened("; ".join(told), MAX_MESSAGE_BYTES)
    error.args = (error.message,)
    return error


MAX_QUERIES = 16


@dataclass(frozen=True, slots=True)
class EmbedPlan:
    """A checked EmbedRequest.

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
    """A checked EncodeRequest.

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

    def outputs(self, parts: Sequence[Part], *, with_hidden_state: bool = True) -> tuple[Wanted, ...]:
        """Return what the engine is asked for as it is: the token vectors first."""
        hidden = self.hidden_state if with_hidden_state else None
        return ((Wanted(hidden.name, hidden.layout),) if hidden else ()) + tuple(
            query.wanted(output) for query, outputs in parts if query.reduction is None for output in outputs
        )

    def reduced_outputs(self, parts: Sequence[Part], units: TextUnits | None) -> tuple[WantedReduction, ...]:
        """Return what the engine is asked for reduced, of a text with these units."""
        wanted = (query.wanted_reduction(outputs, units) for query, outputs in parts)
        return tuple(reduction for reduction in wanted if reduction is not None)


class RequestValidator:
    """RequestValidator jobs against one model and one configuration."""

    def __init__(
        self, model: Model, config: ServerConfig, *, max_tokens: int, has_tokenizer: bool, takes_pairs: bool
    ) -> None:
        self._model = model
        self.inputs = self._inputs = InputValidator(
            model, config, max_tokens=max_tokens, has_tokenizer=has_tokenizer, takes_pairs=takes_pairs
        )

    def embed(self, job: EmbedRequest) -> EmbedPlan:
        """Check a job and fill in the model's defaults.

        Raises:
            InvalidFieldsError: One or more fields are invalid.
        """
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

    def encode(self, job: EncodeRequest) -> EncodePlan:
        """Check a job.

        Raises:
            InvalidFieldsError: One or more fields are invalid.
        """
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

    def tokenize(self, job: TokenizeRequest) -> str:
        """Check a job and return the prompt.

        Raises:
            InvalidFieldsError: One or more fields are invalid.
        """
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


class ExplanationValidator:
    """RequestValidator jobs against one model and one configuration.

    Attributes:
        methods: those that can be asked for.
        matrices: those that can be asked for.
    """

    def __init__(
        self,
        model: Model,
        config: ServerConfig,
        inputs: InputValidator,
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

    def explain(self, job: ExplainRequest) -> ExplanationPlan:
        """Check a job.

        Raises:
            InvalidFieldsError, NotSupportedError.
        """
        self._check_on()
        prompt, violations = self._inputs.check(job)
        other_prompt = ""
        if texts := job.target.inputs:
            asked = Request(inputs=tuple(texts.values()), prompt=job.target_prompt)
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

    def compare(self, job: CompareRequest) -> ExplanationPlan:
        """Check a job.

        Raises:
            InvalidFieldsError, NotSupportedError.
        """
        self._check_on()
        violations: list[FieldViolation] = []
        prompts = []
        sides = (("a", job.inputs, job.prompt), ("b", job.second_inputs, job.prompt_b))
        for side, inputs, prompt in sides:
            own = job.violations if side == "a" else ()
            text, found = self._inputs.check(Request(inputs=inputs, prompt=prompt, violations=own))
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
        job: ExplanationRequest,
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

    def _check_common(self, job: ExplanationRequest) -> list[FieldViolation]:
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
        has_ids = any(given.token_ids is not None for given in (*job.inputs, *job.other_inputs))
        if job.level is ExplainLevel.WORDS and has_ids:
            text = (
                "is EXPLAIN_LEVEL_WORDS, and inputs given as ids have no words: send text, or ask for tokens"
            )
            violations.append(FieldViolation("level", text))
        return violations

    def _why_not_linear(self, job: ExplanationRequest) -> str:
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
