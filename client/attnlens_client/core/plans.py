"""Plans: the calls of each method, created from its arguments, and how to parse their replies."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, Concatenate, Generic, ParamSpec, TypeAlias, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from attnlens.embedding_types import ranges_problem
from attnlens.signatures import check_arguments
from attnlens.tensors import numpy_dtype, to_tensor
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.explanation_pb2 import ExplainLevel, ExplainMethod, PairMatrix
from attnlens.v1.tensor_pb2 import DataType, Tensor
from attnlens_client.arguments import (
    AttentionQuery,
    DataTypeName,
    EmbeddingTypeName,
    ExplainLevelName,
    ExplainMethodName,
    PairMatrixName,
    PoolingName,
    Text,
    checked_dimensions,
    checked_int,
)
from attnlens_client.core import replies, requests, splitting
from attnlens_client.core.events import Method
from attnlens_client.core.explanations import ExplanationReader
from attnlens_client.core.replies import Consistency, Reply
from attnlens_client.core.streams import EncodeReader
from attnlens_client.errors import invalid_argument
from attnlens_client.explanations import Comparison, Explanation
from attnlens_client.model_info import ModelInfo
from attnlens_client.progress import Progress, checked_progress
from attnlens_client.results import Embeddings, EncodedText, TokenizedText

_P = ParamSpec("_P")
_Client = TypeVar("_Client")
_Plan = TypeVar("_Plan")
_Result = TypeVar("_Result")


def takes(
    make: Callable[_P, _Plan],
) -> Callable[[Callable[[_Client, _Plan], _Result]], Callable[Concatenate[_Client, _P], _Result]]:
    """Give a method the arguments of `make`, and call it with the plan that `make` returns.

    Type checkers, `help` and `inspect.signature` show the arguments of `make`.
    """
    signature = inspect.signature(make)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)

    def decorate(
        method: Callable[[_Client, _Plan], _Result],
    ) -> Callable[Concatenate[_Client, _P], _Result]:
        @functools.wraps(method)
        def with_arguments(client: _Client, /, *args: _P.args, **options: _P.kwargs) -> _Result:
            try:
                plan = make(*args, **options)
            except TypeError:
                check_arguments(f"{type(client).__name__}.{method.__name__}", signature, args, options)
                raise
            return method(client, plan)

        returned = inspect.signature(method).return_annotation
        with_arguments.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[own, *signature.parameters.values()], return_annotation=returned
        )
        return with_arguments

    return decorate


Request = TypeVar(
    "Request",
    pb.EmbedRequest,
    pb.EncodeRequest,
    pb.TokenizeRequest,
    pb.ExplainRequest,
    pb.ScoreRequest,
    pb.ClassifyRequest,
)
Response = TypeVar(
    "Response",
    pb.EmbedResponse,
    pb.EncodeResponse,
    pb.TokenizeResponse,
    pb.ExplainResponse,
    pb.ScoreResponse,
    pb.ClassifyResponse,
)
Result = TypeVar("Result")

# A single text up to this size is sent without requesting the server's limits first.
_SHORT_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Generic[Request, Response, Result]):
    """Calls of one method for N texts.

    Attributes:
        method: Method of the service.
        template: Request without inputs.
        inputs: Texts.
        response_bytes: Returns upper bounds of the response size of each text (N,), for a model.
        parse: Returns the result of all replies. Uses the model if there are no texts.
        queries: Attention queries.
        progress: Progress option.
        needs_fresh_model: Whether to call GetModel even if the model is cached.
        computed_tokens: Returns upper bounds of the computation of each text (N,), for a model. None means 0.
        first: Index of the first text, for plans of a part of the texts.
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
        """Requested model name."""
        return self.template.model

    @property
    def is_truncated(self) -> bool:
        """Whether the server truncates long texts."""
        if isinstance(self.template, pb.ScoreRequest):
            return self.template.long_documents == pb.LONG_DOCUMENTS_TRUNCATE
        return not isinstance(self.template, pb.TokenizeRequest) and self.template.truncate

    @property
    def needs_model(self) -> bool:
        """Whether to request the model's sizes and limits first."""
        is_large = len(self.inputs) > 1 or sum(text.ByteSize() for text in self.inputs) > _SHORT_BYTES
        return is_large or self.needs_fresh_model

    def requests(self, model: ModelInfo | None, batch_size: int) -> Iterator[tuple[int, Request]]:
        """Yield the index of the first text and the request of each call. Without a model there is one call.

        Raises:
            InvalidRequestError: A text exceeds a limit of the server.
        """
        parts: Iterable[slice] = [slice(0, None)] if self.inputs else []
        if model is not None:
            parts = splitting.split(self._costs(model), model.limits, batch_size, self.template.ByteSize())
        for part in parts:
            request = type(self.template)()
            request.CopyFrom(self.template)
            requests.add_inputs(request, self.inputs[part])
            if model is not None:
                _check_message(self.first + part.start, request.ByteSize(), model.limits.max_request_bytes)
            yield self.first + part.start, request

    def _costs(self, model: ModelInfo) -> list[splitting.Cost]:
        prompt_bytes, limit = requests.prompt_bytes(self.template, model), model.limits.max_text_bytes
        costs = []
        computed = self.computed_tokens(model) if self.computed_tokens else [0] * len(self.inputs)
        sizes = zip(self.inputs, self.response_bytes(model), computed, strict=True)
        for index, (text, response, computed_tokens) in enumerate(sizes, self.first):
            size = 0 if text.HasField("token_ids") else requests.num_bytes(text) + prompt_bytes
            if 0 < limit < size:
                with_prompt = " with the prompt" if prompt_bytes else ""
                # Only the tokenizer can truncate exactly: tokens may depend on later parts of a text.
                remedy = (
                    "truncate needs the whole text. Send its beginning, or start the server with a larger "
                    "--max-text-bytes"
                    if self.is_truncated
                    else "split the text"
                )
                problem = f"has {size} bytes{with_prompt}, but the limit is {limit}: {remedy}"
                field = f"{requests.inputs_name(self.template)}[{index}]"
                raise invalid_argument(problem, field=field, text_index=index)
            request = text.ByteSize() + splitting.TEXT_OVERHEAD_BYTES
            costs.append(splitting.Cost(request, response, size, computed_tokens))
        return costs

    def result(self, responses: dict[int, Response], model: ModelInfo | None) -> Result:
        """Return the result of all responses, given by the index of their first text.

        Raises:
            BadReplyError: A response is invalid.
        """
        firsts: list[int] = sorted(responses)
        ends = pairwise([*firsts, self.first + len(self.inputs)])
        return self.parse([(first, end - first, responses[first]) for first, end in ends], model)


