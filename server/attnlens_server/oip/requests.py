"""Conversion of ModelInfer requests to the typed requests of `serving.requests`."""

import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnlens.explanations import ExplainMethod
from attnlens.oip import open_inference_pb2 as pb
from attnlens.pooling import Pooling
from attnlens_server.bundle import Bundle, OutputRole, RowSum
from attnlens_server.errors import MAX_MESSAGE_BYTES, FieldViolation, RequestError, shortened
from attnlens_server.oip.models import (
    ATTENTION_MASK,
    BYTES,
    CONTRIBUTIONS,
    EMBEDDING,
    EMBEDDING_ALIAS,
    INPUT_IDS,
    TEXT,
    TEXT_PAIR,
    TOKEN_TYPE_IDS,
    Models,
)
from attnlens_server.oip.tensors import InputTensor, IntArray, invalid, quoted, read_integers, read_texts
from attnlens_server.serving.requests import (
    AttentionQuery,
    AttentionView,
    EmbedRequest,
    EncodeRequest,
    ExplainRequest,
    Prompt,
    Request,
)
from attnlens_server.text import Input, TextPair, TokenIds

Parameters = Mapping[str, pb.InferParameter]

_POOLINGS = {pooling.name.lower(): pooling for pooling in Pooling}
# Parameters of Triton, KServe and MLServer without a meaning here.
_IGNORED = re.compile(r"priority|headers|(sequence_|triton_).*", re.DOTALL)
_IGNORED_OF_TENSORS = re.compile(r"content_type|binary_data.*", re.DOTALL)
# Paths in the messages of `serving`.
_PATH = re.compile(
    r"(?<![\w-])inputs\b(\[\d+\])?(?:\.token_ids)?(?:\.(text_pair|input_ids|token_type_ids)|\.text)?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InferRequest(Request):
    """A ModelInfer request, as up to three requests for the same inputs.

    Attributes:
        name: Name of the model in the request.
        id: Identifier in the request.
        outputs: Names of the requested outputs, in order.
        is_raw: Whether elements are in raw_input_contents, and thus in raw_output_contents.
        width: Number of tokens T of token ids, with padding. 0 for texts.
        timeout_us: Timeout in microseconds. 0 if there is none.
        embed: Request for embeddings, or None.
        encode: Request for token vectors and attention, or None.
        explain: Request for contributions, or None.
    """

    name: str
    id: str
    outputs: tuple[str, ...]
    is_raw: bool
    width: int
    timeout_us: int
    embed: EmbedRequest | None
    encode: EncodeRequest | None
    explain: ExplainRequest | None

    def renamed(self, error: RequestError) -> RequestError:
        """Replace the paths of inputs in an error by the names of tensors, and return the error."""
        tensor = INPUT_IDS if self.width else TEXT

        def rename(text: str) -> str:
            text = _PATH.sub(lambda match: f"{match[2] or tensor}{match[1] or ''}", text)
            return text.replace("prompt.name", "prompt_name")

        error.violations = tuple(
            FieldViolation(rename(violation.field), rename(violation.description))
            for violation in error.violations
        )
        error.message = shortened(rename(error.message), MAX_MESSAGE_BYTES)
        error.args = (error.message,)
        return error


class RequestReader:
    """Converts requests for the models of one bundle."""

    def __init__(self, bundle: Bundle, models: Models, max_texts: int) -> None:
        self._weights = bundle.model.outputs.layers(OutputRole.ATTENTION_WEIGHTS)
        self._models = models
        self._max_texts = max_texts

    def read(self, message: pb.ModelInferRequest) -> InferRequest:
        """Convert a request.

        Raises:
            ModelNotFoundError: The model is unknown.
            InvalidFieldsError: A tensor, an output or a parameter is invalid.
        """
        signature = self._models.signature(message.model_name, message.model_version)
        has_text = any(tensor.datatype == BYTES for tensor in message.inputs)
        if has_text and signature.inputs[0].name != TEXT:
            raise invalid("inputs", f"has a BYTES tensor: use {INPUT_IDS} and {ATTENTION_MASK}")
        raw = _raw_contents(message)
        inputs, width = self._texts(message.inputs, raw) if has_text else self._token_ids(message.inputs, raw)
        outputs = self._outputs(message, has_text=has_text)
        settings = _settings(message.parameters, outputs)
        prompt = None if settings.prompt_name is None else Prompt(name=settings.prompt_name)
        common: dict[str, Any] = {"inputs": inputs, "prompt": prompt, "truncate": settings.truncate}
        pooled = common | {"pooling": settings.pooling, "dimensions": settings.dimensions}
        queries = self._queries(outputs)
        has_vectors = self._models.hidden_state in outputs
        has_contributions = CONTRIBUTIONS in outputs
        is_mask_alone = ATTENTION_MASK in outputs and not has_contributions
        return InferRequest(
            name=message.model_name,
            id=message.id,
            inputs=inputs,
            outputs=outputs,
            is_raw=bool(message.raw_input_contents),
            width=width,
            timeout_us=settings.timeout,
            embed=EmbedRequest(normalize=settings.normalize, **pooled)
            if {EMBEDDING, EMBEDDING_ALIAS} & set(outputs)
            else None,
            encode=EncodeRequest(last_hidden_state=has_vectors, attention=queries, **common)
            if has_vectors or queries or is_mask_alone
            else None,
            explain=ExplainRequest(methods=[ExplainMethod.CONTRIBUTIONS], **pooled)
            if has_contributions
            else None,
        )

    def _queries(self, outputs: Sequence[str]) -> list[AttentionQuery]:
        """Return one query per group of layers that a query can combine."""
        groups: dict[tuple[int, RowSum], list[int]] = {}
        for layer in (self._models.attentions[name] for name in outputs if name in self._models.attentions):
            output = self._weights[layer]
            groups.setdefault((output.num_heads, output.row_sum), []).append(layer)
        return [AttentionQuery(layers=layers, view=AttentionView.DENSE) for layers in groups.values()]

    def _texts(self, tensors: Sequence[InputTensor], raw: Sequence[bytes | None]) -> tuple[list[Input], int]:
        """Return texts or pairs. A single tensor may have any name."""
        names = [tensor.name for tensor in tensors] if len(tensors) > 1 else [TEXT]
        if sorted(names) not in ([TEXT], [TEXT, TEXT_PAIR]):
            listed = ", ".join(map(quoted, names[:4]))
            raise invalid("inputs", f"has the tensors {listed}: use {TEXT}, or {TEXT} and {TEXT_PAIR}")
        found = {
            name: read_texts(name, tensor, data, self._max_texts)
            for name, tensor, data in zip(names, tensors, raw, strict=True)
        }
        first, second = found[TEXT], found.get(TEXT_PAIR)
        if second is None:
            return [Input(text=text) for text in first], 0
        if len(first) != len(second):
            problem = f"has {len(second)} elements, but {TEXT} has {len(first)}: use the same shape"
            raise invalid(TEXT_PAIR, problem)
        return [Input(text_pair=TextPair(*pair)) for pair in zip(first, second, strict=True)], 0

    def _token_ids(
        self, tensors: Sequence[InputTensor], raw: Sequence[bytes | None]
    ) -> tuple[list[Input], int]:
        """Return token ids without padding, and the number of tokens with padding."""
        names = [tensor.name for tensor in tensors]
        if len(set(names)) < len(names) or set(names) - {TOKEN_TYPE_IDS} != {INPUT_IDS, ATTENTION_MASK}:
            listed = f"the tensors {', '.join(map(quoted, names[:4]))}" if names else "no tensors"
            known = f"{TEXT} (BYTES), or {INPUT_IDS}, {ATTENTION_MASK} and optionally {TOKEN_TYPE_IDS}"
            raise invalid("inputs", f"has {listed}: use {known}")
        found = {
            tensor.name: read_integers(tensor.name, tensor, data, self._max_texts)
            for tensor, data in zip(tensors, raw, strict=True)
        }
        ids, mask, types = found[INPUT_IDS], found[ATTENTION_MASK], found.get(TOKEN_TYPE_IDS)
        for name, values in found.items():
            if values.shape != ids.shape:
                problem = f"has the shape {list(values.shape)}, but {INPUT_IDS} has {list(ids.shape)}"
                raise invalid(name, f"{problem}: use the same")
        lengths = mask.sum(axis=1)  # (B,)
        is_token = np.arange(ids.shape[1]) < lengths[:, None]  # (B, T)
        wrong = (mask != is_token).any(axis=1).nonzero()[0]
        if wrong.size:
            problem = "does not consist of ones followed by zeros: pad on the right"
            raise invalid(f"{ATTENTION_MASK}[{wrong[0]}]", problem)
        inputs = [
            Input(token_ids=TokenIds(_row(ids, row, length), _row(types, row, length)))
            for row, length in enumerate(lengths)
        ]
        return inputs, ids.shape[1]

    def _outputs(self, message: pb.ModelInferRequest, *, has_text: bool) -> tuple[str, ...]:
        hidden_state, attentions = self._models.hidden_state, self._models.attentions
        known = (EMBEDDING, EMBEDDING_ALIAS, hidden_state, ATTENTION_MASK, CONTRIBUTIONS, *attentions)
        names: list[str] = []
        for index, output in enumerate(message.outputs):
            _check_tensor_parameters(f"outputs[{index}]", output.parameters)
            if output.name not in known:
                raise invalid(f"outputs[{index}].name", f"is {quoted(output.name)}: use {', '.join(known)}")
            if output.name in names:
                raise invalid(f"outputs[{index}].name", f"is {output.name}, which is listed twice: remove it")
            names.append(output.name)
        return tuple(names) or self._models.default_outputs(message.model_name, has_text=has_text)


def _row(values: IntArray | None, row: int, length: int) -> Sequence[int]:
    return () if values is None else array("q", values[row, :length].astype(np.int64).tobytes())


def _raw_contents(message: pb.ModelInferRequest) -> Sequence[bytes | None]:
    """Return the raw elements of each input, or None for each one with `contents`.

    Raises:
        InvalidFieldsError: There is not one entry per input, or elements are elsewhere.
    """
    raw, count = message.raw_input_contents, len(message.inputs)
    for index, tensor in enumerate(message.inputs):
        _check_tensor_parameters(f"inputs[{index}]", tensor.parameters)
        if raw and tensor.HasField("contents"):
            problem = "are set in addition to raw_input_contents: send one of them"
            raise invalid(f"inputs[{index}].contents", problem)
    if raw and len(raw) != count:
        raise invalid("raw_input_contents", f"has {len(raw)} entries for {count} inputs: send one per input")
    return raw or [None] * count


def _check_tensor_parameters(field: str, parameters: Parameters) -> None:
    for key in parameters:
        if not _IGNORED_OF_TENSORS.fullmatch(key):
            problem = "is not supported: omit it, and send the elements in the request"
            raise invalid(f"{field}.parameters", f"has {quoted(key)}, which {problem}")


@dataclass(frozen=True, slots=True)
class _Settings:
    """Parameters of a request. `timeout` is in microseconds."""

    truncate: bool = False
    prompt_name: str | None = None
    timeout: int = 0
    pooling: Pooling | None = None
    dimensions: int = 0
    normalize: bool | None = None


_CHOICES = {
    "truncate": ("bool_param",),
    "prompt_name": ("string_param",),
    "timeout": ("int64_param", "uint64_param"),
    "pooling": ("string_param",),
    "dimensions": ("int64_param", "uint64_param"),
    "normalize": ("bool_param",),
}


def _settings(parameters: Parameters, outputs: Sequence[str]) -> _Settings:
    """Validate the parameters that the requested outputs allow.

    Raises:
        InvalidFieldsError: A parameter is unknown, or has an invalid type or value.
    """
    is_embedding = bool({EMBEDDING, EMBEDDING_ALIAS} & set(outputs))
    allowed = ["truncate", "prompt_name", "timeout"]
    allowed += ["pooling", "dimensions"] if is_embedding or CONTRIBUTIONS in outputs else []
    allowed += ["normalize"] if is_embedding else []
    values: dict[str, Any] = {}
    for key, parameter in parameters.items():
        if key in allowed:
            choice = parameter.WhichOneof("parameter_choice")
            if choice not in _CHOICES[key]:
                raise invalid(f"parameters.{key}", f"is {choice or 'empty'}: use {_CHOICES[key][0]}")
            values[key] = getattr(parameter, choice)
        elif not _IGNORED.fullmatch(key) and not _IGNORED_OF_TENSORS.fullmatch(key):
            known = f"for {', '.join(outputs[:2])}, use {', '.join(allowed)}"
            raise invalid("parameters", f"has {quoted(key)}, which is not known: {known}")
    if "pooling" in values:
        if values["pooling"] not in _POOLINGS:
            problem = f"is {quoted(values['pooling'])}: use one of {', '.join(_POOLINGS)}"
            raise invalid("parameters.pooling", problem)
        values["pooling"] = _POOLINGS[values["pooling"]]
    return _Settings(**values)
