"""Responses: from messages to the classes of results.py.

Letters: N texts, T tokens of a text, D hidden size, L' and H' the chosen layers and heads.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import grpc
import numpy as np

from attnlens.tensors import from_tensor, numpy_dtype
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.manifest_pb2 import Activation, Dense, Pooling
from attnlens.v1.tensor_pb2 import DataType
from attnlens_client.errors import InvalidRequestError, ServerError
from attnlens_client.results import (
    Array,
    DenseLayer,
    Embeddings,
    EncodedText,
    HeadPart,
    LayerPart,
    Limits,
    ModelInfo,
    Parity,
    ParityFigure,
    Token,
    TokenizedText,
    Usage,
)

_PRECISIONS: dict[DataType.ValueType, str] = {
    DataType.DATA_TYPE_FLOAT16: "fp16",
    DataType.DATA_TYPE_INT8: "int8",
}


def embeddings(responses: Sequence[pb.EmbedResponse]) -> Embeddings:
    """Join the vectors of several calls, at least one, into one new array (N, D)."""
    vectors = np.concatenate([from_tensor(response.embeddings) for response in responses])
    usages = tuple(_usage(usage) for response in responses for usage in response.usages)
    return Embeddings(vectors, usages)


def no_embeddings(request: pb.EmbedRequest, model: ModelInfo) -> Embeddings:
    """Return the vectors of no text: shape (0, D).

    Raises:
        InvalidRequestError: the model has fewer dimensions, or no such prompt.
    """
    if request.dimensions > model.embedding_size:
        raise InvalidRequestError(
            f"dimensions is {request.dimensions}: {model.name} has {model.embedding_size}",
            grpc.StatusCode.INVALID_ARGUMENT,
        )
    if request.HasField("prompt_name") and request.prompt_name not in model.prompts:
        raise InvalidRequestError(
            f"prompt_name is {request.prompt_name!r}: {model.name} has {', '.join(model.prompts) or 'none'}",
            grpc.StatusCode.INVALID_ARGUMENT,
        )
    shape = (0, request.dimensions or model.embedding_size)
    return Embeddings(np.zeros(shape, numpy_dtype(request.data_type)), ())


def encoded_texts(responses: Iterable[pb.EncodeResponse]) -> list[EncodedText]:
    """Join the results of several calls."""
    return [encoded_text(result) for response in responses for result in response.results]


def encoded_text(message: pb.EncodedText) -> EncodedText:
    """Read one result; its arrays are views of the message's bytes."""
    attention = message.attention if message.HasField("attention") else None
    return EncodedText(
        tokens=_tokens(message.tokens),
        hidden_states=from_tensor(message.last_hidden_state)
        if message.HasField("last_hidden_state")
        else None,
        attentions=from_tensor(attention.weights) if attention else None,
        layers=tuple(attention.layers) if attention else (),
        heads=tuple(attention.heads) if attention else (),
        num_tokens=message.usage.num_tokens,
        num_tokens_total=message.usage.num_tokens_total,
        truncated=message.usage.truncated,
    )


def tokenized_texts(responses: Iterable[pb.TokenizeResponse]) -> list[TokenizedText]:
    """Join the tokens of several calls."""
    return [
        TokenizedText(_tokens(result.tokens), result.exceeds_max_tokens)
        for response in responses
        for result in response.results
    ]


def stream_part(response: pb.EncodeStreamResponse, first_index: int) -> HeadPart | LayerPart:
    """Read one message of a stream whose first text has the number `first_index`."""
    index = first_index + response.input_index
    if response.HasField("head"):
        return HeadPart(index, encoded_text(response.head))
    attention = response.attention
    if len(attention.layers) != 1:
        raise ServerError(f"the stream's part for text {index} holds {len(attention.layers)} layers, not 1")
    weights = from_tensor(attention.weights)[0]  # (H', T, T)
    return LayerPart(index, attention.layers[0], tuple(attention.heads), weights)


