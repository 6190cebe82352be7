"""What a method will do: which calls carry its texts, and what becomes of their responses. Nothing is sent.

Letters: N texts.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, Unpack

import grpc

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens_client import messages, parsing, splitting
from attnlens_client.errors import InvalidRequestError
from attnlens_client.messages import EmbedOptions, EncodeOptions, Text
from attnlens_client.results import Embeddings, EncodedText, ModelInfo, TokenizedText

Request = TypeVar("Request", pb.EmbedRequest, pb.EncodeRequest, pb.TokenizeRequest)
Response = TypeVar("Response")
Result = TypeVar("Result")

# One text up to this size is sent without asking for the server's limits first.
_SHORT_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Generic[Request, Response, Result]):
    """The calls of one method.

    Attributes:
        template: the request without its texts.
        texts: the N texts, as `template` takes them.
        text_bytes: the UTF-8 bytes of each, shape (N,); 0 for token ids, prompts aside.
        prompt_bytes: those that the server puts before each text, for a model.
        costs: the bytes that each text takes in a message, shape (N,), for a model.
        parse: makes the result of all responses; with no texts there are none, and a model may be needed.
        needs_model: whether the model's sizes and limits must be known.
    """

    template: Request
    texts: Sequence[Any]
    text_bytes: Sequence[int]
    prompt_bytes: Callable[[ModelInfo], int] = lambda _: 0
    costs: Callable[[ModelInfo], list[int]]
    parse: Callable[[Sequence[Response], ModelInfo | None], Result]
    needs_model: bool

    @property
    def model(self) -> str:
        """The model's name."""
        return self.template.model

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
            runs = splitting.split(self.costs(model), sizes, model.limits, batch_size)
        for run in runs:
            request = type(self.template)()
            request.CopyFrom(self.template)
            field = request.texts if isinstance(request, pb.TokenizeRequest) else request.inputs
            field.extend(self.texts[run])
            if model is not None:
                _check_message(run.start, request.ByteSize(), model.limits.max_message_bytes)
            yield run.start, request


def embed(
    texts: Iterable[Text], **options: Unpack[EmbedOptions]
) -> Plan[pb.EmbedRequest, pb.EmbedResponse, Embeddings]:
    """Plan `embed`."""
    inputs, template = messages.inputs(texts), messages.embed_request(**options)

    def parse(responses: Sequence[pb.EmbedResponse], model: ModelInfo | None) -> Embeddings:
        return (
            parsing.embeddings(responses)
            if model is None or inputs
            else parsing.no_embeddings(template, model)
        )

    return Plan(
        template=template,
        texts=inputs,
        text_bytes=[len(each.text.encode()) for each in inputs],
        prompt_bytes=lambda model: messages.prompt_bytes(template, model),
        costs=lambda model: splitting.embed_costs(template, inputs, model),
        parse=parse,
        needs_model=not inputs or _is_much(each.ByteSize() for each in inputs),
    )


def encode(
    texts: Iterable[Text], **options: Unpack[EncodeOptions]
) -> Plan[pb.EncodeRequest, pb.EncodeResponse, list[EncodedText]]:
    """Plan `encode` and the streams."""
    inputs, template = messages.inputs(texts), messages.encode_request(**options)
    return Plan(
        template=template,
        texts=inputs,
        text_bytes=[len(each.text.encode()) for each in inputs],
        costs=lambda model: splitting.encode_costs(template, inputs, model),
        parse=lambda responses, _: parsing.encoded_texts(responses),
        needs_model=_is_much(each.ByteSize() for each in inputs),
    )


def tokenize(
    texts: Iterable[str], model: str
) -> Plan[pb.TokenizeRequest, pb.TokenizeResponse, list[TokenizedText]]:
    """Plan `tokenize`."""
    strings = messages.strings(texts)
    return Plan(
        template=pb.TokenizeRequest(model=model),
        texts=strings,
        text_bytes=(sizes := [len(each.encode()) for each in strings]),
        costs=lambda _: splitting.tokenize_costs(sizes),
        parse=lambda responses, _: parsing.tokenized_texts(responses),
        needs_model=_is_much(sizes),
    )


def _is_much(sizes_bytes: Iterable[int]) -> bool:
    sizes = list(sizes_bytes)
    return len(sizes) > 1 or sum(sizes) > _SHORT_BYTES


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
