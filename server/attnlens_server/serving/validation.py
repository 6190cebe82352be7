"""Validation of requests against the model and the configured limits.

Validators collect all violations of a request before they raise. Messages follow one pattern: the problem,
the limit if there is one, and the remedy.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from attnlens.embedding_types import ranges_problem
from attnlens.explanations import ExplainLevel, ExplainMethod, Float64Array, PairMatrix
from attnlens.patterns import Band
from attnlens.pooling import FloatArray, Pooling
from attnlens.reductions import MAX_ROWS, AttentionReduction, SqrtUint8, resolve_rows
from attnlens.similarity import Similarity
from attnlens_server.bundle import Classifier, Kind, Layout, Model, Output, OutputRole, RowSum
from attnlens_server.config import ServerConfig
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
    EmbedPlan,
    EmbedRequest,
    EncodePlan,
    EncodeRequest,
    ExplainRequest,
    ExplanationPlan,
    ExplanationRequest,
    Label,
    LabelTarget,
    Prompt,
    QueryPlan,
    Request,
    ScoreRequest,
    TokenizeRequest,
    result_layout,
)
from attnlens_server.text import EncodedInput, Input, TokenIds

MAX_QUERIES = 16
# Prompt names in messages, which must fit in gRPC trailers.
MAX_NAMES = 20
MAX_NAME_CHARS = 40

_NO_CONTRIBUTIONS = (
    "the bundle has no contributions graph, because an earlier version of attnlens exported it, or for a "
    "reason that the export printed"
)
_UNAVAILABLE = {
    ExplainMethod.OUTPUT_SHARE: "embeddings of this model are not sums of token vectors",
    ExplainMethod.ROLLOUT: "some layers of the model have no attention weights that sum to 1",
    ExplainMethod.RECEIVED_ATTENTION: "the last layer of the model has no attention weights that sum to 1",
}


# --- Inputs ---------------------------------------------------------------------------------------


def too_many_inputs(count: int, limit: int) -> FieldViolation:
    """Return the violation of a request with more texts than the limit."""
    return FieldViolation("inputs", f"has {count} texts, but the limit is {limit}: send several requests")


class InputValidator:
    """Validates the inputs and the prompt of requests.

    Attributes:
        max_inputs: Maximum number of texts of a request.
    """

    def __init__(
        self,
        model: Model,
        config: ServerConfig,
        *,
        max_tokens: int,
        has_tokenizer: bool,
        takes_pairs: bool,
        truncation_side: str = "right",
    ) -> None:
        self._model = model
        self._config = config
        self._max_tokens = max_tokens
        self._truncation_side = truncation_side
        self._has_tokenizer = has_tokenizer
        self._takes_pairs = takes_pairs
        self.max_inputs = config.max_inputs_per_request

    def validate(self, request: Request) -> tuple[str, list[FieldViolation]]:
        """Return the text of the prompt, and all violations including those of the protocol."""
        inputs, limit = request.inputs, self.max_inputs
        prompt, violations = self._prompt(request.prompt)
        violations = [*request.violations, *violations]
        template = self._model.chat_template
        if prompt and template is not None and template.with_prompt is None:
            problem = "is not supported, because the model's chat template has no system message: omit it"
            violations.append(FieldViolation("prompt", problem))
        if not inputs:
            violations.append(FieldViolation("inputs", "is empty: send at least one text"))
        elif len(inputs) > limit:
            violations.append(too_many_inputs(len(inputs), limit))
        else:
            prompt_bytes = len(prompt.encode())
            sizes = [_size(each, prompt_bytes) for each in inputs]
            limit = self._config.request_text_limit
            if (total := sum(sizes)) > limit:
                size_with = f"{total} bytes of text{_with_prompt(prompt_bytes)}"
                problem = f"has {size_with}, but the limit is {limit}: send several requests"
                violations.append(FieldViolation("inputs", problem))
            for index, (each, size) in enumerate(zip(inputs, sizes, strict=True)):
                if each.token_ids is None:
                    if found := self._text_problem(each, size, prompt_bytes):
                        field, problem = found
                        violations.append(FieldViolation(f"inputs[{index}]{field}", problem, index))
                    continue
                field = f"inputs[{index}].token_ids"
                violations += self._check_token_ids(field, each.token_ids, index)
                if prompt and request.prompt is not None:
                    problem = "cannot be combined with a prompt: send text, or omit the prompt"
                    violations.append(FieldViolation(field, problem, index))
        return prompt, violations

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
        name = repr(prompt.name[:MAX_NAME_CHARS])
        problem = f"is {name}, but {_prompt_names(sorted(prompts))}: use another name, or send the text"
        return "", [FieldViolation("prompt.name", problem)]

    def _text_problem(self, given: Input, size: int, prompt_bytes: int) -> tuple[str, str] | None:
        """Return the field and the problem of a text or a pair. `size` includes the prompt."""
        if given.text is None and given.text_pair is None:
            return "", "is empty: set text, text_pair or token_ids"
        field, limit = ".text" if given.text_pair is None else ".text_pair", self._config.max_text_bytes
        if not self._has_tokenizer:
            return field, "is not supported, because the model has no tokenizer: send token_ids"
        if given.text_pair is not None and not self._takes_pairs:
            return field, "is not supported by this model: send text"
        if size > limit:
            size_with = f"{size} bytes{_with_prompt(prompt_bytes)}"
            return field, f"has {size_with}, but the limit is {limit}: split the text"
        return None

    def _check_token_ids(self, field: str, given: TokenIds, index: int) -> Iterator[FieldViolation]:
        ids, types = given.input_ids, given.token_type_ids
        limit = self._config.max_text_bytes  # a text has at most one token per byte
        if not ids:
            yield FieldViolation(f"{field}.input_ids", "is empty: send at least one id", index)
        elif len(ids) > limit:
            problem = f"has {len(ids)} ids, but the limit is {limit}: split the input"
            yield FieldViolation(f"{field}.input_ids", problem, index)
        else:
            yield from self._check_range(f"{field}.input_ids", ids, self._model.vocab_size, index)
        if types and len(types) != len(ids):
            problem = f"has {len(types)} values for {len(ids)} ids: send one per id, or none"
            yield FieldViolation(f"{field}.token_type_ids", problem, index)
        elif types:
            count = max(1, self._model.type_vocab_size)
            yield from self._check_range(f"{field}.token_type_ids", types, count, index)

    def _check_range(
        self, field: str, numbers: Sequence[int], count: int, index: int
    ) -> Iterator[FieldViolation]:
        # The rest is truncated, or the input is rejected.
        start = max(0, len(numbers) - self._max_tokens) if self._truncation_side == "left" else 0
        used = numbers[start : start + self._max_tokens]
        if min(used) < 0 or max(used) >= count:
            position = next(place for place, number in enumerate(used, start) if not 0 <= number < count)
            problem = f"is {numbers[position]}: use 0 to {count - 1}"
            yield FieldViolation(f"{field}[{position}]", problem, index)


def _size(given: Input, prompt_bytes: int) -> int:
    """Return the size of the texts of an input and their prompt in bytes. 0 for token ids."""
    texts = given.texts
    size = prompt_bytes if texts else 0
    return size + sum(map(num_bytes, texts))


def num_bytes(text: str) -> int:
    """Return the size of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def _with_prompt(prompt_bytes: int) -> str:
    return " with the prompt" if prompt_bytes else ""


