"""What a method will do: which calls carry its texts, and what becomes of their responses. Nothing is sent.

Letters: N texts.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Generic, TypeAlias, TypeVar

import numpy as np

from attnlens.tensors import numpy_dtype
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens_client.arguments import (
    AttentionQuery,
    DataTypeName,
    PoolingName,
    Text,
    checked_dimensions,
    whole_number,
)
from attnlens_client.core import replies, requests, splitting
from attnlens_client.core.checks import Agreed
from attnlens_client.core.events import Method
from attnlens_client.core.replies import EncodeReader, Reply
from attnlens_client.errors import refusal
from attnlens_client.model_info import ModelInfo
from attnlens_client.progress import Progress, checked_progress
from attnlens_client.results import Embeddings, EncodedText, TokenizedText

Request = TypeVar("Request", pb.EmbedRequest, pb.EncodeRequest, pb.TokenizeRequest, pb.ExplainRequest)
Response = TypeVar("Response", pb.EmbedResponse, pb.EncodeResponse, pb.TokenizeResponse, pb.ExplainResponse)
Result = TypeVar("Result")

# One text up to this size is sent without asking for the server's limits first.
_SHORT_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Generic[Request, Response, Result]):
    """The calls of one method.

    Attributes:
        method: the method of the service.
        template: the request without its texts.
        inputs: the N texts.
        response_bytes: what each takes in a response, shape (N,), for a model.
        parse: makes the result of the replies, and of a model where there are no texts and so no replies.
        queries: those of `template`, as they were given.
        progress: who is told how many texts are done.
        needs_fresh_model: whether the model must be asked for, even if it was seen before.
        computed_tokens: Upper bounds of the compute cost of each text, shape (N,), for a model. If None, 0.
        first: the number of the first text, where the plan is of some of many.
    """

    method: Method
    template: Request
    inputs: Sequence[pb.Input]
    response_bytes: Callable[[ModelInfo], Sequence[int]]
    parse: Callable[[Sequence[Reply[Response]], ModelInfo | None], Result]
    queries: tuple[AttentionQuery, ...] = ()
    progress: Progress = False
    needs_fresh_model: bool = False
    computed_tokens: Callable[[ModelInfo], Sequence[int]] | None = None
    first: int = 0

    @property
    def model(self) -> str:
        """The model's name."""
        return self.template.model

    @property
    def is_truncated(self) -> bool:
        """Whether the server cuts texts that are too long."""
        return not isinstance(self.template, pb.TokenizeRequest) and self.template.truncate

    @property
    def needs_model(self) -> bool:
        """Whether the model's sizes and limits must be known."""
        is_much = len(self.inputs) > 1 or sum(text.ByteSize() for text in self.inputs) > _SHORT_BYTES
        return is_much or self.needs_fresh_model

    def requests(self, model: ModelInfo | None, batch_size: int) -> Iterator[tuple[int, Request]]:
        """Yield the calls, in order, each with the number of its first text. `model` None: one call.

        Raises:
            InvalidRequestError: a text is larger than the server takes, alone or as a message.
        """
        runs: Iterable[slice] = [slice(0, None)] if self.inputs else []
        if model is not None:
            runs = splitting.split(self._costs(model), model.limits, batch_size, self.template.ByteSize())
        for run in runs:
            request = type(self.template)()
            request.CopyFrom(self.template)
            request.inputs.extend(self.inputs[run])
            if model is not None:
                _check_message(self.first + run.start, request.ByteSize(), model.limits.max_request_bytes)
            yield self.first + run.start, request

    def _costs(self, model: ModelInfo) -> list[splitting.Cost]:
        added, limit = requests.prompt_bytes(self.template, model), model.limits.max_text_bytes
        costs = []
        computed = self.computed_tokens(model) if self.computed_tokens else [0] * len(self.inputs)
        sizes = zip(self.inputs, self.response_bytes(model), computed, strict=True)
        for index, (text, response, computed_tokens) in enumerate(sizes, self.first):
            size = 0 if text.HasField("token_ids") else requests.num_bytes(text) + added
            if 0 < limit < size:
                what = " with the prompt" if added else ""
                # The first tokens can depend on any later part of a text: only the tokenizer can cut exactly.
                remedy = (
                    "truncate cuts tokens, for which the server needs the whole text. Send its beginning, or "
                    "start the server with a larger --max-text-bytes"
                    if self.is_truncated
                    else "send it in pieces"
                )
                raise refusal(f"has {size} bytes{what}, a text may have {limit}: {remedy}", text_index=index)
            request = text.ByteSize() + splitting.TEXT_OVERHEAD_BYTES
            costs.append(splitting.Cost(request, response, size, computed_tokens))
        return costs

    def result(self, responses: dict[int, Response], model: ModelInfo | None) -> Result:
        """Return the result of the calls, whose responses are by the number of the first text.

        Raises:
            BadReplyError: a response is not what was asked for.
        """
        firsts: list[int] = sorted(responses)
        ends = pairwise([*firsts, self.first + len(self.inputs)])
        return self.parse([(first, end - first, responses[first]) for first, end in ends], model)


EmbedPlan: TypeAlias = Plan[pb.EmbedRequest, pb.EmbedResponse, Embeddings]
EncodePlan: TypeAlias = Plan[pb.EncodeRequest, pb.EncodeResponse, list[EncodedText]]
TokenizePlan: TypeAlias = Plan[pb.TokenizeRequest, pb.TokenizeResponse, list[TokenizedText]]


@dataclass(frozen=True, slots=True)
class EmbedIterPlan:
    """The calls of `embed_iter`, made while its texts are read.

    Attributes:
        template: the request without its texts.
        inputs: the texts; they can be read once.
        total: how many there are; None: not known.
        batch_size, in_flight: as in `Client.embed_iter`.
        progress: who is told how many texts are done.
    """

    template: pb.EmbedRequest
    inputs: Iterator[pb.Input]
    total: int | None
    batch_size: int | None
    in_flight: int | None
    progress: Progress

    def batches(self, batch_size: int) -> Iterator[EmbedPlan]:
        """Yield plans of so many texts each, which must agree with each other."""
        agreed, first = replies.agreed_on(self.template), 0
        while batch := list(islice(self.inputs, batch_size)):
            yield _embed_plan(self.template, batch, agreed=agreed, first=first)
            first += len(batch)


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
    progress: Progress = False,
) -> EmbedPlan:
    """Plan `Client.embed`, whose arguments these are."""
    template = _embed_template(
        pooling, normalize, dimensions, requests.prompt(prompt_name, prompt), truncate, dtype, model
    )
    return _embed_plan(template, requests.inputs(texts), progress=checked_progress(progress))


def embed_iter(
    texts: Iterable[Text],
    *,
    batch_size: int | None = None,
    in_flight: int | None = None,
    pooling: PoolingName | None = None,
    normalize: bool | None = None,
    dimensions: int | None = None,
    prompt_name: str | None = None,
    prompt: str | None = None,
    truncate: bool = False,
    dtype: DataTypeName = "float32",
    model: str = "",
    progress: Progress = False,
) -> EmbedIterPlan:
    """Plan `Client.embed_iter`, whose arguments these are."""
    for name, number in (("batch_size", batch_size), ("in_flight", in_flight)):
        if number is not None and whole_number(name, number) < 1:
            raise ValueError(f"{name} is {number}: give 1 or more, or None for that of the client")
    template = _embed_template(
        pooling, normalize, dimensions, requests.prompt(prompt_name, prompt), truncate, dtype, model
    )
    total = len(texts) if isinstance(texts, Sized) else None
    inputs = requests.messages(texts)
    return EmbedIterPlan(template, inputs, total, batch_size, in_flight, checked_progress(progress))


def _embed_template(
    pooling: PoolingName | None,
    normalize: bool | None,
    dimensions: int | None,
    prompt: pb.Prompt | None,
    truncate: bool,
    dtype: DataTypeName,
    model: str,
) -> pb.EmbedRequest:
    if normalize is not None and not isinstance(normalize, (bool, np.bool_)):
        raise TypeError(f"normalize is {normalize!r}: give True, False, or None for the model's own")
    return pb.EmbedRequest(
        model=model,
        truncate=truncate,
        prompt=prompt,
        pooling=requests.pooling_value(pooling),
        normalize=None if normalize is None else bool(normalize),
        dimensions=checked_dimensions(dimensions),
        data_type=requests.data_type(dtype),
    )


