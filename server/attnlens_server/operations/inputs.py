"""Inputs and prompts of requests, and their validation.

Validators collect all violations of a request before they raise. Messages follow one pattern: the problem,
the limit if there is one, and the remedy.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from attnlens_server.bundle import Model
from attnlens_server.core.loaded_model import LoadedModel
from attnlens_server.errors import MAX_MESSAGE_BYTES, FieldViolation, RequestError, shortened
from attnlens_server.text import Input, TokenIds

# Prompt names in messages, which must fit in gRPC trailers.
MAX_NAMES = 20
MAX_NAME_CHARS = 40


@dataclass(frozen=True, slots=True)
class Prompt:
    """Text that precedes each input. Exactly one of `name` and `text` is set."""

    name: str | None = None
    text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Base class of all requests."""

    model: str = ""
    model_version: str = ""
    inputs: Sequence[Input]
    prompt: Prompt | None = None
    violations: Sequence[FieldViolation] = ()
    """Violations found during parsing, such as unknown enum values, reported with those of the validation."""

    @property
    def other_inputs(self) -> Sequence[Input]:
        """Inputs in fields other than `inputs`."""
        return ()

    @property
    def size(self) -> int:
        """Number of characters and token ids, which validation and tokenization time depends on."""
        return len(self.inputs) + sum([each.size for each in (*self.inputs, *self.other_inputs)])

    @property
    def memory_bytes(self) -> int:
        """Memory of the texts (4 bytes per character if one of them is an emoji) and token ids."""
        return sum([each.memory_bytes for each in (*self.inputs, *self.other_inputs)])


def too_many_inputs(count: int, limit: int) -> FieldViolation:
    """Return the violation of a request with more texts than the limit."""
    return FieldViolation("inputs", f"has {count} texts, but the limit is {limit}: send several requests")


class InputValidator:
    """Validates the inputs and the prompt of requests to a model."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model.spec
        self._config = model.config
        self._max_tokens = model.max_tokens
        self._truncation_side = model.truncation_side
        self._has_tokenizer = model.text_encoder is not None
        self._takes_pairs = model.takes_pairs

    def validate(self, request: Request) -> tuple[str, list[FieldViolation]]:
        """Return the text of the prompt, and all violations including those of the protocol."""
        inputs, limit = request.inputs, self._config.max_inputs_per_request
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


def rename(
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
    error.violations = tuple(rename(error.violations, inputs, {}))
    problems = (f"{violation.field} {violation.description}" for violation in error.violations)
    error.message = shortened("; ".join(problems), MAX_MESSAGE_BYTES)
    error.args = (error.message,)
    return error


def check_dimensions(dimensions: int, model: Model) -> list[FieldViolation]:
    """Return the violation of a number of dimensions that the model does not have."""
    if 0 <= dimensions <= model.max_dimensions:
        return []
    problem = f"is {dimensions}: use 1 to {model.max_dimensions}, or 0 for all"
    return [FieldViolation("dimensions", problem)]