def _prompt_names(names: Sequence[str]) -> str:
    if not names:
        return "the model has no prompts"
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    listed = ", ".join(repr(name[:MAX_NAME_CHARS]) for name in names[:MAX_NAMES])
    return f"the model's prompts are {listed}{more}"


def _rename(
    violations: Sequence[FieldViolation], inputs: Sequence[str], others: Mapping[str, str]
) -> list[FieldViolation]:
    """Replace field paths of `InputValidator` by those of the actual request.

    Args:
        violations: Violations of `inputs[NUMBER]` or of the fields in `others`.
        inputs: Path of each input.
        others: Paths of other fields, such as `{"inputs": "pairs", "prompt": "prompt_a"}`.
    """
    renamed = []
    for violation in violations:
        number = violation.input_index
        if number is not None:
            rest = violation.field.removeprefix(f"inputs[{number}]")
            renamed.append(FieldViolation(inputs[number] + rest, violation.description))
        else:
            root, dot, rest = violation.field.partition(".")
            renamed.append(replace(violation, field=others.get(root, root) + dot + rest))
    return renamed


def rename_error(error: RequestError, inputs: Sequence[str]) -> RequestError:
    """Replace `inputs[NUMBER]` in an error by the paths `inputs`, and return the error."""
    error.violations = tuple(_rename(error.violations, inputs, {}))
    problems = (f"{violation.field} {violation.description}" for violation in error.violations)
    error.message = shortened("; ".join(problems), MAX_MESSAGE_BYTES)
    error.args = (error.message,)
    return error


