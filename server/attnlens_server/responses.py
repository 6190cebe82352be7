"""From the engine's arrays to messages."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from google.protobuf.duration_pb2 import Duration

from attnlens.tensors import fill_stacked, fill_tensor, to_tensor
from attnlens.v1.encoder_service_pb2 import (
    Attention,
    EmbedResponse,
    EncodedText,
    EncodeResponse,
    EncodeStreamResponse,
    Timings,
    Token,
    Usage,
)
from attnlens.v1.tensor_pb2 import DataType
from attnlens_server.dense import DenseLayer
from attnlens_server.engine import ItemResult
from attnlens_server.errors import FieldViolation, InvalidFieldsError
from attnlens_server.pooling import normalize, pool
from attnlens_server.requests import EmbedPlan, EncodePlan
from attnlens_server.text import EncodedInput

MAX_FLOAT16 = float(np.finfo(np.float16).max)


def embed_response(
    model: str,
    inputs: Sequence[EncodedInput],
    results: Sequence[ItemResult],
    plan: EmbedPlan,
    dense: Sequence[DenseLayer],
    tokenize_s: float,
) -> EmbedResponse:
    """Turn each text's token vectors into its embedding and pack them into one tensor (N, dimensions).

    Raises:
        InvalidFieldsError: a value is beyond the range of the chosen element type.
    """
    vectors = np.stack(
        [
            pool(result.outputs["last_hidden_state"], plan.pooling, encoded.num_excluded)
            for encoded, result in zip(inputs, results, strict=True)
        ]
    )
    for layer in dense:
        vectors = layer(vectors)
    vectors = vectors[:, : plan.dimensions]
    if plan.normalize:
        vectors = normalize(vectors)
    _check_range(vectors, plan.data_type, "data_type")
    return EmbedResponse(
        model=model,
        embeddings=to_tensor(vectors, plan.data_type),
        usages=[usage(each) for each in inputs],
        timings=timings(tokenize_s, results),
    )


def encode_response(
    model: str,
    inputs: Sequence[EncodedInput],
    tokens: Sequence[Sequence[Token]],
    results: Sequence[ItemResult],
    plan: EncodePlan,
    tokenize_s: float,
) -> EncodeResponse:
    """Pack everything that was asked for, text by text.

    Raises:
        InvalidFieldsError: a value is beyond the range of the chosen element type.
    """
    response = EncodeResponse(model=model, timings=timings(tokenize_s, results))
    for encoded, each_tokens, result in zip(inputs, tokens, results, strict=True):
        text = response.results.add()
        fill_text(text, encoded, each_tokens, result, plan)
        if plan.layers:
            fill_attention(text.attention, result, plan, plan.layers)
    return response


def stream_head(
    encoded: EncodedInput,
    tokens: Sequence[Token],
    result: ItemResult,
    plan: EncodePlan,
    tokenize_s: float,
) -> EncodeStreamResponse:
    """Pack the first message of a text.

    Raises:
        InvalidFieldsError: as `encode_response`.
    """
    response = EncodeStreamResponse(timings=timings(tokenize_s, [result]))
    fill_text(response.head, encoded, tokens, result, plan)
    return response


def stream_attention(result: ItemResult, plan: EncodePlan, layer: int) -> EncodeStreamResponse:
    """Pack one layer of a text."""
    response = EncodeStreamResponse()
    fill_attention(response.attention, result, plan, (layer,))
    return response


def fill_text(
    text: EncodedText, encoded: EncodedInput, tokens: Sequence[Token], result: ItemResult, plan: EncodePlan
) -> None:
    """Pack a text's tokens, usage and, where asked for, token vectors (T, D).

    Raises:
        InvalidFieldsError: as `encode_response`.
    """
    text.tokens.extend(tokens)
    text.usage.CopyFrom(usage(encoded))
    if plan.hidden_state:
        hidden_state = result.outputs["last_hidden_state"]
        _check_range(hidden_state, plan.data_type, plan.data_type_field)
        fill_tensor(text.last_hidden_state, hidden_state, plan.data_type)


def fill_attention(message: Attention, result: ItemResult, plan: EncodePlan, layers: Sequence[int]) -> None:
    """Pack the weights of `layers`, (layers, heads, T, T); with the mean over heads, (layers, 1, T, T)."""
    message.layers.extend(layers)
    message.heads.extend(plan.heads)
    message.head_reduction = plan.head_reduction
    maps = [result.outputs[f"attentions.{layer}"] for layer in layers]
    fill_stacked(message.weights, maps, plan.data_type)


def _check_range(array: npt.NDArray[np.float32], data_type: DataType.ValueType, field: str) -> None:
    """Make sure that float16 has the values of vectors, which unlike weights may be beyond it.

    Raises:
        InvalidFieldsError: a number would become infinite; `field` is the one that asks for the type.
    """
    if data_type == DataType.DATA_TYPE_FLOAT16:
        beyond = array[np.isfinite(array) & (np.abs(array) > MAX_FLOAT16)]
        if beyond.size:
            largest = beyond[np.abs(beyond).argmax()]
            text = (
                f"is DATA_TYPE_FLOAT16, which ends at {MAX_FLOAT16:.0f}, but the result has the value "
                f"{largest:.6g}: ask for DATA_TYPE_FLOAT32"
            )
            raise InvalidFieldsError([FieldViolation(field, text)])


def usage(encoded: EncodedInput) -> Usage:
    """Say how much of an input was used."""
    return Usage(
        num_tokens=encoded.num_tokens,
        num_tokens_total=encoded.num_tokens_total,
        truncated=encoded.num_tokens < encoded.num_tokens_total,
    )


def timings(tokenize_s: float, results: Sequence[ItemResult]) -> Timings:
    """Say where the time went: over several batches, the longest."""
    return Timings(
        tokenize=_duration(tokenize_s),
        queue=_duration(max(result.queue_s for result in results)),
        compute=_duration(max(result.compute_s for result in results)),
    )


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration
