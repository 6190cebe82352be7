"""What a method will do: which calls carry its texts, and what becomes of their responses. Nothing is sent.

Letters: N texts.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, TypeAlias, TypeVar

import grpc
import numpy as np

from attnlens.tensors import numpy_dtype
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.manifest_pb2 import Pooling
from attnlens_client.core import replies, requests, splitting
from attnlens_client.core.events import Method
from attnlens_client.core.replies import Reply
from attnlens_client.core.requests import (
    HEAD_REDUCTIONS,
    MAX_INT32,
    POOLINGS,
    DataTypeName,
    HeadReductionName,
    PoolingName,
    Text,
    chosen,
    chosen_numbers,
    data_type,
    sendable,
)
from attnlens_client.errors import InvalidRequestError
from attnlens_client.results import Embeddings, EncodedText, ModelInfo, TokenizedText

Request = TypeVar("Request", pb.EmbedRequest, pb.EncodeRequest, pb.TokenizeRequest)
Response = TypeVar("Response", pb.EmbedResponse, pb.EncodeResponse, pb.TokenizeResponse)
Result = TypeVar("Result")

# One text up to this size is sent without asking for the server's limits first.
_SHORT_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Generic[Request, Response, Result]):
    """The calls of one method.

    Attributes:
        method: the method of the service.
        template: the request without its texts.
        texts: the N texts, as `template` takes them.
        request_bytes: what each takes in a request, shape (N,).
        response_bytes: what each takes in a response, shape (N,), for a model.
        text_bytes: the UTF-8 bytes of each, shape (N,); 0 for token ids, prompts aside.
        prompt_bytes: those that the server puts before each text, for a model.
        parse: makes the result of the replies, and of a model where there are no texts and so no replies.
    """

    method: Method
    template: Request
    texts: Sequence[Any]
    request_bytes: Sequence[int]
    response_bytes: Callable[[ModelInfo], Sequence[int]]
    text_bytes: Sequence[int]
    prompt_bytes: Callable[[ModelInfo], int] = lambda _: 0
    parse: Callable[[Sequence[Reply[Response]], ModelInfo | None], Result]
    needs_fresh_model: bool = False

    @property
    def model(self) -> str:
        """The model's name."""
        return self.template.model

    @property
    def needs_model(self) -> bool:
        """Whether the model's sizes and limits must be known."""
        is_much = len(self.texts) > 1 or sum(self.request_bytes) > _SHORT_BYTES
        return is_much or self.needs_fresh_model

    def requests(self, model: ModelInfo | None, batch_size: int) -> Iterator[tuple[int, Request]]:
        """Yield the calls, in order, each with the number of its first text. `model` None: one call.

        Raises:
            InvalidRequestError: a text is larger than the server takes, alone or as a message.
        """
        runs: Iterable[slice] = [slice(0, None)] if self.texts else []
        if model is not None:
            added = self.prompt_bytes(model)
            sizes = [size + added for size in self.text_bytes]
            _check_sizes(sizes, model.limits.max_text_bytes, " with the prompt" if added else "")
            costs = [
                splitting.Cost(request + splitting.TEXT_OVERHEAD_BYTES, response, text)
                for request, response, text in zip(
                    self.request_bytes, self.response_bytes(model), sizes, strict=True
                )
            ]
            runs = splitting.split(costs, model.limits, batch_size, self.template.ByteSize())
        for run in runs:
            request = type(self.template)()
            request.CopyFrom(self.template)
            field = request.texts if isinstance(request, pb.TokenizeRequest) else request.inputs
            field.extend(self.texts[run])
            if model is not None:
                _check_message(run.start, request.ByteSize(), model.limits.max_request_bytes)
            yield run.start, request

    def result(self, responses: dict[int, Response], model: ModelInfo | None) -> Result:
        """Return the result of the calls, whose responses are by the number of the first text.

        Raises:
            BadReplyError: a response is not what was asked for.
        """
        firsts: list[int] = sorted(responses)
        ends = pairwise([*firsts, len(self.texts)])
        return self.parse([(first, end - first, responses[first]) for first, end in ends], model)


EmbedPlan: TypeAlias = Plan[pb.EmbedRequest, pb.EmbedResponse, Embeddings]
EncodePlan: TypeAlias = Plan[pb.EncodeRequest, pb.EncodeResponse, list[EncodedText]]
TokenizePlan: TypeAlias = Plan[pb.TokenizeRequest, pb.TokenizeResponse, list[TokenizedText]]