def _type_name(plan: EmbedPlan) -> str:
    return f"EMBEDDING_TYPE_{plan.embedding_type.name}"


def _check_dimensions(dimensions: int, model: Model) -> list[FieldViolation]:
    if 0 <= dimensions <= model.max_dimensions:
        return []
    problem = f"is {dimensions}: use 1 to {model.max_dimensions}, or 0 for all"
    return [FieldViolation("dimensions", problem)]


# --- Embed, Encode and Tokenize -------------------------------------------------------------------


class RequestValidator:
    """Validates Embed, Encode and Tokenize requests.

    Attributes:
        inputs: Validator of inputs.
    """

    def __init__(
        self,
        model: Model,
        config: ServerConfig,
        *,
        max_tokens: int,
        has_tokenizer: bool,
        takes_pairs: bool,
        truncation_side: str = "right",
    ) -> None:
        self._model = model
        self.inputs = InputValidator(
            model,
            config,
            max_tokens=max_tokens,
            has_tokenizer=has_tokenizer,
            takes_pairs=takes_pairs,
            truncation_side=truncation_side,
        )

    def embed(self, request: EmbedRequest) -> EmbedPlan:
        """Validate an Embed request.

        Raises:
            InvalidFieldsError: One or more fields are invalid.
            NotSupportedError: The model is a classifier.
        """
        model = self._model
        if model.classifier is not None:
            others = ("Score", "/rerank") if model.classifier.is_reranker else ("Classify", "/predict")
            remedy = "use {}, or {} over HTTP".format(*others)
            raise NotSupportedError(f"the model {model.name!r} has no embeddings: {remedy}")
        prompt, violations = self.inputs.validate(request)
        violations += _check_dimensions(request.dimensions, model)
        is_published = not request.dimensions and request.normalize is None
        normalize = model.normalize if request.normalize is None else request.normalize
        plan = EmbedPlan(
            prompt=prompt,
            pooling=request.pooling or model.pooling,
            normalize_first=normalize and is_published,
            dimensions=request.dimensions or model.embedding_size,
            normalize=normalize and not is_published,
            data_type=request.data_type,
            embedding_type=request.embedding_type,
        )
        ranges = self._ranges(request, plan, violations)
        if violations:
            raise InvalidFieldsError(violations)
        return plan if ranges is None else replace(plan, ranges=ranges)

    def _ranges(
        self, request: EmbedRequest, plan: EmbedPlan, violations: list[FieldViolation]
    ) -> FloatArray | None:
        """Return the ranges for the quantization, or None if it needs none."""
        measured, problem = self._model.embedding_ranges, None
        if not plan.embedding_type.needs_ranges:
            if request.ranges is not None:
                problem = (
                    f"is set, but embedding_type is {_type_name(plan)}, which does not use ranges: omit it"
                )
        elif request.ranges is not None:
            if defect := ranges_problem(request.ranges, plan.dimensions):
                problem = f"{defect}: send the minimum and maximum of each component"
        elif measured is not None and self._has_own_range(plan):
            return measured
        else:
            reason, remedy = (
                ("the bundle does not contain any", "export the model again")
                if measured is None
                else (
                    "those in the bundle only fit the model's own pooling, normalize and dimensions",
                    "omit these fields",
                )
            )
            problem = (
                f"is not set, but {_type_name(plan)} needs ranges, and {reason}: send ranges of shape "
                f"[2, {plan.dimensions}], or {remedy}"
            )
        if problem is not None and not any(each.field.startswith("ranges") for each in violations):
            violations.append(FieldViolation("ranges", problem))
        return request.ranges

    def _has_own_range(self, plan: EmbedPlan) -> bool:
        """Return whether embeddings have the range of those with default pooling, scale and dimensions."""
        model = self._model
        is_truncated = model.embedding_size < model.max_dimensions
        return (
            plan.pooling is model.pooling
            and plan.dimensions == model.embedding_size
            and (plan.normalize_first or plan.normalize) is model.normalize
            # Default embeddings are scaled to length 1 before components are removed.
            and not (plan.normalize and is_truncated)
        )

    def encode(self, request: EncodeRequest) -> EncodePlan:
        """Validate an Encode request.

        Raises:
            InvalidFieldsError: One or more fields are invalid.
        """
        prompt, violations = self.inputs.validate(request)
        if len(request.attention) > MAX_QUERIES:
            problem = f"has more than {MAX_QUERIES} queries: send several requests"
            violations.append(FieldViolation("attention", problem))
        numbered = list(enumerate(request.attention[:MAX_QUERIES]))
        queries = [self._query(index, query, violations) for index, query in numbered]
        for index, query in numbered:
            violations += check_reduction(f"attention[{index}]", query, self._model, request.inputs)
        if violations:
            raise InvalidFieldsError(violations)
        has_hidden_state = request.last_hidden_state or not queries
        kind: Kind = "attention" if queries else "embeddings"
        return EncodePlan(
            prompt=prompt,
            hidden_state=self._model.outputs.hidden_state(kind) if has_hidden_state else None,
            queries=tuple(query for query in queries if query is not None),
            data_type=request.data_type,
        )

    def tokenize(self, request: TokenizeRequest) -> str:
        """Validate a Tokenize request and return the text of the prompt.

        Raises:
            InvalidFieldsError: One or more fields are invalid.
        """
        prompt, violations = self.inputs.validate(request)
        if violations:
            raise InvalidFieldsError(violations)
        return prompt

    def _query(self, index: int, query: AttentionQuery, violations: list[FieldViolation]) -> QueryPlan | None:
        field = f"attention[{index}]"
        by_layer = self._model.outputs.layers(query.role)
        if not by_layer:
            roles = ", ".join(_role_name(role) for role in self._model.outputs.roles)
            problem = f"is {_role_name(query.role)}: the model has {roles}"
            violations.append(FieldViolation(f"{field}.role", problem))
            return None
        found: list[FieldViolation] = []
        outputs = _select_layers(f"{field}.layers", query.layers, by_layer, self._model.num_layers, found)
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