EmbedPlan: TypeAlias = Plan[pb.EmbedRequest, pb.EmbedResponse, Embeddings]
EncodePlan: TypeAlias = Plan[pb.EncodeRequest, pb.EncodeResponse, list[EncodedText]]
TokenizePlan: TypeAlias = Plan[pb.TokenizeRequest, pb.TokenizeResponse, list[TokenizedText]]


@dataclass(frozen=True, slots=True)
class EmbedIterPlan:
    """Calls of `embed_iter`, created while the texts are read.

    Attributes:
        template: Request without inputs.
        inputs: Iterator of texts.
        total: Number of texts, or None if unknown.
        batch_size: Argument of `Client.embed_iter`.
        in_flight: Argument of `Client.embed_iter`.
        progress: Progress option.
    """

    template: pb.EmbedRequest
    inputs: Iterator[pb.Input]
    total: int | None
    batch_size: int | None
    in_flight: int | None
    progress: Progress

    def batches(self, batch_size: int) -> Iterator[EmbedPlan]:
        """Yield a plan for each batch. Their replies must be consistent."""
        consistency, first = replies.embed_consistency(self.template), 0
        while batch := list(islice(self.inputs, batch_size)):
            yield _embed_plan(self.template, batch, consistency=consistency, first=first)
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
    embedding_type: EmbeddingTypeName = "float",
    ranges: npt.ArrayLike | None = None,
    model: str = "",
    progress: Progress = False,
) -> EmbedPlan:
    """Plan `Client.embed`."""
    template = _embed_template(
        pooling, normalize, dimensions, requests.prompt(prompt_name, prompt), truncate, dtype, model
    )
    _set_embedding_type(template, embedding_type, ranges)
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
    embedding_type: EmbeddingTypeName = "float",
    ranges: npt.ArrayLike | None = None,
    model: str = "",
    progress: Progress = False,
) -> EmbedIterPlan:
    """Plan `Client.embed_iter`."""
    for name, number in (("batch_size", batch_size), ("in_flight", in_flight)):
        if number is not None and checked_int(name, number) < 1:
            raise ValueError(f"{name} is {number}: use 1 or more, or None for the value of the client")
    template = _embed_template(
        pooling, normalize, dimensions, requests.prompt(prompt_name, prompt), truncate, dtype, model
    )
    _set_embedding_type(template, embedding_type, ranges)
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
        raise TypeError(f"normalize is {normalize!r}: use True, False, or None for the default of the model")
    return pb.EmbedRequest(
        model=model,
        truncate=truncate,
        prompt=prompt,
        pooling=requests.pooling_value(pooling),
        normalize=None if normalize is None else bool(normalize),
        dimensions=checked_dimensions(dimensions),
        data_type=requests.data_type(dtype),
    )


