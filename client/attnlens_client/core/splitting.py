"""Splitting of texts into calls within the limits of the server.

Shapes: N texts, T tokens of a text.
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
    ScoreRequest,
    TokenizeRequest,
)
from attnlens.v1.explanation_pb2 import ExplainMethod
from attnlens_client.arguments import AttentionQuery
from attnlens_client.core.requests import embedding_data_type, num_columns, prompt_bytes
from attnlens_client.model_info import Limits, ModelInfo

# The rest is for everything but tensors in a message.
_USABLE_SHARE = 0.9
# Upper bounds of the size of a Token message with a short text, and of other fields of a text, in bytes.
_TOKEN_BYTES = 64
_MESSAGE_BYTES = 64
# Upper bound of the size of a token's unit index, in bytes.
_UNIT_BYTES = 5
# Upper bound of the overhead of a text in a request, in bytes.
TEXT_OVERHEAD_BYTES = 16
# A request uses at most this fraction of the queue: 1 / _QUEUE_PARTS.
_QUEUE_PARTS = 4


class Cost(NamedTuple):
    """Resources of a text that the server limits."""

    request_bytes: int
    response_bytes: int
    text_bytes: int
    computed_tokens: int = 0


def embed_response_bytes(request: EmbedRequest, model: ModelInfo) -> int:
    """Return the size of each text in a response."""
    width = num_columns(request, model.embedding_size)
    return width * numpy_dtype(embedding_data_type(request)).itemsize + _MESSAGE_BYTES


def score_response_bytes() -> int:
    """Return the size of each document or pair in a response."""
    return _MESSAGE_BYTES


def rerank_response_bytes(request: ScoreRequest, documents: Sequence[Input], model: ModelInfo) -> list[int]:
    """Return upper bounds of the size of each document in a response, assuming one token per byte."""
    if not request.HasField("explanation"):
        return [score_response_bytes()] * len(documents)
    pair_bytes = len(request.query.encode()) + prompt_bytes(request, model)
    token_bytes = _TOKEN_BYTES + _UNIT_BYTES + 4
    return [
        min(model.max_tokens, document.ByteSize() + pair_bytes) * token_bytes + 4 * _MESSAGE_BYTES
        for document in documents
    ]


def classify_response_bytes(model: ModelInfo) -> int:
    """Return the size of each text in a response: logits and scores in float32."""
    return 2 * 4 * len(model.labels) + _MESSAGE_BYTES


def encode_response_bytes(
    request: EncodeRequest, queries: Sequence[AttentionQuery], texts: Iterable[Input], model: ModelInfo
) -> list[int]:
    """Return upper bounds of the size of each text in a response, assuming one token per byte."""
    item = numpy_dtype(request.data_type).itemsize
    width = model.hidden_size if request.last_hidden_state else 0
    maps = sum(_num_maps(query, model) for query in queries if query.reduction is None)
    reduced = [query for query in queries if query.reduction is not None]
    prompt_size = prompt_bytes(request, model)
    sizes = []
    for text in texts:
        tokens = min(model.max_tokens, text.ByteSize() + prompt_size)
        result = tokens * (width * item + _TOKEN_BYTES) + maps * tokens * tokens * item
        result += sum(_reduced_bytes(query, model, tokens, item) for query in reduced)
        sizes.append(result + _MESSAGE_BYTES)
    return sizes


def _num_maps(query: AttentionQuery, model: ModelInfo) -> int:
    """Return the maximum number of arrays (T, T) of a query."""
    num_layers, num_heads = _num_layers_and_heads(query, model)
    return num_layers * num_heads


def _num_layers_and_heads(query: AttentionQuery, model: ModelInfo) -> tuple[int, int]:
    outputs = [output for output in model.outputs if output.role == query.role]
    heads = max((output.num_heads for output in outputs), default=model.num_heads)
    num_heads = 1 if query.view == "head_mean" else len(query.heads or ()) or heads
    return len(query.layers or ()) or len(outputs) or model.num_layers, num_heads


def _reduced_bytes(query: AttentionQuery, model: ModelInfo, num_tokens: int, value_bytes: int) -> int:
    """Return an upper bound of the size of a reduction's result for a text."""
    num_layers, num_heads = _num_layers_and_heads(query, model)
    reduction = query.reduction
    if reduction is None:
        return 0
    sums_to_one = query.role == "attention_weights"
    layer_bytes = data_bytes(
        reduction, num_heads, num_tokens, value_bytes=value_bytes, is_distribution=sums_to_one
    )
    return (1 if reduction.joins_layers else num_layers) * (layer_bytes + num_tokens * _UNIT_BYTES)


