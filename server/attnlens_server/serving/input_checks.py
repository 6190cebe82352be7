"""Checking the inputs and the prompt of a job: their number and sizes, and that the model takes them."""

from collections.abc import Iterator, Sequence

from attnlens_server.bundle import Model
from attnlens_server.config import ServerConfig
from attnlens_server.errors import FieldViolation
from attnlens_server.serving.jobs import Job, Prompt
from attnlens_server.text import Input, TokenIds

# Of prompts, in messages: a protocol may have little room for them.
MAX_NAMES = 20
MAX_NAME_CHARS = 40


class InputChecks:
    """Checks inputs against one model and one configuration."""

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

    def check(self, job: Job) -> tuple[str, list[FieldViolation]]:
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
