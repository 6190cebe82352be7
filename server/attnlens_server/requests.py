"""From messages to checked, plain requests. Everything that is wrong with one is told at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from attnlens.bundle import embedding_size, max_dimensions
from attnlens.tensors import numpy_dtype
from attnlens.v1.encoder_service_pb2 import (
    EmbedRequest,
    EncodeOutput,
    EncodeRequest,
    HeadReduction,
    Input,
    TokenizeRequest,
)
from attnlens.v1.manifest_pb2 import Manifest, Pooling
from attnlens.v1.tensor_pb2 import DataType
from attnlens_server.config import ServerConfig
from attnlens_server.engine import AttentionSelection
from attnlens_server.errors import (
    MAX_VIOLATIONS,
    FieldViolation,
    InvalidFieldsError,
    ModelNotFoundError,
)

# Of prompts, in messages: all trailers together should stay below 8 KiB.
MAX_NAMES = 20
MAX_NAME_CHARS = 40
MAX_OUTPUTS = 16  # of one request, known ones and others


@dataclass(frozen=True, slots=True)
class EmbedPlan:
    """A checked EmbedRequest, the model's defaults filled in.

    Attributes:
        pooling: never unspecified.
        normalize_first: scale to length 1 before components are cut off, as the publisher does.
        dimensions: how many components are kept.
        normalize: scale to length 1 at the end.
        data_type: never unspecified.
        prompt: goes before each text.
    """

    pooling: Pooling.ValueType
    normalize_first: bool
    dimensions: int
    normalize: bool
    data_type: DataType.ValueType
    prompt: str


@dataclass(frozen=True, slots=True)
class EncodePlan:
    """A checked EncodeRequest: layer and head numbers from 0, at least one of the two outputs.

    Attributes:
        hidden_state: return the token vectors.
        layers: the layers whose attention to return; empty where attention is not asked for.
        heads: the heads to return or to average.
        head_reduction: never unspecified.
        data_type: never unspecified.
        data_type_field: what the request calls it.
    """

    hidden_state: bool
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    head_reduction: HeadReduction.ValueType
    data_type: DataType.ValueType
    data_type_field: str

    def output_names(self, layers: Sequence[int], *, with_hidden_state: bool = True) -> tuple[str, ...]:
        """Return the graph outputs that are needed for some of the layers."""
        hidden = ("last_hidden_state",) if self.hidden_state and with_hidden_state else ()
        return hidden + tuple(f"attentions.{layer}" for layer in layers)

    @property
    def attention_selection(self) -> AttentionSelection:
        """What is needed of each layer's attention."""
        return AttentionSelection(
            self.heads, is_mean=self.head_reduction == HeadReduction.HEAD_REDUCTION_MEAN
        )

    @property
    def num_head_maps(self) -> int:
        """The length of the head axis of the reply."""
        return 1 if self.attention_selection.is_mean else len(self.heads)

    def hidden_bytes(self, num_tokens: int, hidden_size: int) -> int:
        """The size of the token vectors of a text."""
        return num_tokens * hidden_size * numpy_dtype(self.data_type).itemsize if self.hidden_state else 0

    def layer_bytes(self, num_tokens: int) -> int:
        """The size of the attention weights of a text in one layer."""
        return self.num_head_maps * num_tokens**2 * numpy_dtype(self.data_type).itemsize


