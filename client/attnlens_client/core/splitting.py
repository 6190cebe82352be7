"""Many texts become calls of a size that the server takes. Pure functions of the texts and its limits.

Letters: N texts, T tokens of a text, D hidden size, L layers, H heads.
"""

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from attnlens.costs import flops_per_token, masked_runs_cost, reduction_cost, sweeps_cost
from attnlens.reductions.sizes import data_bytes
from attnlens.tensors import numpy_dtype
from attnlens.v1.encoder_service_pb2 import (
    EmbedRequest,
    EncodeRequest,
    ExplainRequest,
    Input,
    TokenizeRequest,
)
from attnlens.v1.explanation_pb2 import ExplainMethod
from attnlens_client.arguments import AttentionQuery
from attnlens_client.core.requests import prompt_bytes
from attnlens_client.model_info import Limits, ModelInfo

# Room for what stands around the tensors of a message.
_USABLE_SHARE = 0.9
# An upper bound for the bytes of a Token message whose text is short, and of what else a text has.
_TOKEN_BYTES = 64
_MESSAGE_BYTES = 64
# An upper bound for the number of a token's unit.
_UNIT_BYTES = 5
# An upper bound for what stands around a text in a request.
TEXT_OVERHEAD_BYTES = 16
# A request fills at most the queue divided by this.
_QUEUE_PARTS = 4


class Cost(NamedTuple):
    """What a text takes of four limits."""

    request_bytes: int
    response_bytes: int
    text_bytes: int
    computed_tokens: int = 0


def embed_response_bytes(request: EmbedRequest, model: ModelInfo) -> int:
    """Return the bytes that each text takes in a response."""
    width = request.dimensions or model.embedding_size
    return width * numpy_dtype(request.data_type).itemsize + _MESSAGE_BYTES


def encode_response_bytes(
    request: EncodeRequest, queries: Sequence[AttentionQuery], texts: Iterable[Input], model: ModelInfo
) -> list[int]:
    """Return for each text an upper bound of its bytes in a response.

    The number of tokens is not known here: at most one for each byte, special tokens aside.
    """
    item = numpy_dtype(request.data_type).itemsize
    width = model.hidden_size if request.last_hidden_state else 0
    maps = sum(_num_maps(query, model) for query in queries if query.reduction is None)
    reduced = [query for query in queries if query.reduction is not None]
    added = prompt_bytes(request, model)
    sizes = []
    for text in texts:
        tokens = min(model.max_tokens, text.ByteSize() + added)
        result = tokens * (width * item + _TOKEN_BYTES) + maps * tokens * tokens * item
        result += sum(_reduced_bytes(query, model, tokens, item) for query in reduced)
        sizes.append(result + _MESSAGE_BYTES)
    return sizes


def _num_maps(query: AttentionQuery, model: ModelInfo) -> int:
    """Return how many arrays (T, T) a query brings at most."""
    num_layers, num_heads = _num_layers_and_heads(query, model)
    return num_layers * num_heads


def _num_layers_and_heads(query: AttentionQuery, model: ModelInfo) -> tuple[int, int]:
    outputs = [output for output in model.outputs if output.role == query.role]
    heads = max((output.num_heads for output in outputs), default=model.num_heads)
    num_heads = 1 if query.view == "head_mean" else len(query.heads or ()) or heads
    return len(query.layers or ()) or len(outputs) or model.num_layers, num_heads


def _reduced_bytes(query: AttentionQuery, model: ModelInfo, num_tokens: int, value_bytes: int) -> int:
    """Return the bytes that a reduction brings at most of a text, whose units are at most its tokens."""
    num_layers, num_heads = _num_layers_and_heads(query, model)
    reduction = query.reduction
    if reduction is None:
        return 0
    sums_to_one = query.role == "attention_weights"
    of_layer = data_bytes(
        reduction, num_heads, num_tokens, value_bytes=value_bytes, is_distribution=sums_to_one
    )
    return (1 if reduction.joins_layers else num_layers) * (of_layer + num_tokens * _UNIT_BYTES)


def tokenize_response_bytes(request: TokenizeRequest, texts: Iterable[Input], model: ModelInfo) -> list[int]:
    """Return for each text an upper bound of its bytes in a response: a token for each byte."""
    added = prompt_bytes(request, model)
    return [(text.ByteSize() + added) * _TOKEN_BYTES + _MESSAGE_BYTES for text in texts]