def embed(
    texts: Iterable[Text],
    *,
    pooling: PoolingName | None = None,
    normalize: bool | None = None,
    dimensions: int | None = None,
    prompt_name: str | None = None,
    prompt: str | None = None,
    truncate: bool = False,
    dtype: DataTypeName = "float32",
    model: str = "",
) -> EmbedPlan:
    """Plan `Client.embed`, whose arguments these are."""
    if dimensions is not None and not 1 <= operator.index(dimensions) <= MAX_INT32:
        raise ValueError(f"dimensions is {dimensions}: give 1 to {MAX_INT32}, or None for all")
    if prompt_name is not None and prompt is not None:
        raise ValueError("prompt_name and prompt are both given: choose one")
    template = pb.EmbedRequest(
        model=model,
        truncate=truncate,
        pooling=Pooling.POOLING_UNSPECIFIED if pooling is None else chosen("pooling", pooling, POOLINGS),
        normalize=normalize,
        dimensions=dimensions or 0,
        data_type=data_type(dtype),
    )
    if prompt_name is not None:
        template.prompt_name = sendable("prompt_name", prompt_name)
    if prompt is not None:
        template.prompt = sendable("prompt", prompt)
    inputs = requests.inputs(texts)

    def parse(received: Sequence[Reply[pb.EmbedResponse]], model: ModelInfo | None) -> Embeddings:
        if inputs or model is None:
            return replies.embeddings(template, received)
        return _no_embeddings(template, model)

    return Plan(
        method="Embed",
        template=template,
        texts=inputs,
        request_bytes=[text.ByteSize() for text in inputs],
        response_bytes=lambda model: [splitting.embed_response_bytes(template, model)] * len(inputs),
        text_bytes=[len(text.text.encode()) for text in inputs],
        prompt_bytes=lambda model: requests.prompt_bytes(template, model),
        parse=parse,
        needs_fresh_model=not inputs,  # it alone tells the width
    )


def encode(
    texts: Iterable[Text],
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    head_reduction: HeadReductionName = "none",
    hidden_states: bool = True,
    attentions: bool = True,
    truncate: bool = False,
    dtype: DataTypeName = "float32",
    model: str = "",
) -> EncodePlan:
    """Plan `Client.encode` and the streams, whose arguments these are."""
    outputs = [
        output
        for wanted, output in (
            (hidden_states, pb.ENCODE_OUTPUT_LAST_HIDDEN_STATE),
            (attentions, pb.ENCODE_OUTPUT_ATTENTIONS),
        )
        if wanted
    ]
    if not outputs:
        raise ValueError("hidden_states and attentions are both False: for tokens alone use tokenize")
    chosen_layers, chosen_heads = chosen_numbers("layers", layers), chosen_numbers("heads", heads)
    reduction = chosen("head_reduction", head_reduction, HEAD_REDUCTIONS)
    if not attentions and (chosen_layers or chosen_heads or head_reduction != "none"):
        raise ValueError("layers, heads and head_reduction choose attention weights: set attentions=True")
    template = pb.EncodeRequest(
        model=model,
        truncate=truncate,
        outputs=outputs,
        layers=chosen_layers,
        heads=chosen_heads,
        head_reduction=reduction if attentions else pb.HEAD_REDUCTION_UNSPECIFIED,
        data_type=data_type(dtype),
    )
    inputs = requests.inputs(texts)
    return Plan(
        method="Encode",
        template=template,
        texts=inputs,
        request_bytes=[text.ByteSize() for text in inputs],
        response_bytes=lambda model: splitting.encode_response_bytes(template, inputs, model),
        text_bytes=[len(text.text.encode()) for text in inputs],
        parse=lambda received, _: replies.encoded_texts(template, received),
    )


def tokenize(texts: Iterable[str], *, model: str = "") -> TokenizePlan:
    """Plan `Client.tokenize`, whose arguments these are."""
    strings, template = requests.strings(texts), pb.TokenizeRequest(model=model)
    sizes = [len(text.encode()) for text in strings]
    return Plan(
        method="Tokenize",
        template=template,
        texts=strings,
        request_bytes=sizes,
        response_bytes=lambda _: splitting.tokenize_response_bytes(sizes),
        text_bytes=sizes,
        parse=lambda received, _: replies.tokenized_texts(template, received),
    )


def _no_embeddings(request: pb.EmbedRequest, model: ModelInfo) -> Embeddings:
    """Return the vectors of no text: shape (0, D).

    Raises:
        InvalidRequestError: the model has fewer dimensions, or no such prompt.
    """
    if request.dimensions > model.max_dimensions:
        raise InvalidRequestError(
            f"dimensions is {request.dimensions}: {model.name} has {model.max_dimensions}",
            grpc.StatusCode.INVALID_ARGUMENT,
        )
    if request.HasField("prompt_name") and request.prompt_name not in model.prompts:
        raise InvalidRequestError(
            f"prompt_name is {request.prompt_name!r}: {model.name} has {', '.join(model.prompts) or 'none'}",
            grpc.StatusCode.INVALID_ARGUMENT,
        )
    shape = (0, request.dimensions or model.embedding_size)
    return Embeddings(np.zeros(shape, numpy_dtype(request.data_type)), ())


def _check_sizes(text_bytes: Iterable[int], limit: int, what: str) -> None:
    for index, size in enumerate(text_bytes):
        if 0 < limit < size:
            raise InvalidRequestError(
                f"texts[{index}] has {size} bytes{what}, a text may have {limit}: send it in pieces",
                grpc.StatusCode.INVALID_ARGUMENT,
                text_index=index,
            )


def _check_message(index: int, size: int, limit: int) -> None:
    # gRPC would refuse it as RESOURCE_EXHAUSTED, which is tried again. Only a text alone can be so large.
    if 0 < limit < size:
        raise InvalidRequestError(
            f"texts[{index}] makes a request of {size} bytes, the server takes {limit}: send it in pieces",
            grpc.StatusCode.INVALID_ARGUMENT,
            text_index=index,
        )