def tokenize_response_bytes(request: TokenizeRequest, texts: Iterable[Input], model: ModelInfo) -> list[int]:
    """Return upper bounds of the size of each text in a response, assuming one token per byte."""
    prompt_size = prompt_bytes(request, model)
    return [(text.ByteSize() + prompt_size) * _TOKEN_BYTES + _MESSAGE_BYTES for text in texts]


def explain_response_bytes(request: ExplainRequest, texts: Iterable[Input], model: ModelInfo) -> list[int]:
    """Return upper bounds of the size of each text in a response, assuming one token per byte."""
    prompt_size = prompt_bytes(request, model)
    token_bytes = _TOKEN_BYTES + 5 + 4 * len(request.methods)
    fixed = _MESSAGE_BYTES * (1 + len(request.methods))
    fixed += 4 * model.num_layers * model.num_heads if request.head_contributions else 0
    return [min(model.max_tokens, text.ByteSize() + prompt_size) * token_bytes + fixed for text in texts]


def explain_computed_tokens(request: ExplainRequest, texts: Sequence[Input], model: ModelInfo) -> list[int]:
    """Return upper bounds of the computation of each text, assuming one token per byte."""
    has_masked_runs = ExplainMethod.EXPLAIN_METHOD_LEAVE_ONE_OUT in request.methods
    width = request.dimensions or model.embedding_size
    num_sweeps = width if ExplainMethod.EXPLAIN_METHOD_CONTRIBUTION_NORM in request.methods else 0
    return [
        masked_runs_cost(tokens, tokens if has_masked_runs else 0) + sweeps_cost(tokens, num_sweeps)
        for tokens in _max_tokens(request, texts, model)
    ]


def encode_computed_tokens(
    request: EncodeRequest, queries: Sequence[AttentionQuery], texts: Sequence[Input], model: ModelInfo
) -> list[int]:
    """Return upper bounds of the computation of each text, assuming one token per byte."""
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
    prompt_size = prompt_bytes(request, model)
    return (min(model.max_tokens, text.ByteSize() + prompt_size) for text in texts)


def split(costs: Sequence[Cost], limits: Limits, batch_size: int, fixed_bytes: int = 0) -> Iterator[slice]:
    """Yield consecutive parts of the texts within the limits. A text over a limit is a part of its own.

    Args:
        costs: Cost of each text (N,).
        limits: Limits of the server. 0 means unknown.
        batch_size: Maximum number of texts of a part.
        fixed_bytes: Size of a request without its texts.
    """
    max_texts = _max_texts(limits, batch_size)
    maxima = (
        limits.max_request_bytes * _USABLE_SHARE or math.inf,
        limits.max_response_bytes * _USABLE_SHARE or math.inf,
        limits.max_request_text_bytes or math.inf,
        limits.max_computed_tokens or math.inf,
    )
    empty = (fixed_bytes, 0, 0, 0)
    start, used = 0, empty
    for index, cost in enumerate(costs):
        used = _sum(used, cost)
        is_full = index - start == max_texts or any(map(operator.gt, used, maxima))
        if index > start and is_full:
            yield slice(start, index)
            start, used = index, _sum(empty, cost)
    if start < len(costs):
        yield slice(start, len(costs))


def _sum(one: tuple[int, int, int, int], other: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2], one[3] + other[3]


def _max_texts(limits: Limits, batch_size: int) -> int:
    """Return the maximum number of texts of one request.

    The server accepts or rejects a request as a whole, so one that needs most of the queue is rarely accepted
    while others are running.
    """
    share = (
        max(1, limits.max_concurrent_inputs // _QUEUE_PARTS) if limits.max_concurrent_inputs else batch_size
    )
    return min(batch_size, limits.max_inputs_per_request or batch_size, share)


def max_concurrent_calls(max_in_flight: int, batch_size: int, model: ModelInfo | None) -> int:
    """Return the maximum number of concurrent calls with which one client cannot fill the queue."""
    if model is None or not model.limits.max_concurrent_inputs:
        return max_in_flight
    capacity = model.limits.max_concurrent_inputs // _max_texts(model.limits, batch_size)
    return max(1, min(max_in_flight, capacity))
