"""From the engine's arrays to messages."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from google.protobuf.duration_pb2 import Duration

from attnlens.dense import DenseLayer
from attnlens.pooling import normalize
from attnlens.tensors import fill_stacked, fill_tensor, to_tensor
from attnlens.v1.encoder_service_pb2 import (
    Attention,
    EmbedResponse,
    EncodedText,
    EncodeResponse,
    EncodeStreamResponse,
    Timings,
    Usage,
)
from attnlens.v1.tensor_pb2 import DataType
from attnlens_server.engine import ItemResult
from attnlens_server.errors import FieldViolation, InvalidFieldsError
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
) -> bytes:
    """Turn each text's pooled vector into its embedding, and pack them as one tensor (N, dimensions).

    Raises:
        InvalidFieldsError: a value is beyond the range of the chosen element type.
    """
    vectors = np.stack([result.outputs["last_hidden_state"] for result in results])  # (N, D)
    for layer in dense:
        vectors = layer(vectors)
    if plan.normalize_first:
        vectors = normalize(vectors)
    vectors = vectors[:, : plan.dimensions]
    if plan.normalize:
        vectors = normalize(vectors)
    _check_range(vectors, plan.data_type, "data_type")
    response = EmbedResponse(
        model=model,
        embeddings=to_tensor(vectors, plan.data_type),
        usages=[usage(each) for each in inputs],
        timings=timings(tokenize_s, results),
    )
    return response.SerializeToString()


def encode_response(
    model: str,
    parts: list[EncodeResponse],
    inputs: Sequence[EncodedInput],
    results: list[ItemResult],
    plan: EncodePlan,
    tokenize_s: float,
) -> bytes:
    """Add everything that was asked for to texts that have their tokens, and join them.

    Messages are joined by joining their bytes. So each text is serialized by itself: all of them at once
    would keep every other thread waiting.

    Args:
        model: the name of the model.
        parts: a response of one text for each input.
        inputs: what was run.
        results: what came of it. Both lists are emptied on the way, so that nothing is in memory twice.
        plan: what was asked for.
        tokenize_s: seconds.

    Raises:
        InvalidFieldsError: a value is beyond the range of the chosen element type.
    """
    head = EncodeResponse(model=model, timings=timings(tokenize_s, results))
    serialized = [head.SerializeToString()]
    parts.reverse()
    results.reverse()
    for encoded in inputs:
        part, result = parts.pop(), results.pop()
        [text] = part.results
        fill_text(text, encoded, result, plan)
        if plan.layers:
            fill_attention(text.attention, result, plan, plan.layers)
        serialized.append(part.SerializeToString())
    return b"".join(serialized)


def stream_head(
    part: EncodeStreamResponse, encoded: EncodedInput, result: ItemResult, plan: EncodePlan, tokenize_s: float
) -> bytes:
    """Complete the first message of a text, which has its tokens.

    Raises:
        InvalidFieldsError: as `encode_response`.
    """
    part.timings.CopyFrom(timings(tokenize_s, [result]))
    part.num_attention_parts = len(plan.layers)
    fill_text(part.head, encoded, result, plan)
    return part.SerializeToString()


def stream_attention(model: str, index: int, result: ItemResult, plan: EncodePlan, layer: int) -> bytes:
    """Pack one layer of text `index`."""
    part = EncodeStreamResponse(model=model, input_index=index)
    fill_attention(part.attention, result, plan, (layer,))
    return part.SerializeToString()


def fill_text(text: EncodedText, encoded: EncodedInput, result: ItemResult, plan: EncodePlan) -> None:
    """Pack a text's usage and, where asked for, its token vectors (T, D).

    Raises:
        InvalidFieldsError: as `encode_response`.
    """
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
