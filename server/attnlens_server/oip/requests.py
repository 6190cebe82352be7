"""Conversion of ModelInfer requests to the typed requests of `operations`."""

import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnlens.explanations import ExplainMethod
from attnlens.oip import open_inference_pb2 as pb
from attnlens.pooling import Pooling
from attnlens_server.bundle import Model, OutputRole, RowSum
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
from attnlens_server.oip.tensors import IntArray, invalid, quoted, read_integers, read_texts
from attnlens_server.operations.attention import AttentionQuery, AttentionView
from attnlens_server.operations.classify import ClassifyRequest
from attnlens_server.operations.embed import EmbedRequest
from attnlens_server.operations.encode import EncodeRequest
from attnlens_server.operations.explain import ExplainRequest
from attnlens_server.operations.inputs import Prompt, Request
from attnlens_server.text import Input, TextPair, TokenIds

Parameters = Mapping[str, pb.InferParameter]
Types = dict[str, tuple[str, ...]]

# Types of each parameter: for all outputs, for embeddings and contributions, for embeddings.
_FLAG, _TEXT, _INTEGER = ("bool_param",), ("string_param",), ("int64_param", "uint64_param")
_COMMON: Types = {"truncate": _FLAG, "prompt_name": _TEXT, "timeout": _INTEGER}
_POOLED: Types = {"pooling": _TEXT, "dimensions": _INTEGER}
_EMBEDDED: Types = {"normalize": _FLAG}
_POOLINGS = {pooling.name.lower(): pooling for pooling in Pooling}
# Parameters of Triton, KServe and MLServer without a meaning here.
_IGNORED_OF_TENSORS = re.compile(r"content_type|binary_data.*", re.DOTALL)
_IGNORED = re.compile(rf"priority|headers|(sequence_|triton_).*|{_IGNORED_OF_TENSORS.pattern}", re.DOTALL)
# Paths in the messages of `operations`.
_PATH = re.compile(
    r"(?<![\w-])inputs\b(\[\d+\])?(?:\.token_ids)?(?:\.(input_ids|token_type_ids)|\.text(?:_pair)?\b)?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InferRequest(Request):
    """A ModelInfer request, as up to four requests for the same inputs. None where no output needs one.

    Attributes:
        id: Identifier in the request.
        outputs: Names of the requested outputs, in order.
        is_raw: Whether elements are in raw_input_contents, and thus in raw_output_contents.
        width: Number of tokens of token ids, with padding. 0 for texts.
        timeout_us: Timeout in microseconds, or 0.
    """

    id: str
    outputs: Sequence[str]
    is_raw: bool
    width: int
    timeout_us: int
    embed: EmbedRequest | None
    encode: EncodeRequest | None
    explain: ExplainRequest | None
    classify: ClassifyRequest | None

    def renamed(self, error: RequestError) -> RequestError:
        """Replace field paths in an error by the names of tensors and parameters, and return the error."""
        tensor = INPUT_IDS if self.width else TEXT

        def rename(text: str) -> str:
            text = _PATH.sub(lambda match: f"{match[2] or tensor}{match[1] or ''}", text)
            return text.replace("prompt.name", "prompt_name")

        def option(text: str) -> str:
            return text.replace("set truncate", "set the parameter truncate")

        error.violations = tuple(
            FieldViolation(rename(violation.field), option(violation.description))
            for violation in error.violations
        )
        error.message = shortened(option(rename(error.message)), MAX_MESSAGE_BYTES)
        return error


class RequestReader:
    """Converts requests for the models of one bundle."""

    def __init__(self, model: Model, models: Models, max_texts: int) -> None:
        self._attentions = model.outputs.layers(OutputRole.ATTENTION_WEIGHTS)
        self._models = models
        self._max_texts = max_texts

    def read(self, message: pb.ModelInferRequest) -> InferRequest:
        """Convert a request.

        Raises:
            ModelNotFoundError: The model is unknown.
            InvalidFieldsError: A tensor, an output or a parameter is invalid.
        """
        metadata = self._models.find(message.model_name, message.model_version)
        raw = _raw_contents(message)
        has_text = any(tensor.datatype == BYTES for tensor in message.inputs)
        if has_text and metadata.inputs[0].name != TEXT:
            raise invalid("inputs", f"has a BYTES tensor: use {INPUT_IDS} and {ATTENTION_MASK}")
        inputs, width = self._texts(message, raw) if has_text else self._token_ids(message, raw)
        outputs = self._outputs(message) or self._models.default_outputs(metadata, has_text=has_text)
        is_embedding = EMBEDDING in outputs or EMBEDDING_ALIAS in outputs
        is_explanation = CONTRIBUTIONS in outputs
        allowed = _COMMON | (_POOLED if is_embedding or is_explanation else {})
        settings = _settings(message.parameters, allowed | (_EMBEDDED if is_embedding else {}))

        def arguments(*names: str) -> dict[str, Any]:
            return common | {name: settings[name] for name in names if name in settings}

        common: dict[str, Any] = {
            "inputs": inputs,
            "prompt": Prompt(name=settings["prompt_name"]) if "prompt_name" in settings else None,
            "truncate": settings.get("truncate"),
        }
        embed = encode = explain = classify = None
        if self._models.logits and self._models.logits in outputs:
            classify = ClassifyRequest(**common)
        if is_embedding:
            embed = EmbedRequest(**arguments(*_POOLED, *_EMBEDDED))
        if is_explanation:
            explain = ExplainRequest(methods=[ExplainMethod.CONTRIBUTIONS], **arguments(*_POOLED))
        queries, has_vectors = self._queries(outputs), self._models.hidden_state in outputs
        if (
            queries or has_vectors or not (embed or explain or classify)
        ):  # the attention mask alone needs some result
            encode = EncodeRequest(last_hidden_state=has_vectors, attention=queries, **common)
        return InferRequest(
            model=metadata.name,
            id=message.id,
            inputs=inputs,
            outputs=outputs,
            is_raw=bool(message.raw_input_contents),
            width=width,
            timeout_us=max(0, settings.get("timeout", 0)),
            embed=embed,
            encode=encode,
            explain=explain,
            classify=classify,
        )

    def _queries(self, outputs: Sequence[str]) -> list[AttentionQuery]:
        """Return one query per group of layers that a query can combine."""
        groups: dict[tuple[int, RowSum], list[int]] = {}
        for layer in (self._models.layers[name] for name in outputs if name in self._models.layers):
            output = self._attentions[layer]
            groups.setdefault((output.num_heads, output.row_sum), []).append(layer)
        return [AttentionQuery(layers=layers, view=AttentionView.DENSE) for layers in groups.values()]

    def _texts(self, message: pb.ModelInferRequest, raw: Sequence[bytes | None]) -> tuple[list[Input], int]:
        """Return texts, whose tensor may have any name, or pairs from two tensors."""
        names = [tensor.name for tensor in message.inputs]
        if sorted(names) == [TEXT, TEXT_PAIR]:
            first, second = (
                read_texts(name, message.inputs[index], raw[index], self._max_texts)
                for name, index in ((name, names.index(name)) for name in (TEXT, TEXT_PAIR))
            )
            if len(first) != len(second):
                problem = f"has {len(second)} texts, but {TEXT} has {len(first)}: use the same number"
                raise invalid(TEXT_PAIR, problem)
            return [Input(text_pair=TextPair(*pair)) for pair in zip(first, second, strict=True)], 0
        if len(message.inputs) > 1:
            raise invalid("inputs", f"has {_names(message)}: use {TEXT} alone, or {TEXT} and {TEXT_PAIR}")
        texts = read_texts(TEXT, message.inputs[0], raw[0], self._max_texts)
        return [Input(text=text) for text in texts], 0

    def _token_ids(
        self, message: pb.ModelInferRequest, raw: Sequence[bytes | None]
    ) -> tuple[list[Input], int]:
        """Return token ids without padding, and the number of tokens with padding."""
        names = [tensor.name for tensor in message.inputs]
        if len(set(names)) < len(names) or set(names) - {TOKEN_TYPE_IDS} != {INPUT_IDS, ATTENTION_MASK}:
            known = f"{TEXT} (BYTES), or {INPUT_IDS}, {ATTENTION_MASK} and optionally {TOKEN_TYPE_IDS}"
            raise invalid("inputs", f"has {_names(message)}: use {known}")
        found = {
            tensor.name: read_integers(tensor.name, tensor, data, self._max_texts)
            for tensor, data in zip(message.inputs, raw, strict=True)
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

    def _outputs(self, message: pb.ModelInferRequest) -> list[str]:
        """Return the requested outputs, or an empty list if the request names none."""
        known: tuple[str, ...] = (
            EMBEDDING,
            EMBEDDING_ALIAS,
            self._models.hidden_state,
            ATTENTION_MASK,
            CONTRIBUTIONS,
        )
        if self._models.logits:
            known = (self._models.logits, self._models.hidden_state, ATTENTION_MASK)
        names: list[str] = []
        for index, output in enumerate(message.outputs):
            _check_parameters(f"outputs[{index}]", output.parameters)
            if output.name not in known and output.name not in self._models.layers:
                listed = ", ".join((*known, *self._models.layers))
                raise invalid(f"outputs[{index}].name", f"is {quoted(output.name)}: use {listed}")
            if output.name in names:
                raise invalid(f"outputs[{index}].name", f"is {output.name}, which is listed twice: remove it")
            names.append(output.name)
        return names


def _row(values: IntArray | None, row: int, length: int) -> Sequence[int]:
    return () if values is None else array("q", values[row, :length].astype(np.int64).tobytes())


def _names(message: pb.ModelInferRequest) -> str:
    return ", ".join(quoted(tensor.name) for tensor in message.inputs[:4]) or "no tensors"


def _raw_contents(message: pb.ModelInferRequest) -> Sequence[bytes | None]:
    """Return the raw elements of each input, or None for each input with `contents`.

    Raises:
        InvalidFieldsError: There is not one entry per input, or elements are elsewhere.
    """
    raw, count = message.raw_input_contents, len(message.inputs)
    for index, tensor in enumerate(message.inputs):
        _check_parameters(f"inputs[{index}]", tensor.parameters)
        if raw and tensor.contents.ByteSize():  # MLServer sets an empty message
            raise invalid(
                f"inputs[{index}].contents", "is set in addition to raw_input_contents: send only one"
            )
    if raw and len(raw) != count:
        raise invalid("raw_input_contents", f"has {len(raw)} entries for {count} inputs: send one per input")
    return raw or [None] * count


def _check_parameters(field: str, parameters: Parameters) -> None:
    """Reject parameters of a tensor, such as the name of a region in shared memory."""
    for key in parameters:
        if not _IGNORED_OF_TENSORS.fullmatch(key):
            problem = "which is not supported: omit it, and send the elements in the message"
            raise invalid(f"{field}.parameters", f"has {quoted(key)}, {problem}")


def _settings(parameters: Parameters, allowed: Types) -> dict[str, Any]:
    """Return the values of parameters.

    Raises:
        InvalidFieldsError: A parameter is not allowed for the outputs, or has an invalid type.
    """
    values: dict[str, Any] = {}
    for key, parameter in parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        if key in allowed:
            if choice is None or choice not in allowed[key]:
                raise invalid(f"parameters.{key}", f"is {choice or 'empty'}: use {allowed[key][0]}")
            values[key] = getattr(parameter, choice)
        elif not _IGNORED.fullmatch(key):
            listed = f"for these outputs, use {', '.join(allowed)}"
            raise invalid("parameters", f"has {quoted(key)}, which is not known: {listed}")
    if "pooling" in values:
        name = values["pooling"]
        if name not in _POOLINGS:
            raise invalid("parameters.pooling", f"is {quoted(name)}: use one of {', '.join(_POOLINGS)}")
        values["pooling"] = _POOLINGS[name]
    return values
