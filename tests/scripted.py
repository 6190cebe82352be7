"""Scripted EncoderService without a model: it replies, fails or waits as specified by a test."""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar

import grpc
import numpy as np

from attnlens.tensors import from_tensor, to_tensor
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceServicer, add_EncoderServiceServicer_to_server
from attnlens.v1.error_pb2 import ErrorDetails, ErrorReason, FieldViolation
from attnlens.v1.explanation_pb2 import ExplainMethod
from attnlens.v1.manifest_pb2 import Activation, Architecture, LayerInfo, OutputLayout, OutputRole, RowSum
from attnlens.v1.model_pb2 import Limits, Model
from attnlens.v1.tensor_pb2 import DataType, Tensor

Embed: TypeAlias = Callable[[pb.EmbedRequest, grpc.ServicerContext], pb.EmbedResponse]
_Reply = TypeVar("_Reply")

NAME = "scripted"
VERSION = "1a2b"
HIDDEN_SIZE = 4
NUM_LAYERS = 2
NUM_HEADS = 2
LAYOUTS = {
    OutputRole.OUTPUT_ROLE_ATTENTION_WEIGHTS: OutputLayout.OUTPUT_LAYOUT_DENSE,
    OutputRole.OUTPUT_ROLE_HEAD_GATES: OutputLayout.OUTPUT_LAYOUT_PER_TOKEN,
}


def model(**limits: int) -> Model:
    """Return the description of the only model."""
    layers = [LayerInfo(attention="softmax", num_heads=NUM_HEADS)] * NUM_LAYERS
    sizes = Architecture(hidden_size=HIDDEN_SIZE, num_layers=NUM_LAYERS, num_heads=NUM_HEADS, layers=layers)
    told = Model(
        name=NAME,
        version=VERSION,
        architecture=sizes,
        max_tokens=16,
        limits=Limits(**limits),
        embedding_size=HIDDEN_SIZE,
    )
    for role, layout in LAYOUTS.items():
        for layer in range(NUM_LAYERS):
            told.outputs.add(role=role, layer=layer, layout=layout, num_heads=NUM_HEADS)
    return told


def characters(text: pb.Input) -> str:
    """Return the characters of a text or pair, or one letter per token id."""
    return text.text or text.text_pair.first + text.text_pair.second or "i" * len(text.token_ids.input_ids)


def vectors(request: pb.EmbedRequest) -> pb.EmbedResponse:
    """Return an EmbedResponse: all elements of a text's vector are its number of characters."""
    rows = [[len(characters(text))] * (request.dimensions or HIDDEN_SIZE) for text in request.inputs]
    return pb.EmbedResponse(
        model=NAME,
        model_version=VERSION,
        embeddings=_tensor(rows, request.data_type),
        usages=[_usage(1) for _ in rows],
    )


def tokens(text: pb.Input) -> list[pb.Token]:
    """Return the tokens of a text, one per character."""
    if text.HasField("text_pair"):
        pair = (
            (text.text_pair.first, pb.TOKEN_SOURCE_TEXT),
            (
                text.text_pair.second,
                pb.TOKEN_SOURCE_SECOND_TEXT,
            ),
        )
        return [pb.Token(text=char, source=source) for one, source in pair for char in one]
    source = pb.TOKEN_SOURCE_IDS if text.HasField("token_ids") else pb.TOKEN_SOURCE_TEXT
    return [pb.Token(text=char, source=source) for char in characters(text)]


def encoded(request: pb.EncodeRequest | pb.EncodeStreamRequest) -> pb.EncodeResponse:
    """Return an EncodeResponse: each character is a token with uniform attention."""
    response = pb.EncodeResponse(model=NAME, model_version=VERSION)
    for text in request.inputs:
        described = tokens(text)
        count = len(described)
        result = response.results.add(tokens=described, usage=_usage(count))
        if request.last_hidden_state or not request.attention:
            ones = np.ones((count, HIDDEN_SIZE))
            result.last_hidden_state.CopyFrom(_tensor(ones, request.data_type))
        for number, query in enumerate(request.attention):
            result.attention.append(_attention(number, query, count, request.data_type))
    return response