# --- Reductions of attention ----------------------------------------------------------------------


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


# --- Explain and Compare --------------------------------------------------------------------------


class ExplanationValidator:
    """Validates Explain and Compare requests.

    Attributes:
        methods: Methods that the model and the configuration support.
        matrices: Matrices that the model and the configuration support.
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
        self._is_enabled = config.explain
        self._inputs = inputs
        self._has_dense = has_dense
        self._has_contributions = has_contributions
        outputs = model.outputs.layers(OutputRole.ATTENTION_WEIGHTS)
        has_weights = [
            layer in outputs and outputs[layer].row_sum is RowSum.ONE for layer in range(model.num_layers)
        ]
        methods = {
            ExplainMethod.CONTRIBUTIONS: has_contributions,
            ExplainMethod.OUTPUT_SHARE: not has_dense,
            ExplainMethod.LEAVE_ONE_OUT: True,
            ExplainMethod.ROLLOUT: all(has_weights),
            ExplainMethod.RECEIVED_ATTENTION: has_weights[-1],
            ExplainMethod.CONTRIBUTION_NORM: has_contributions and model.classifier is None,
        }
        has_embeddings = model.classifier is None
        matrices = {
            PairMatrix.OUTPUT: has_embeddings and not has_dense,
            PairMatrix.INTERACTION: has_embeddings,
            PairMatrix.INPUT: has_embeddings and has_contributions,
        }
        self.methods = tuple(
            each for each, is_supported in methods.items() if is_supported and self._is_enabled
        )
        self.matrices = tuple(
            each for each, is_supported in matrices.items() if is_supported and self._is_enabled
        )

    def explain(self, request: ExplainRequest) -> ExplanationPlan:
        """Validate an Explain request.

        Raises:
            InvalidFieldsError: One or more fields are invalid.
            NotSupportedError: Explanations are disabled, or the model does not support a method.
        """
        self._check_enabled()
        if self._model.classifier is not None:
            return self._explain_logit(request, self._model.classifier)
        prompt, violations = self._inputs.validate(request)
        target_prompt = ""
        if request.target.label is not None:
            problem = f"is set, but {self._model.name!r} is not a classifier: omit it"
            violations.append(FieldViolation("label", problem))
        if texts := request.target.inputs:
            target = Request(inputs=tuple(texts.values()), prompt=request.target_prompt)
            target_prompt, found = self._inputs.validate(target)
            violations += _rename(found, tuple(texts), {"prompt": "target_prompt"})
        elif request.target_prompt is not None:
            problem = "is set, but the target has no text: omit it"
            violations.append(FieldViolation("target_prompt", problem))
        violations += self._check_common(request)
        direction = None
        if request.target.direction is not None:
            direction = np.asarray(request.target.direction, dtype=np.float64)
            violations += _check_direction(direction, request.dimensions or self._model.embedding_size)
        if violations:
            raise InvalidFieldsError(violations)
        return self._plan(request, prompt, target_prompt, direction=direction)

    def _explain_logit(self, request: ExplainRequest, classifier: Classifier) -> ExplanationPlan:
        """Validate an Explain request for a classifier.

        Raises:
            InvalidFieldsError, NotSupportedError: See `explain`.
        """
        prompt, violations = self._inputs.validate(request)
        target = request.target
        not_of_classifiers = {
            "pooling": request.pooling is not None,
            "dimensions": bool(request.dimensions),
            "own_embedding": target.own_embedding,
            "direction": target.direction is not None,
            "to": target.to is not None,
            "contrast": target.contrast is not None,
            "target_prompt": request.target_prompt is not None,
        }
        problem = f"is set, but {self._model.name!r} is a classifier without embeddings: omit it"
        misplaced = [FieldViolation(field, problem) for field, is_set in not_of_classifiers.items() if is_set]
        violations += [*misplaced, *self._check_common(request)]
        direction, found = _label_direction(target.label or LabelTarget(), classifier)
        if target.label or not misplaced:
            violations += found
        if violations:
            raise InvalidFieldsError(violations)
        return self._plan(request, prompt, "", direction=direction)

    def score(self, request: ScoreRequest, prompt: str) -> ExplanationPlan | None:
        """Return the plan of the explanations that a Score request asks for, or None.

        Args:
            request: Request to a reranker.
            prompt: Text of its prompt.

        Raises:
            NotSupportedError: Explanations are disabled, or the bundle has no contributions graph.
        """
        if request.explanation_level is None:
            return None
        self._check_enabled()
        explained = ExplainRequest(inputs=request.inputs, level=request.explanation_level)
        return self._plan(explained, prompt, "", direction=np.ones(1))

    def compare(self, request: CompareRequest) -> ExplanationPlan:
        """Validate a Compare request.

        Raises:
            InvalidFieldsError: One or more fields are invalid.
            NotSupportedError: Explanations are disabled, or the model does not support a method or the
                matrix.
        """
        self._check_enabled()
        if self._model.classifier is not None:
            raise NotSupportedError(
                f"the model {self._model.name!r} is a classifier, and Compare needs embeddings: use Explain "
                "with a pair of texts"
            )
        violations: list[FieldViolation] = []
        prompts = []
        first = Request(inputs=request.inputs, prompt=request.prompt, violations=request.violations)
        second = Request(inputs=request.second_inputs, prompt=request.prompt_b)
        for side, texts in (("a", first), ("b", second)):
            prompt, found = self._inputs.validate(texts)
            paths = [f"pairs[{number}].{side}" for number in range(len(texts.inputs))]
            violations += _rename(found, paths, {"inputs": "pairs", "prompt": f"prompt_{side}"})
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
            problem = f"PAIR_MATRIX_{matrix.name} is not supported: {_NO_CONTRIBUTIONS}"
            raise NotSupportedError(f"{problem}: export the model again")
        # Embeddings of length 1 have equal dot products and cosines.
        is_dot = self._model.similarity is Similarity.DOT and not self._model.normalize
        return replace(self._plan(request, *prompts, matrix=matrix), is_dot=is_dot)

    def _plan(
        self,
        request: ExplanationRequest,
        prompt: str,
        other_prompt: str,
        *,
        direction: Float64Array | None = None,
        matrix: PairMatrix | None = None,
    ) -> ExplanationPlan:
        methods = tuple(request.methods) or (ExplainMethod.CONTRIBUTIONS,)
        is_logit = self._model.classifier is not None
        for method in methods:
            if method not in self.methods:
                raise NotSupportedError(f"{_name(method)} is not supported: {self._unavailability(method)}")
        return ExplanationPlan(
            prompt=prompt,
            other_prompt=other_prompt,
            truncate=request.truncate,
            pooling=request.pooling or self._model.pooling,
            dimensions=self._model.max_dimensions
            if is_logit
            else request.dimensions or self._model.embedding_size,
            methods=methods,
            level=request.level,
            head_contributions=request.head_contributions,
            direction=direction,
            matrix=matrix,
            is_logit=is_logit,
        )

    def _check_enabled(self) -> None:
        if not self._is_enabled:
            raise NotSupportedError("explanations are disabled: start the server without --no-explain")

    def _unavailability(self, method: ExplainMethod) -> str:
        """Return the reason why a method is not supported, and the remedy."""
        usable = ", ".join(_name(each) for each in self.methods)
        if method is ExplainMethod.CONTRIBUTION_NORM and self._model.classifier is not None:
            return f"it scores parts of embeddings, which classifiers lack: use {usable}"
        if method in (ExplainMethod.CONTRIBUTIONS, ExplainMethod.CONTRIBUTION_NORM):
            return f"{_NO_CONTRIBUTIONS}: export the model again, or use {usable}"
        return f"{_UNAVAILABLE[method]}: use {usable}"

    def _check_common(self, request: ExplanationRequest) -> Iterator[FieldViolation]:
        if self._model.classifier is None:
            yield from _check_dimensions(request.dimensions, self._model)
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
        if self._model.classifier is not None:
            return "logits are not sums of token vectors"
        if self._has_dense:
            return "embeddings of models with dense layers are not sums of token vectors"
        if (request.pooling or self._model.pooling) is Pooling.MAX:
            return "the maximum is not a sum of token vectors"
        return ""


def _label_direction(
    target: LabelTarget, classifier: Classifier
) -> tuple[Float64Array, list[FieldViolation]]:
    """Return the factors of the logits (C,) in a target, and violations."""
    given = {"label": target.label or (Label(index=0) if classifier.is_reranker else Label())}
    if target.rather_than is not None:
        given["rather_than"] = target.rather_than
    direction, violations = np.zeros(len(classifier.labels)), []
    for (field, label), factor in zip(given.items(), (1.0, -1.0), strict=False):
        index = _label_index(label, classifier.labels)
        if isinstance(index, str):
            violations.append(FieldViolation(f"label.{field}", index))
        elif direction[index]:
            problem = f"is {classifier.labels[index]!r}, as label.label: use another label, or omit it"
            violations.append(FieldViolation(f"label.{field}", problem))
        else:
            direction[index] = factor
    return direction, violations


def _label_index(label: Label, labels: Sequence[str]) -> int | str:
    """Return the index of a label, or what is wrong."""
    if label.index is not None:
        if 0 <= label.index < len(labels):
            return label.index
        return f"is {label.index}: use 0 to {len(labels) - 1}"
    known = ", ".join(map(repr, labels[:MAX_NAMES]))
    known += f" and {len(labels) - MAX_NAMES} more" if len(labels) > MAX_NAMES else ""
    if label.name is None:
        return f"is not set: use one of {known}"
    name = repr(label.name[:MAX_NAME_CHARS])
    match labels.count(label.name):
        case 0:
            return f"is {name}: use one of {known}"
        case 1:
            return labels.index(label.name)
        case count:
            return f"is {name}, the name of {count} labels: use its index"


def _name(method: ExplainMethod) -> str:
    return f"EXPLAIN_METHOD_{method.name}"


def _check_direction(direction: Float64Array, dimensions: int) -> Iterator[FieldViolation]:
    if direction.shape != (dimensions,):
        problem = f"has the shape {list(direction.shape)}: use [{dimensions}], the shape of the embedding"
    elif not np.isfinite(direction).all():
        problem = "contains NaN or infinity: send finite numbers"
    elif not direction.any():
        problem = "is zero: send a nonzero vector"
    else:
        return
    yield FieldViolation("direction", problem)