def _set_embedding_type(
    template: pb.EmbedRequest, embedding_type: EmbeddingTypeName, ranges: npt.ArrayLike | None
) -> None:
    number = requests.choose("embedding_type", embedding_type, _EMBEDDING_TYPES)
    if number != pb.EMBEDDING_TYPE_FLOAT:
        template.embedding_type = number
        if template.data_type != DataType.DATA_TYPE_FLOAT32:
            raise ValueError(f"dtype is set, but embedding_type is {embedding_type!r}: omit it")
        template.ClearField("data_type")
    if ranges is not None:
        try:
            array = np.asarray(ranges, dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise TypeError(f"ranges is {type(ranges).__name__}: use an array of numbers (2, D)") from error
        if problem := ranges_problem(array, array.shape[-1] if array.ndim else 0):
            raise ValueError(f"ranges {problem}: use the minimum and maximum of each component")
        template.ranges.CopyFrom(to_tensor(array, DataType.DATA_TYPE_FLOAT32))


def _embed_plan(
    template: pb.EmbedRequest,
    inputs: Sequence[pb.Input],
    *,
    consistency: Consistency | None = None,
    first: int = 0,
    progress: Progress = False,
) -> EmbedPlan:
    """Return the plan for some texts. `consistency` is shared with other plans of the same method."""

    def parse(received: Sequence[Reply[pb.EmbedResponse]], model: ModelInfo | None) -> Embeddings:
        if inputs or model is None:
            return replies.embeddings(template, consistency or replies.embed_consistency(template), received)
        return _no_embeddings(template, model)

    return Plan(
        method="Embed",
        template=template,
        inputs=inputs,
        response_bytes=lambda model: [splitting.embed_response_bytes(template, model)] * len(inputs),
        parse=parse,
        needs_fresh_model=not inputs,  # the only source of the embedding size
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
    """Plan `Client.encode`, `encode_stream` and `encode_stream_parts`."""
    queries = requests.listed_queries(attention)
    if not queries and not last_hidden_state:
        raise ValueError("attention is None and last_hidden_state is False: use tokenize for tokens alone")
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
    """Plan `Client.tokenize`."""
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
    """Return embeddings of shape (0, D).

    Raises:
        InvalidRequestError: The model has fewer dimensions, or no such prompt.
    """
    if request.dimensions > model.max_dimensions:
        problem = f"is {request.dimensions}: use 1 to {model.max_dimensions}"
        raise invalid_argument(problem, field="dimensions")
    if request.prompt.HasField("name") and request.prompt.name not in model.prompts:
        names = ", ".join(model.prompts) or "none"
        problem = f"is {request.prompt.name!r}, but the prompts of {model.name} are {names}: use another name"
        raise invalid_argument(problem, field="prompt_name")
    shape = (0, requests.num_columns(request, model.embedding_size))
    return Embeddings(
        np.zeros(shape, numpy_dtype(requests.embedding_data_type(request))),
        (),
        model.name,
        model.version,
        model.engine,
        model.precision,
    )


def _check_message(index: int, size: int, limit: int) -> None:
    # gRPC would reject the message with RESOURCE_EXHAUSTED, which would be retried.
    if 0 < limit < size:
        problem = f"needs a request of {size} bytes, but the limit is {limit}: split the text"
        raise invalid_argument(problem, text_index=index)


ExplainPlan: TypeAlias = Plan[pb.ExplainRequest, pb.ExplainResponse, list[Explanation]]

_EMBEDDING_TYPES = requests.values(pb.EmbeddingType.DESCRIPTOR)
_METHODS = requests.values(ExplainMethod.DESCRIPTOR)
_LEVELS = requests.values(ExplainLevel.DESCRIPTOR)
_MATRICES = requests.values(PairMatrix.DESCRIPTOR)


@dataclass(frozen=True, slots=True)
class ComparePlan:
    """Call of `compare`."""

    request: pb.CompareRequest
    reader: ExplanationReader

    def parse(self, response: pb.CompareResponse) -> Comparison:
        """Return the comparison.

        Raises:
            BadReplyError: The response is invalid.
        """
        return self.reader.comparison(response, self.request.matrix)


def explain(
    texts: Iterable[Text],
    *,
    to: Text | None = None,
    rather_than: Text | int | None = None,
    label: str | int | None = None,
    direction: Sequence[float] | npt.NDArray[np.floating[Any]] | None = None,
    methods: ExplainMethodName | Sequence[ExplainMethodName] = "contributions",
    level: ExplainLevelName = "tokens",
    head_contributions: bool = False,
    pooling: PoolingName | None = None,
    dimensions: int | None = None,
    prompt_name: str | None = None,
    prompt: str | None = None,
    target_prompt_name: str | None = None,
    target_prompt: str | None = None,
    truncate: bool = False,
    model: str = "",
) -> ExplainPlan:
    """Plan `Client.explain`."""
    names = _method_names(methods)
    template = pb.ExplainRequest(
        model=model,
        truncate=truncate,
        prompt=requests.prompt(prompt_name, prompt),
        pooling=requests.pooling_value(pooling),
        dimensions=checked_dimensions(dimensions),
        target_prompt=requests.prompt(target_prompt_name, target_prompt),
        methods=[requests.choose("methods", name, _METHODS) for name in names],
        level=requests.choose("level", level, _LEVELS),
        head_contributions=head_contributions,
    )
    if label is None:
        _set_target(template, to, rather_than, direction)
    else:
        _set_label(template, label, rather_than, has_other_target=to is not None or direction is not None)
    inputs = requests.inputs(texts)
    reader = ExplanationReader(
        model,
        inputs,
        names,
        has_words=level == "words",
        has_heads=head_contributions,
        may_truncate=truncate,
        direction_length=_direction_length(rather_than, direction),
    )

    return Plan(
        method="Explain",
        template=template,
        inputs=inputs,
        response_bytes=lambda info: splitting.explain_response_bytes(template, inputs, info),
        parse=lambda received, _: reader.texts(received),
        computed_tokens=lambda info: splitting.explain_computed_tokens(template, inputs, info),
    )


def compare(
    a: Text,
    b: Text,
    *,
    matrix: PairMatrixName | None = None,
    methods: ExplainMethodName | Sequence[ExplainMethodName] = "contributions",
    level: ExplainLevelName = "tokens",
    head_contributions: bool = False,
    pooling: PoolingName | None = None,
    dimensions: int | None = None,
    prompt_name_a: str | None = None,
    prompt_a: str | None = None,
    prompt_name_b: str | None = None,
    prompt_b: str | None = None,
    truncate: bool = False,
    model: str = "",
) -> ComparePlan:
    """Plan `Client.compare`."""
    names = _method_names(methods)
    request = pb.CompareRequest(
        model=model,
        pairs=[pb.ComparedPair(a=requests.one_input("a", a), b=requests.one_input("b", b))],
        truncate=truncate,
        prompt_a=requests.prompt(prompt_name_a, prompt_a),
        prompt_b=requests.prompt(prompt_name_b, prompt_b),
        pooling=requests.pooling_value(pooling),
        dimensions=checked_dimensions(dimensions),
        methods=[requests.choose("methods", name, _METHODS) for name in names],
        level=requests.choose("level", level, _LEVELS),
        head_contributions=head_contributions,
        matrix=requests.choose("matrix", matrix, _MATRICES) if matrix else PairMatrix.PAIR_MATRIX_UNSPECIFIED,
    )
    reader = ExplanationReader(
        model,
        [request.pairs[0].a, request.pairs[0].b],
        names,
        has_words=level == "words",
        has_heads=head_contributions,
        may_truncate=truncate,
    )
    return ComparePlan(request, reader)


def _direction_length(
    rather_than: Text | int | None, direction: Sequence[float] | npt.NDArray[np.floating[Any]] | None
) -> float:
    """Return the norm of the direction, or its maximum: 2 for the difference of two unit vectors."""
    if direction is not None:
        return float(np.linalg.norm(np.asarray(direction, dtype=np.float64)))
    return 1.0 if rather_than is None else 2.0


def _set_label(
    template: pb.ExplainRequest, label: str | int, rather_than: Text | int | None, *, has_other_target: bool
) -> None:
    """Set a label, and the label to compare it with, as the target of a request.

    Raises:
        TypeError, ValueError: The arguments are incompatible, or a label is neither a name nor an index.
    """
    if has_other_target:
        raise ValueError("label is set in addition to to or direction: choose one")
    given = {"label": label} | ({} if rather_than is None else {"rather_than": rather_than})
    for name, value in given.items():
        message: pb.Label = getattr(template.label, name)
        if isinstance(value, str):
            message.name = value
        elif isinstance(value, int):
            message.index = checked_int(name, value)
        else:
            raise TypeError(f"{name} is {type(value).__name__}: use the name or index of a label")


def _set_target(
    template: pb.ExplainRequest,
    to: Text | None,
    rather_than: Text | int | None,
    direction: Sequence[float] | npt.NDArray[np.floating[Any]] | None,
) -> None:
    """Set the target of a request.

    Raises:
        TypeError, ValueError: The arguments are incompatible, or one cannot be encoded.
    """
    if rather_than is not None and (to is None or isinstance(rather_than, int)):
        if isinstance(rather_than, int):
            raise ValueError("rather_than is a label, but label is not set: set label")
        raise ValueError("rather_than is set, but to is not: set to, or label for a classifier")
    if direction is not None and to is not None:
        raise ValueError("to and direction are both set: choose one")
    if direction is not None:
        template.direction.CopyFrom(_vector(direction))
    elif to is not None and rather_than is not None:
        template.contrast.to.CopyFrom(requests.one_input("to", to))
        template.contrast.rather_than.CopyFrom(requests.one_input("rather_than", rather_than))
    elif to is not None:
        template.to.CopyFrom(requests.one_input("to", to))


def _vector(direction: Sequence[float] | npt.NDArray[np.floating[Any]]) -> Tensor:
    try:
        vector = np.asarray(direction, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise TypeError(f"direction is {type(direction).__name__}: use a vector of numbers") from error
    if vector.ndim != 1 or not vector.size:
        raise ValueError(f"direction has the shape {vector.shape}: use a vector (D,)")
    return to_tensor(vector, DataType.DATA_TYPE_FLOAT32)


def _method_names(
    methods: ExplainMethodName | Sequence[ExplainMethodName],
) -> tuple[ExplainMethodName, ...]:
    """Return the methods as a tuple.

    Raises:
        ValueError: There is no method, a repeated or an unknown one.
    """
    names: tuple[ExplainMethodName, ...] = (methods,) if isinstance(methods, str) else tuple(methods)
    for name in names:
        requests.choose("methods", name, dict.fromkeys(get_args(ExplainMethodName), 0))
    if not names or len({*names}) < len(names):
        raise ValueError(f"methods is {methods!r}: use at least one method, each once")
    return names