def _attention(
    number: int, query: pb.AttentionQuery, count: int, data_type: DataType.ValueType
) -> pb.AttentionResult:
    layers = [layer % NUM_LAYERS for layer in query.layers] or range(NUM_LAYERS)
    heads = [head % NUM_HEADS for head in query.heads] or range(NUM_HEADS)
    num_maps = 1 if query.view == pb.ATTENTION_VIEW_HEAD_MEAN else len(heads)
    result = pb.AttentionResult(
        query_index=number,
        role=query.role or OutputRole.OUTPUT_ROLE_ATTENTION_WEIGHTS,
        view=query.view or pb.ATTENTION_VIEW_FULL,
        layers=layers,
        heads=heads,
        row_sum=RowSum.ROW_SUM_ONE,
    )
    if LAYOUTS[result.role] == OutputLayout.OUTPUT_LAYOUT_DENSE:
        weights = np.full((len(layers), num_maps, count, count), 1 / max(1, count))
        result.dense.CopyFrom(_tensor(weights, data_type))
    else:
        result.per_token.CopyFrom(_tensor(np.ones((len(layers), count, num_maps)), data_type))
    return result


def explained(request: pb.ExplainRequest) -> pb.ExplainResponse:
    """Return an ExplainResponse: equal contributions of all characters; half the target is baseline."""
    response = pb.ExplainResponse(model=NAME, model_version=VERSION)
    for text in request.inputs:
        described = tokens(text)
        count = len(described)
        result = response.results.add(tokens=described, usage=_usage(count), target_value=1)
        scores = result.scores.add(
            method=ExplainMethod.EXPLAIN_METHOD_CONTRIBUTIONS, baseline=0.5, sum=1, expected_sum=1
        )
        scores.values.CopyFrom(_tensor([0.5 / count] * count, DataType.DATA_TYPE_FLOAT32))
    return response


def scored(request: pb.ScoreRequest) -> pb.ScoreResponse:
    """Return a ScoreResponse: the logit is the number of characters of the document."""
    response = pb.ScoreResponse(model=NAME, model_version=VERSION, activation=Activation.ACTIVATION_IDENTITY)
    documents = [*request.documents, *(pair.second for pair in request.pairs)]
    for index, document in enumerate(documents):
        result = response.results.add(index=index, logit=len(document), score=len(document), num_parts=1)
        if request.HasField("explanation"):
            _explain(result, request.query, document)
        response.usages.append(_usage(1))
    if request.documents:
        response.results.sort(key=lambda result: -result.logit)
        del response.results[request.top_n or len(documents) :]
    return response


def _explain(result: pb.ScoreResult, query: str, document: str) -> None:
    """Add equal contributions of all characters; half the logit is baseline."""
    half = result.logit / 2
    explained = result.explanation
    explained.tokens.extend(tokens(pb.Input(text_pair=pb.TextPair(first=query, second=document))))
    count = len(explained.tokens)
    explained.usage.CopyFrom(_usage(count))
    explained.target_value = result.logit
    scores = explained.scores.add(
        method=ExplainMethod.EXPLAIN_METHOD_CONTRIBUTIONS,
        baseline=half,
        sum=result.logit,
        expected_sum=result.logit,
    )
    scores.values.CopyFrom(_tensor([half / count] * count, DataType.DATA_TYPE_FLOAT32))
    explained.sums_by_source.text = half
    explained.sums_by_source.baseline = half


def classified(request: pb.ClassifyRequest) -> pb.ClassifyResponse:
    """Return a ClassifyResponse: the logits are the number of characters, and its negative."""
    rows = [[len(characters(text)), -len(characters(text))] for text in request.inputs]
    return pb.ClassifyResponse(
        model=NAME,
        model_version=VERSION,
        labels=["long", "short"],
        logits=_tensor(rows, DataType.DATA_TYPE_FLOAT32),
        scores=_tensor(rows, DataType.DATA_TYPE_FLOAT32),
        activation=Activation.ACTIVATION_IDENTITY,
        usages=[_usage(1) for _ in rows],
    )