def _embed_plan(
    template: pb.EmbedRequest,
    inputs: Sequence[pb.Input],
    *,
    agreed: Agreed | None = None,
    first: int = 0,
    progress: Progress = False,
) -> EmbedPlan:
    """Return the plan for some texts; `agreed` None: their replies need agree with no others."""

    def parse(received: Sequence[Reply[pb.EmbedResponse]], model: ModelInfo | None) -> Embeddings:
        if inputs or model is None:
            return replies.embeddings(template, agreed or replies.agreed_on(template), received)
        return _no_embeddings(template, model)

    return Plan(
        method="Embed",
        template=template,
        inputs=inputs,
        response_bytes=lambda model: [splitting.embed_response_bytes(template, model)] * len(inputs),
        parse=parse,
        needs_fresh_model=not inputs,  # it alone tells the width
        progress=progress,
        first=first,
    )


def encode(
    texts: Iterable[Text],
    *,
    attention: AttentionQuery | Sequence[AttentionQuery] | None = None,
    last_hidden_state: bool = True,
    prompt_name: str | None = None,
    prompt: str | None = None,
    truncate: bool = False,
    dtype: DataTypeName = "float32",
    model: str = "",
) -> EncodePlan:
    """Plan `Client.encode` and the streams, whose arguments these are."""
    queries = requests.listed_queries(attention)
    if not queries and not last_hidden_state:
        raise ValueError("attention is None and last_hidden_state is False: for tokens alone use tokenize")
    template = pb.EncodeRequest(
        model=model,
        truncate=truncate,
        prompt=requests.prompt(prompt_name, prompt),
        last_hidden_state=last_hidden_state,
        attention=[requests.query_message(query) for query in queries],
        data_type=requests.data_type(dtype),
    )
    inputs = requests.inputs(texts)
    return Plan(
        method="Encode",
        template=template,
        inputs=inputs,
        queries=queries,
        response_bytes=lambda model: splitting.encode_response_bytes(template, queries, inputs, model),
        computed_tokens=lambda model: splitting.encode_computed_tokens(template, queries, inputs, model),
        parse=lambda received, _: EncodeReader(template, inputs, queries).texts(received),
    )


def tokenize(
    texts: Iterable[Text],
    *,
    prompt_name: str | None = None,
    prompt: str | None = None,
    model: str = "",
) -> TokenizePlan:
    """Plan `Client.tokenize`, whose arguments these are."""
    template = pb.TokenizeRequest(model=model, prompt=requests.prompt(prompt_name, prompt))
    inputs = requests.inputs(texts)
    return Plan(
        method="Tokenize",
        template=template,
        inputs=inputs,
        response_bytes=lambda model: splitting.tokenize_response_bytes(template, inputs, model),
        parse=lambda received, _: replies.tokenized_texts(template, inputs, received),
    )


def _no_embeddings(request: pb.EmbedRequest, model: ModelInfo) -> Embeddings:
    """Return the vectors of no text: shape (0, D).

    Raises:
        InvalidRequestError: the model has fewer dimensions, or no such prompt.
    """
    if request.dimensions > model.max_dimensions:
        raise refusal(f"is {request.dimensions}: {model.name} has {model.max_dimensions}", field="dimensions")
    if request.prompt.HasField("name") and request.prompt.name not in model.prompts:
        known = ", ".join(model.prompts) or "none"
        raise refusal(f"is {request.prompt.name!r}: {model.name} has {known}", field="prompt_name")
    shape = (0, request.dimensions or model.embedding_size)
    return Embeddings(
        np.zeros(shape, numpy_dtype(request.data_type)),
        (),
        model.name,
        model.version,
        model.engine,
        model.precision,
    )


def _check_message(index: int, size: int, limit: int) -> None:
    # gRPC would refuse it as RESOURCE_EXHAUSTED, which is tried again. Only a text alone can be so large.
    if 0 < limit < size:
        raise refusal(
            f"makes a request of {size} bytes, the server takes {limit}: send it in pieces", text_index=index
        )