class Assembler:
    """Puts the parts of a stream together again, one text at a time.

    Args:
        num_layers: how many layers each text has. 0: the head is all.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._head: EncodedText | None = None
        self._layers: list[LayerPart] = []

    def add(self, part: HeadPart | LayerPart) -> EncodedText | None:
        """Take a part and return the text where it is the last one of it.

        Raises:
            ServerError: the part does not follow those before it.
        """
        if isinstance(part, HeadPart):
            self.finish()
            if self._num_layers == 0:
                return part.text
            self._head = part.text
            return None
        if self._head is None:
            raise ServerError(f"the stream has layer {part.layer} of text {part.input_index} out of order")
        self._layers.append(part)
        if len(self._layers) < self._num_layers:
            return None
        text, layers = self._head, self._layers
        self._head, self._layers = None, []
        return replace(
            text,
            attentions=_stacked(layers),
            layers=tuple(layer.layer for layer in layers),
            heads=layers[0].heads,
        )

    def finish(self) -> None:
        """Check that no text is half received.

        Raises:
            ServerError: one is.
        """
        if self._head is not None:
            raise ServerError(f"the stream has {len(self._layers)} of {self._num_layers} layers of a text")


def _stacked(layers: list[LayerPart]) -> Array:
    weights = np.stack([layer.weights for layer in layers])  # (L', H', T, T)
    weights.flags.writeable = False  # like the arrays of `encode`
    return weights


def model_info(message: pb.Model) -> ModelInfo:
    """Read one model."""
    sizes, limits = message.architecture, message.limits
    return ModelInfo(
        name=message.name,
        source=message.source,
        weights_license=message.weights_license,
        family=sizes.family,
        hidden_size=sizes.hidden_size,
        num_layers=sizes.num_layers,
        num_heads=sizes.num_heads,
        intermediate_size=sizes.intermediate_size,
        vocab_size=sizes.vocab_size,
        max_position_embeddings=sizes.max_position_embeddings,
        is_causal=sizes.is_causal,
        embedding_size=message.embedding_size or sizes.hidden_size,  # older servers do not tell it
        pooling=_enum_name(Pooling, message.pooling.pooling),
        dense=tuple(_dense_layer(layer) for layer in message.pooling.dense),
        normalize=message.pooling.normalize,
        exclude_prompt=message.pooling.exclude_prompt,
        prompts=dict(sorted(message.prompts.items())),
        default_prompt_name=message.default_prompt_name,
        max_tokens=message.max_tokens,
        limits=Limits(
            max_inputs_per_request=limits.max_inputs_per_request,
            max_text_bytes=limits.max_text_bytes,
            max_queue=limits.max_queue,
            max_batch_tokens=limits.max_batch_tokens,
            max_message_bytes=limits.max_message_bytes,
            max_request_text_bytes=limits.max_request_text_bytes,
        ),
        execution_providers=tuple(message.execution_providers),
        precision=_PRECISIONS.get(message.precision, "fp32"),
        parity=_parity(message),
        versions=dict(message.versions),
    )


def _dense_layer(message: Dense) -> DenseLayer:
    return DenseLayer(
        in_features=message.in_features,
        out_features=message.out_features,
        bias=message.bias,
        activation=_enum_name(Activation, message.activation),
        normalize_input=message.normalize_input,
    )


def _enum_name(enum: type[Pooling] | type[Activation], number: int) -> str:
    """Return the name of a value, such as "mean"; a newer server may have values that are not known here."""
    names: dict[int, str] = {value: name for name, value in enum.items()}
    prefix = f"{enum.DESCRIPTOR.name.upper()}_"
    return names[number].removeprefix(prefix).lower() if number in names else f"unknown ({number})"


def _parity(message: pb.Model) -> Parity:
    parity = message.parity
    return Parity(
        passed=parity.passed,
        tolerance=parity.tolerance,
        reference_error_ratio=parity.reference_error_ratio,
        num_cases=parity.num_cases,
        figures=tuple(
            ParityFigure(
                graph=figure.graph,
                output=figure.output,
                max_abs_error=figure.max_abs_error,
                max_abs_error_float64=figure.max_abs_error_float64,
                torch_abs_error_float64=figure.torch_abs_error_float64,
                mean_abs_error=figure.mean_abs_error,
                p99_abs_error=figure.p99_abs_error,
                min_cosine=figure.min_cosine,
            )
            for figure in parity.figures
        ),
    )


def _usage(message: pb.Usage) -> Usage:
    return Usage(message.num_tokens, message.num_tokens_total, message.truncated)


def _tokens(messages: Iterable[pb.Token]) -> tuple[Token, ...]:
    return tuple(
        Token(
            id=token.id,
            text=token.text,
            byte_start=token.byte_start,
            byte_end=token.byte_end,
            char_start=token.char_start,
            char_end=token.char_end,
            word_index=token.word_index if token.HasField("word_index") else None,
            is_special=token.is_special,
        )
        for token in messages
    )