class RequestChecker:
    """Checks requests against one model and one configuration."""

    def __init__(
        self, manifest: Manifest, config: ServerConfig, *, max_tokens: int, has_tokenizer: bool
    ) -> None:
        self._manifest = manifest
        self._max_tokens = max_tokens
        self._config = config
        self._has_tokenizer = has_tokenizer

    def check_model(self, model: str) -> None:
        """Make sure that the model is the one that is here.

        Raises:
            ModelNotFoundError: it is another.
        """
        if model not in ("", self._manifest.model_name):
            raise ModelNotFoundError(model, self._manifest.model_name)

    def check_embed(self, request: EmbedRequest) -> EmbedPlan:
        """Check a request and fill in the model's defaults.

        Raises:
            ModelNotFoundError, InvalidFieldsError.
        """
        self.check_model(request.model)
        width = max_dimensions(self._manifest)
        violations: list[FieldViolation] = []
        prompt = self._prompt(request, violations)
        violations += self._check_inputs(request.inputs, prompt_bytes=len(prompt.encode()))
        if prompt and request.HasField("prompt_choice"):
            violations += _check_no_ids(request.inputs)
        violations += _check_enum("pooling", request.pooling, Pooling)
        violations += _check_data_type(request.data_type)
        if not 0 <= request.dimensions <= width:
            text = f"is {request.dimensions}: it must be from 1 to {width}, or 0 for all"
            violations.append(FieldViolation("dimensions", text))
        if violations:
            raise InvalidFieldsError(violations)
        defaults = self._manifest.pooling
        is_published = not request.dimensions and not request.HasField("normalize")
        normalize = request.normalize if request.HasField("normalize") else defaults.normalize
        return EmbedPlan(
            pooling=request.pooling or defaults.pooling,
            normalize_first=normalize and is_published,
            dimensions=request.dimensions or embedding_size(self._manifest),
            normalize=normalize and not is_published,
            data_type=request.data_type or DataType.DATA_TYPE_FLOAT32,
            prompt=prompt,
        )

    def check_encode(self, request: EncodeRequest, prefix: str = "") -> EncodePlan:
        """Check a request; `prefix` stands before the names of its fields.

        Raises:
            ModelNotFoundError, InvalidFieldsError.
        """
        self.check_model(request.model)
        architecture = self._manifest.architecture
        wants_attention = EncodeOutput.ENCODE_OUTPUT_ATTENTIONS in request.outputs[:MAX_OUTPUTS]
        violations = list(self._check_inputs(request.inputs, prefix))
        violations += _check_outputs(request, prefix, wants_attention=wants_attention)
        violations += _check_enum(f"{prefix}head_reduction", request.head_reduction, HeadReduction)
        violations += _check_data_type(request.data_type, prefix)
        layers = _select(f"{prefix}layers", request.layers, architecture.num_layers, violations)
        heads = _select(f"{prefix}heads", request.heads, architecture.num_heads, violations)
        if violations:
            raise InvalidFieldsError(violations)
        hidden = EncodeOutput.ENCODE_OUTPUT_LAST_HIDDEN_STATE
        return EncodePlan(
            hidden_state=not request.outputs or hidden in request.outputs[:MAX_OUTPUTS],
            layers=layers if wants_attention else (),
            heads=heads,
            head_reduction=request.head_reduction or HeadReduction.HEAD_REDUCTION_NONE,
            data_type=request.data_type or DataType.DATA_TYPE_FLOAT32,
            data_type_field=f"{prefix}data_type",
        )

    def check_tokenize(self, request: TokenizeRequest) -> None:
        """Check a request.

        Raises:
            ModelNotFoundError, InvalidFieldsError.
        """
        self.check_model(request.model)
        violations = list(self._check_count("texts", len(request.texts)))
        if not violations:
            violations += self._check_total("texts", request.texts)
            for index, text in enumerate(request.texts):
                violations += self._check_text(f"texts[{index}]", text)
        if violations:
            raise InvalidFieldsError(violations)

    def _prompt(self, request: EmbedRequest, violations: list[FieldViolation]) -> str:
        """Return what goes before each text. A name that is none goes to `violations`."""
        prompts = self._manifest.prompts
        if request.HasField("prompt"):
            return request.prompt
        if request.HasField("prompt_name") and request.prompt_name not in prompts:
            shown = repr(request.prompt_name[:MAX_NAME_CHARS])
            text = f"is {shown}: {_known_names(sorted(prompts))}, or send the text of a prompt as prompt"
            violations.append(FieldViolation("prompt_name", text))
        if request.HasField("prompt_name"):
            return prompts.get(request.prompt_name, "")
        return prompts.get(self._manifest.default_prompt_name, "")

    def _check_inputs(
        self, inputs: Sequence[Input], prefix: str = "", prompt_bytes: int = 0
    ) -> Iterator[FieldViolation]:
        too_many = list(self._check_count(f"{prefix}inputs", len(inputs)))
        if too_many:
            yield from too_many
            return
        texts = [each.text for each in inputs if each.HasField("text")]
        yield from self._check_total(f"{prefix}inputs", texts, prompt_bytes)
        for index, each in enumerate(inputs):
            field = f"{prefix}inputs[{index}]"
            kind = each.WhichOneof("content")
            if kind is None:
                yield FieldViolation(field, "is empty: set text or token_ids")
            elif kind == "text":
                yield from self._check_text(f"{field}.text", each.text, prompt_bytes)
            else:
                yield from self._check_ids(f"{field}.token_ids.ids", each.token_ids.ids)

    def _check_count(self, field: str, count: int) -> Iterator[FieldViolation]:
        limit = self._config.inputs_limit
        if count == 0:
            yield FieldViolation(field, "is empty: send at least one text")
        elif count > limit:
            yield FieldViolation(
                field, f"has {count} texts, a request may have {limit}: send several requests"
            )

    def _check_total(
        self, field: str, texts: Sequence[str], prompt_bytes: int = 0
    ) -> Iterator[FieldViolation]:
        limit = self._config.request_text_limit
        size = sum(len(text.encode()) for text in texts) + len(texts) * prompt_bytes
        if size > limit:
            what = f"{size} bytes of text{_with_prompt(prompt_bytes)}"
            yield FieldViolation(field, f"has {what}, a request may have {limit}: send several requests")

    def _check_text(self, field: str, text: str, prompt_bytes: int = 0) -> Iterator[FieldViolation]:
        limit = self._config.max_text_bytes
        if not self._has_tokenizer:
            yield FieldViolation(field, "can't be used: this model has no tokenizer, send token_ids")
        elif (size := prompt_bytes + len(text.encode())) > limit:
            what = f"{size} bytes{_with_prompt(prompt_bytes)}"
            yield FieldViolation(field, f"has {what}, a text may have {limit}: send it in pieces")

    def _check_ids(self, field: str, ids: Sequence[int]) -> Iterator[FieldViolation]:
        vocab_size = self._manifest.architecture.vocab_size
        limit = self._config.max_text_bytes  # no text has more tokens than bytes
        if not ids:
            yield FieldViolation(field, "is empty: send at least one id")
        elif len(ids) > limit:
            yield FieldViolation(field, f"has {len(ids)} ids, an input may have {limit}: send it in pieces")
        else:
            used = ids[: self._max_tokens]  # what is longer is refused or cut
            if min(used) < 0 or max(used) >= vocab_size:
                position = next(index for index, each in enumerate(used) if not 0 <= each < vocab_size)
                text = f"is {ids[position]}: an id must be from 0 to {vocab_size - 1}"
                yield FieldViolation(f"{field}[{position}]", text)