def streamed(request: pb.EncodeStreamRequest) -> list[pb.EncodeStreamResponse]:
    """Yield the `encoded` response as stream messages."""
    messages: list[pb.EncodeStreamResponse] = []
    for index, result in enumerate(encoded(request).results):
        queries = list(result.attention)
        result.ClearField("attention")
        text = pb.EncodeStreamResponse(model=NAME, model_version=VERSION, input_index=index, text=result)
        text.num_attention_parts = sum(len(query.layers) for query in queries)
        messages.append(text)
        for query in queries:
            data = query.WhichOneof("data")
            assert data is not None
            values = from_tensor(getattr(query, data))
            for place, layer in enumerate(query.layers):
                part = pb.EncodeStreamResponse(model=NAME, input_index=index, attention=query)
                part.attention.layers[:] = [layer]
                getattr(part.attention, data).CopyFrom(_tensor(values[place][None], request.data_type))
                messages.append(part)
    return messages


def _tensor(values: Any, data_type: DataType.ValueType) -> Tensor:
    return to_tensor(np.array(values, np.float32), data_type)


def _usage(num_tokens: int) -> pb.Usage:
    return pb.Usage(num_tokens=num_tokens, num_tokens_total=num_tokens)


class ScriptedServer(EncoderServiceServicer):
    """Context manager that runs the scripted server in this process.

    Tests may replace `embed` and `encode_stream`, which make the responses, and `change`, which edits every
    response before it is sent.
    """

    def __init__(self, **limits: int) -> None:
        self.limits = limits
        self.model = Model()  # other fields of GetModel
        self.port = 0
        self.requests: list[Any] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.embed: Embed = lambda request, _: vectors(request)
        self.encode_stream: Callable[[pb.EncodeStreamRequest], Iterable[pb.EncodeStreamResponse]] = streamed
        self.holds_streams = False  # after the first message, until the client cancels
        self.change: Callable[[Any], object] = lambda _: None
        self.waiting = threading.Semaphore(0)  # released once per held call
        self.cancelled = threading.Semaphore(0)  # released once per canceled call
        self._leaving = threading.Event()

    @property
    def address(self) -> str:
        """HOST:PORT of the server."""
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Listen, on the previous port if there is one."""
        self._leaving.clear()
        self._server = grpc.server(ThreadPoolExecutor(16), options=[("grpc.so_reuseport", 0)])
        add_EncoderServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()

    def stop(self) -> None:
        """Stop immediately."""
        self._leaving.set()
        self._server.stop(grace=None).wait()

    def wait_until_cancelled(self, context: grpc.ServicerContext) -> None:
        """Block a call until the client cancels it."""
        ended = self._noted_end(context)
        self.waiting.release()
        ended.wait(timeout=60)

    def _noted_end(self, context: grpc.ServicerContext) -> threading.Event:
        ended = threading.Event()

        def note() -> None:
            ended.set()
            if not self._leaving.is_set():
                self.cancelled.release()

        if not context.add_callback(note):
            note()  # already canceled
        return ended

    def _model(self) -> Model:
        told = model(**self.limits)
        told.MergeFrom(self.model)
        return told

    def GetModel(self, request: pb.GetModelRequest, context: grpc.ServicerContext) -> pb.GetModelResponse:  # noqa: N802
        self._note(request, context)
        return self._changed(pb.GetModelResponse(model=self._model()))

    def ListModels(  # noqa: N802
        self, request: pb.ListModelsRequest, context: grpc.ServicerContext
    ) -> pb.ListModelsResponse:
        self._note(request, context)
        return self._changed(pb.ListModelsResponse(models=[self._model()]))

    def Embed(self, request: pb.EmbedRequest, context: grpc.ServicerContext) -> pb.EmbedResponse:  # noqa: N802
        self._note(request, context)
        return self._changed(self.embed(request, context))

    def Encode(self, request: pb.EncodeRequest, context: grpc.ServicerContext) -> pb.EncodeResponse:  # noqa: N802
        self._note(request, context)
        return self._changed(encoded(request))

    def EncodeStream(  # noqa: N802
        self, request: pb.EncodeStreamRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.EncodeStreamResponse]:
        self._note(request, context)
        ended = self._noted_end(context)  # record now: the generator of a canceled call is not resumed
        for response in self.encode_stream(request):
            yield self._changed(response)
            if self.holds_streams:
                self.waiting.release()
                ended.wait(timeout=60)
                return

    def Tokenize(self, request: pb.TokenizeRequest, context: grpc.ServicerContext) -> pb.TokenizeResponse:  # noqa: N802
        self._note(request, context)
        results = [pb.TokenizedText(tokens=tokens(text)) for text in request.inputs]
        return self._changed(pb.TokenizeResponse(model=NAME, model_version=VERSION, results=results))

    def Explain(self, request: pb.ExplainRequest, context: grpc.ServicerContext) -> pb.ExplainResponse:  # noqa: N802
        self._note(request, context)
        return self._changed(explained(request))

    def Compare(self, request: pb.CompareRequest, context: grpc.ServicerContext) -> pb.CompareResponse:  # noqa: N802
        self._note(request, context)
        refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "NOT_SUPPORTED", "nothing is compared here")
        return pb.CompareResponse()

    def Score(self, request: pb.ScoreRequest, context: grpc.ServicerContext) -> pb.ScoreResponse:  # noqa: N802
        self._note(request, context)
        return self._changed(scored(request))

    def Classify(  # noqa: N802
        self, request: pb.ClassifyRequest, context: grpc.ServicerContext
    ) -> pb.ClassifyResponse:
        self._note(request, context)
        return self._changed(classified(request))

    def _changed(self, reply: _Reply) -> _Reply:
        self.change(reply)
        return reply

    def _note(self, request: Any, context: grpc.ServicerContext) -> None:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))


def violation(field: str, description: str, input_index: int | None = None) -> FieldViolation:
    """A field and its violation."""
    return FieldViolation(field=field, description=description, input_index=input_index)


def error_details(
    reason: str, *violations: FieldViolation, retry_delay_s: float | None = None, **metadata: str
) -> ErrorDetails:
    """Details of a server error. Reasons that the protocol does not define are omitted."""
    known = dict(ErrorReason.items()).get(f"ERROR_REASON_{reason}", ErrorReason.ERROR_REASON_UNSPECIFIED)
    details = ErrorDetails(reason=known, violations=violations, metadata=metadata)
    if retry_delay_s is not None:
        details.retry_delay.FromMilliseconds(round(retry_delay_s * 1000))
    return details


def refuse(
    context: grpc.ServicerContext,
    code: grpc.StatusCode,
    reason: str,
    message: str,
    *violations: FieldViolation,
    **details: Any,
) -> None:
    """Abort a call in the same way as an attnlens server."""
    if reason:
        packed = error_details(reason, *violations, **details).SerializeToString()
        context.set_trailing_metadata((("attnlens-error-reason", reason), ("attnlens-error-bin", packed)))
    context.abort(code, message)


def fails(
    code: grpc.StatusCode,
    reason: str,
    message: str,
    *violations: FieldViolation,
    times: int = 1,
    **details: Any,
) -> Embed:
    """Return an Embed handler that fails a number of times first."""
    left = [times]

    def embed(request: pb.EmbedRequest, context: grpc.ServicerContext) -> pb.EmbedResponse:
        left[0] -= 1
        if left[0] >= 0:
            refuse(context, code, reason, message, *violations, **details)
        return vectors(request)

    return embed


class _Garbled(grpc.GenericRpcHandler):
    def service(self, details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any]":
        if details.method.endswith("Stream"):
            return grpc.unary_stream_rpc_method_handler(lambda *_: iter([b"\xff"]))
        return grpc.unary_unary_rpc_method_handler(lambda *_: b"\xff")


@contextmanager
def garbled() -> Iterator[str]:
    """Yield the address of a server with undecodable responses."""
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((_Garbled(),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield address
    server.stop(None).wait()
