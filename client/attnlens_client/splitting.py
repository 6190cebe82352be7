"""Many texts become calls of a size that the server takes. Pure functions of the texts and its limits.

Letters: N texts, T tokens of a text, D hidden size, L layers, H heads.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from attnlens.tensors import numpy_dtype
from attnlens.v1.encoder_service_pb2 import (
    EmbedRequest,
    EncodeOutput,
    EncodeRequest,
    HeadReduction,
    Input,
    TokenizeRequest,
)
from attnlens_client.channel import Settings
from attnlens_client.results import ModelInfo

Request = TypeVar("Request", EmbedRequest, EncodeRequest)

# Room for what stands around the tensors of a message.
_USABLE_SHARE = 0.9
# An upper bound for the bytes of a Token message whose text is short, and of what else a text has.
_TOKEN_BYTES = 64
_MESSAGE_BYTES = 64
# A request fills at most the queue divided by this.
_QUEUE_PARTS = 4


def embed_costs(request: EmbedRequest, texts: Iterable[Input], model: ModelInfo) -> list[int]:
    """Return for each text the bytes that it takes in a message, the larger of both directions."""
    row = (request.dimensions or model.hidden_size) * numpy_dtype(request.data_type).itemsize
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


def tokenize_costs(texts: Iterable[str]) -> list[int]:
    """Return for each text an upper bound of its bytes in a message: a token for each byte."""
    return [len(text.encode()) * _TOKEN_BYTES + _MESSAGE_BYTES for text in texts]


def split(costs: Sequence[int], model: ModelInfo, batch_size: int) -> Iterator[slice]:
    """Cut texts into runs that each fit the server's limits; a text that fits nowhere stands alone.

    Args:
        costs: the bytes that each text takes, shape (N,).
        model: whose limits count.
        batch_size: the most texts of a run.
    """
    most = min(batch_size, _most_texts(model, batch_size))
    limit = model.limits.max_message_bytes
    budget = limit * _USABLE_SHARE if limit > 0 else float("inf")
    start, used = 0, 0
    for index, cost in enumerate(costs):
        if index > start and (index - start == most or used + cost > budget):
            yield slice(start, index)
            start, used = index, 0
        used += cost
    if start < len(costs):
        yield slice(start, len(costs))


def _most_texts(model: ModelInfo, otherwise: int) -> int:
    """Return the most texts of one request.

    A request is taken as a whole or refused, so one that needs most of the queue to be free is seldom
    taken while others are served.
    """
    limits = model.limits
    share = max(1, limits.max_queue // _QUEUE_PARTS) if limits.max_queue else otherwise
    return min(limits.max_inputs_per_request or otherwise, share)


def max_in_flight(settings: Settings, model: ModelInfo | None) -> int:
    """Return how many calls to keep running, so that one caller alone never overfills the queue."""
    if model is None or not model.limits.max_queue:
        return settings.max_in_flight
    texts_a_call = min(settings.batch_size, _most_texts(model, settings.batch_size))
    return max(1, min(settings.max_in_flight, model.limits.max_queue // texts_a_call))


def embed_requests(
    template: EmbedRequest, texts: Sequence[Input], model: ModelInfo | None, batch_size: int
) -> Iterator[tuple[int, EmbedRequest]]:
    """Yield the calls that carry `texts`, in order, each with the number of its first. `model` None: one."""
    costs = None if model is None else embed_costs(template, texts, model)
    yield from _requests(template, texts, _runs(costs, model, batch_size))


def encode_requests(
    template: EncodeRequest, texts: Sequence[Input], model: ModelInfo | None, batch_size: int
) -> Iterator[tuple[int, EncodeRequest]]:
    """Yield the calls that carry `texts`, in order, each with the number of its first. `model` None: one."""
    costs = None if model is None else encode_costs(template, texts, model)
    yield from _requests(template, texts, _runs(costs, model, batch_size))


def tokenize_requests(
    texts: Sequence[str], model_name: str, model: ModelInfo | None, batch_size: int
) -> Iterator[tuple[int, TokenizeRequest]]:
    """Yield the calls that carry `texts`, in order, each with the number of its first. `model` None: one."""
    for run in _runs(tokenize_costs(texts), model, batch_size):
        yield run.start, TokenizeRequest(model=model_name, texts=texts[run])


def _runs(costs: Sequence[int] | None, model: ModelInfo | None, batch_size: int) -> Iterable[slice]:
    return [slice(0, None)] if model is None or costs is None else split(costs, model, batch_size)


def _requests(
    template: Request, texts: Sequence[Input], runs: Iterable[slice]
) -> Iterator[tuple[int, Request]]:
    for run in runs:
        request = type(template)()
        request.CopyFrom(template)
        request.inputs.extend(texts[run])
        yield run.start, request