def _check_no_ids(inputs: Sequence[Input]) -> Iterator[FieldViolation]:
    for index, each in enumerate(inputs):
        if each.HasField("token_ids"):
            text = "can't have a prompt, ids are used as they are: send text, or no prompt"
            yield FieldViolation(f"inputs[{index}].token_ids", text)


def _with_prompt(prompt_bytes: int) -> str:
    return " with the prompt" if prompt_bytes else ""


def _known_names(names: Sequence[str]) -> str:
    if not names:
        return "the model has no prompts"
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    shown = ", ".join(repr(name[:MAX_NAME_CHARS]) for name in names[:MAX_NAMES])
    return f"the model's prompts are {shown}{more}"


def _check_outputs(request: EncodeRequest, prefix: str, *, wants_attention: bool) -> Iterator[FieldViolation]:
    known = (EncodeOutput.ENCODE_OUTPUT_LAST_HIDDEN_STATE, EncodeOutput.ENCODE_OUTPUT_ATTENTIONS)
    if len(request.outputs) > MAX_OUTPUTS:
        text = f"has {len(request.outputs)} entries, it may have {MAX_OUTPUTS}: name each output once"
        yield FieldViolation(f"{prefix}outputs", text)
    for index, output in enumerate(request.outputs[:MAX_VIOLATIONS]):
        if output not in known:
            names = " or ".join(EncodeOutput.Name(each) for each in known)
            yield FieldViolation(f"{prefix}outputs[{index}]", f"is {output}: use {names}")
    if not wants_attention:
        for name in ("layers", "heads", "head_reduction"):
            if getattr(request, name):
                text = "is set, but outputs does not ask for ENCODE_OUTPUT_ATTENTIONS"
                yield FieldViolation(f"{prefix}{name}", text)


def _check_enum(
    field: str, value: int, enum: type[Pooling] | type[HeadReduction]
) -> Iterator[FieldViolation]:
    if value not in enum.values():
        yield FieldViolation(field, f"is {value}: use one of {', '.join(enum.keys()[1:])}")


def _check_data_type(value: DataType.ValueType, prefix: str = "") -> Iterator[FieldViolation]:
    try:
        numpy_dtype(value)
    except ValueError:
        text = f"is {value}: use DATA_TYPE_FLOAT32 or DATA_TYPE_FLOAT16"
        yield FieldViolation(f"{prefix}data_type", text)


def _select(
    field: str, numbers: Sequence[int], count: int, violations: list[FieldViolation]
) -> tuple[int, ...]:
    """Resolve negative numbers; empty means all. What is wrong goes to `violations`."""
    chosen: list[int] = []
    if len(numbers) > count:
        text = f"has {len(numbers)} numbers: the model has {count}, each may be asked for once"
        violations.append(FieldViolation(field, text))
        return ()
    for index, number in enumerate(numbers):
        resolved = number + count if number < 0 else number
        if not 0 <= resolved < count:
            text = f"is {number}: the model has {count}, so use 0 to {count - 1}, or -{count} to -1"
            violations.append(FieldViolation(f"{field}[{index}]", text))
        elif resolved in chosen:
            violations.append(FieldViolation(f"{field}[{index}]", f"is {number}: it was asked for before"))
        else:
            chosen.append(resolved)
    return tuple(chosen) if numbers else tuple(range(count))
