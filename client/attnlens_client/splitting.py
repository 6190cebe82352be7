"""Many texts become calls of a size that the server takes. Pure functions of the texts and its limits.

Letters: N texts, T tokens of a text, D hidden size, L layers, H heads.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

from attnlens.tensors import numpy_dtype
from attnlens.v1.encoder_service_pb2 import (
    EmbedRequest,
    EncodeOutput,
    EncodeRequest,
    HeadReduction,
    Input,
)
from attnlens_client.results import Limits, ModelInfo

# Room for what stands around the tensors of a message.
_USABLE_SHARE = 0.9
# An upper bound for the bytes of a Token message whose text is short, and of what else a text has.
_TOKEN_BYTES = 64
_MESSAGE_BYTES = 64
# A request fills at most the queue divided by this.
_QUEUE_PARTS = 4


def embed_costs(request: EmbedRequest, texts: Iterable[Input], model: ModelInfo) -> list[int]:
    """Return for each text the bytes that it takes in a message, the larger of both directions."""
    row = (request.dimensions or model.embedding_size) * numpy_dtype(request.data_type).itemsize
    return [max(text.ByteSize(), row) + _MESSAGE_BYTES for text in texts]


def encode_costs(request: EncodeRequest, texts: Iterable[Input], model: ModelInfo) -> list[int]:
    """Return for each text an upper bound of its bytes in a message.

    The number of tokens is not known here: at most one for each byte, special tokens aside.
    """
    item = numpy_dtype(request.data_type).itemsize
    width = model.hidden_size if EncodeOutput.ENCODE_OUTPUT_LAST_HIDDEN_STATE in request.outputs else 0
    maps = 0
    if EncodeOutput.ENCODE_OUTPUT_ATTENTIONS in request.outputs:
        heads = len(request.heads) or model.num_heads
        if request.head_reduction == HeadReduction.HEAD_REDUCTION_MEAN:
            heads = 1
        maps = (len(request.layers) or model.num_layers) * heads
    costs = []
    for text in texts:
        tokens = min(model.max_tokens, text.ByteSize())
        result = tokens * (width * item + _TOKEN_BYTES) + maps * tokens * tokens * item
        costs.append(max(text.ByteSize(), result) + _MESSAGE_BYTES)
    return costs


def tokenize_costs(text_bytes: Iterable[int]) -> list[int]:
    """Return for each text an upper bound of its bytes in a message: a token for each byte."""
    return [size * _TOKEN_BYTES + _MESSAGE_BYTES for size in text_bytes]


def split(
    costs: Sequence[int], text_bytes: Sequence[int], limits: Limits, batch_size: int
) -> Iterator[slice]:
    """Cut texts into runs that each fit the server's limits; a text that fits nowhere stands alone.

    Args:
        costs: the bytes that each text takes in a message, shape (N,).
        text_bytes: the bytes of UTF-8 of each text, shape (N,).
        limits: those of the server; 0 is unknown.
        batch_size: the most texts of a run.
    """
    most_texts = _most_texts(limits, batch_size)
    most_cost = limits.max_message_bytes * _USABLE_SHARE or math.inf
    most_text_bytes = limits.max_request_text_bytes or math.inf
    start, used, used_text = 0, 0, 0
    for index, (cost, size) in enumerate(zip(costs, text_bytes, strict=True)):
        is_full = index - start == most_texts or used + cost > most_cost or used_text + size > most_text_bytes
        if index > start and is_full:
            yield slice(start, index)
            start, used, used_text = index, 0, 0
        used += cost
        used_text += size
    if start < len(costs):
        yield slice(start, len(costs))


def _most_texts(limits: Limits, batch_size: int) -> int:
    """Return the most texts of one request.

    A request is taken as a whole or refused, so one that needs most of the queue to be free is seldom
    taken while others are served.
    """
    share = max(1, limits.max_queue // _QUEUE_PARTS) if limits.max_queue else batch_size
    return min(batch_size, limits.max_inputs_per_request or batch_size, share)


def calls_at_a_time(max_in_flight: int, batch_size: int, model: ModelInfo | None) -> int:
    """Return how many calls to keep running, so that one caller alone never overfills the queue."""
    if model is None or not model.limits.max_queue:
        return max_in_flight
    room = model.limits.max_queue // _most_texts(model.limits, batch_size)
    return max(1, min(max_in_flight, room))