def explain_response_bytes(request: ExplainRequest, texts: Iterable[Input], model: ModelInfo) -> list[int]:
    """Return for each text an upper bound of its bytes in a response: a token for each byte."""
    added = prompt_bytes(request, model)
    token_bytes = _TOKEN_BYTES + 5 + 4 * len(request.methods)
    fixed = _MESSAGE_BYTES * (1 + len(request.methods))
    fixed += 4 * model.num_layers * model.num_heads if request.head_contributions else 0
    return [min(model.max_tokens, text.ByteSize() + added) * token_bytes + fixed for text in texts]


def explain_computed_tokens(request: ExplainRequest, texts: Sequence[Input], model: ModelInfo) -> list[int]:
    """Return an upper bound of the compute cost of each text: a token for each byte."""
    leaves_out = ExplainMethod.EXPLAIN_METHOD_LEAVE_ONE_OUT in request.methods
    width = request.dimensions or model.embedding_size
    num_sweeps = width if ExplainMethod.EXPLAIN_METHOD_CONTRIBUTION_NORM in request.methods else 0
    return [
        masked_runs_cost(tokens, tokens if leaves_out else 0) + sweeps_cost(tokens, num_sweeps)
        for tokens in _max_tokens(request, texts, model)
    ]


def encode_computed_tokens(
    request: EncodeRequest, queries: Sequence[AttentionQuery], texts: Sequence[Input], model: ModelInfo
) -> list[int]:
    """Return an upper bound of the compute cost of each text: a token for each byte."""
    reduced = [query for query in queries if query.reduction is not None]
    costs = {
        tokens: sum(_reduction_cost(query, model, tokens) for query in reduced)
        for tokens in {*_max_tokens(request, texts, model)}
    }
    return [costs[tokens] for tokens in _max_tokens(request, texts, model)]


def _reduction_cost(query: AttentionQuery, model: ModelInfo, num_tokens: int) -> int:
    if query.reduction is None:
        return 0
    return reduction_cost(
        query.reduction,
        len(query.layers or ()) or model.num_layers,
        len(query.heads or ()) or model.num_heads,
        num_tokens,
        is_mean_of_heads=query.view == "head_mean",
        token_flops=flops_per_token(model.hidden_size, model.intermediate_size, model.num_layers),
    )


def _max_tokens(
    request: EncodeRequest | ExplainRequest, texts: Iterable[Input], model: ModelInfo
) -> Iterator[int]:
    added = prompt_bytes(request, model)
    return (min(model.max_tokens, text.ByteSize() + added) for text in texts)


def split(costs: Sequence[Cost], limits: Limits, batch_size: int, fixed_bytes: int = 0) -> Iterator[slice]:
    """Cut texts into runs that each fit the server's limits; a text that fits nowhere stands alone.

    Args:
        costs: what each text takes, shape (N,).
        limits: those of the server; 0 is unknown.
        batch_size: the most texts of a run.
        fixed_bytes: what a request takes besides its texts.
    """
    most_texts = _most_texts(limits, batch_size)
    most = (
        limits.max_request_bytes * _USABLE_SHARE or math.inf,
        limits.max_response_bytes * _USABLE_SHARE or math.inf,
        limits.max_request_text_bytes or math.inf,
        limits.max_computed_tokens or math.inf,
    )
    empty = (fixed_bytes, 0, 0, 0)
    start, used = 0, empty
    for index, cost in enumerate(costs):
        used = _sum(used, cost)
        is_full = index - start == most_texts or any(map(operator.gt, used, most))
        if index > start and is_full:
            yield slice(start, index)
            start, used = index, _sum(empty, cost)
    if start < len(costs):
        yield slice(start, len(costs))


def _sum(one: tuple[int, int, int, int], other: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2], one[3] + other[3]


def _most_texts(limits: Limits, batch_size: int) -> int:
    """Return the most texts of one request.

    A request is taken as a whole or refused, so one that needs most of the queue to be free is seldom
    taken while others are served.
    """
    share = (
        max(1, limits.max_concurrent_inputs // _QUEUE_PARTS) if limits.max_concurrent_inputs else batch_size
    )
    return min(batch_size, limits.max_inputs_per_request or batch_size, share)


def calls_at_a_time(max_in_flight: int, batch_size: int, model: ModelInfo | None) -> int:
    """Return how many calls to keep running, so that one caller alone never overfills the queue."""
    if model is None or not model.limits.max_concurrent_inputs:
        return max_in_flight
    room = model.limits.max_concurrent_inputs // _most_texts(model.limits, batch_size)
    return max(1, min(max_in_flight, room))
