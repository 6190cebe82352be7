"""Plans of `score`, `score_pairs`, `rerank` and `classify`, and validation of their replies.

Shapes: N texts, C labels.
"""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np

from attnlens.classifiers import ScoreActivation, scores_of
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.explanation_pb2 import ExplainLevel
from attnlens.v1.manifest_pb2 import Activation
from attnlens.v1.tensor_pb2 import DataType
from attnlens_client.arguments import (
    MAX_INT32,
    ActivationName,
    ExplainLevelName,
    LongDocumentsName,
    Text,
    checked_int,
)
from attnlens_client.core import requests, splitting
from attnlens_client.core.explanations import ExplanationReader
from attnlens_client.core.plans import Plan
from attnlens_client.core.replies import (
    Consistency,
    Reply,
    check_count,
    check_presence,
    checked_array,
    checked_usage,
    invalid_reply,
    invalid_text,
    precision_of,
)
from attnlens_client.explanations import Explanation
from attnlens_client.model_info import ModelInfo
from attnlens_client.progress import Progress, checked_progress
from attnlens_client.results import Array, Usage
from attnlens_client.scores import Classification, RankedDocument, Scores

ScorePlan: TypeAlias = Plan[pb.ScoreRequest, pb.ScoreResponse, Scores]
RerankPlan: TypeAlias = Plan[pb.ScoreRequest, pb.ScoreResponse, list[RankedDocument]]
ClassifyPlan: TypeAlias = Plan[pb.ClassifyRequest, pb.ClassifyResponse, Classification]

_ACTIVATIONS = requests.values(Activation.DESCRIPTOR)
_LONG_DOCUMENTS = requests.values(pb.LongDocuments.DESCRIPTOR)
_LEVELS = requests.values(ExplainLevel.DESCRIPTOR)
_TOLERANCE = 1e-6  # of scores, which the client computes again from their logits


def score(
    query: str,
    documents: Iterable[str],
    *,
    long_documents: LongDocumentsName = "truncate",
    max_tokens_per_document: int | None = None,
    activation: ActivationName | None = None,
    prompt_name: str | None = None,
    prompt: str | None = None,
    model: str = "",
    progress: Progress = False,
) -> ScorePlan:
    """Plan `Client.score`."""
    template = _score_template(
        long_documents, max_tokens_per_document, activation, requests.prompt(prompt_name, prompt), model
    )
    template.query = _checked_query(query)
    return _score_plan(template, _documents(documents), progress)


def score_pairs(
    pairs: Iterable[tuple[str, str]],
    *,
    long_documents: LongDocumentsName = "truncate",
    max_tokens_per_document: int | None = None,
    activation: ActivationName | None = None,
    prompt_name: str | None = None,
    prompt: str | None = None,
    model: str = "",
    progress: Progress = False,
) -> ScorePlan:
    """Plan `Client.score_pairs`."""
    template = _score_template(
        long_documents, max_tokens_per_document, activation, requests.prompt(prompt_name, prompt), model
    )
    inputs = requests.named_inputs("pairs", pairs)
    for index, each in enumerate(inputs):
        if not each.HasField("text_pair"):
            raise TypeError(f"pairs[{index}] is not a pair: use a tuple (query, document) of two str")
    return _score_plan(template, inputs, progress)


def rerank(
    query: str,
    documents: Iterable[str],
    *,
    top_n: int | None = None,
    long_documents: LongDocumentsName = "truncate",
    max_tokens_per_document: int | None = None,
    activation: ActivationName | None = None,
    prompt_name: str | None = None,
    prompt: str | None = None,
    explain: bool = False,
    level: ExplainLevelName = "words",
    model: str = "",
    progress: Progress = False,
) -> RerankPlan:
    """Plan `Client.rerank`."""
    template = _score_template(
        long_documents, max_tokens_per_document, activation, requests.prompt(prompt_name, prompt), model
    )
    template.query = _checked_query(query)
    template.top_n = _checked_count("top_n", top_n)
    unit = requests.choose("level", level, _LEVELS)
    if explain:
        template.explanation.level = unit
    inputs = _documents(documents)
    return Plan(
        method="Score",
        template=template,
        inputs=inputs,
        response_bytes=lambda info: splitting.rerank_response_bytes(template, inputs, info),
        parse=lambda received, _: _ranked(template, inputs, received),
        progress=checked_progress(progress),
    )


def classify(
    texts: Iterable[Text],
    *,
    activation: ActivationName | None = None,
    prompt_name: str | None = None,
    prompt: str | None = None,
    truncate: bool = False,
    model: str = "",
    progress: Progress = False,
) -> ClassifyPlan:
    """Plan `Client.classify`."""
    template = pb.ClassifyRequest(
        model=model,
        truncate=truncate,
        prompt=requests.prompt(prompt_name, prompt),
        activation=_activation_value(activation),
    )
    inputs = requests.inputs(texts)
    return Plan(
        method="Classify",
        template=template,
        inputs=inputs,
        response_bytes=lambda info: [splitting.classify_response_bytes(info)] * len(inputs),
        parse=lambda received, info: _classification(template, received, info),
        needs_fresh_model=not inputs,  # the only source of the labels
        progress=checked_progress(progress),
    )


def _score_template(
    long_documents: LongDocumentsName,
    max_tokens_per_document: int | None,
    activation: ActivationName | None,
    prompt: pb.Prompt | None,
    model: str,
) -> pb.ScoreRequest:
    return pb.ScoreRequest(
        model=model,
        long_documents=requests.choose("long_documents", long_documents, _LONG_DOCUMENTS),
        max_tokens_per_document=_checked_count("max_tokens_per_document", max_tokens_per_document),
        activation=_activation_value(activation),
        prompt=prompt,
    )


def _activation_value(activation: ActivationName | None) -> Activation.ValueType:
    if activation is None:
        return Activation.ACTIVATION_UNSPECIFIED
    names = {each.name.lower(): _ACTIVATIONS[each.name.lower()] for each in ScoreActivation}
    value: Activation.ValueType = requests.choose("activation", activation, names)
    return value


def _checked_query(query: str) -> str:
    if not isinstance(query, str):
        raise TypeError(f"query is {type(query).__name__}: use a str")
    if not query:
        raise ValueError("query is empty: use some text")
    try:
        query.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"query cannot be encoded: {error}") from error
    return query


def _documents(documents: Iterable[str]) -> list[pb.Input]:
    inputs = requests.named_inputs("documents", documents)
    for index, each in enumerate(inputs):
        if not each.HasField("text"):
            raise TypeError(f"documents[{index}] is not a text: use a str")
    return inputs


def _checked_count(name: str, count: int | None) -> int:
    if count is None:
        return 0
    number = checked_int(name, count)
    if not 1 <= number <= MAX_INT32:
        raise ValueError(f"{name} is {count}: use 1 to {MAX_INT32}, or None for all")
    return number


def _score_plan(template: pb.ScoreRequest, inputs: Sequence[pb.Input], progress: Progress) -> ScorePlan:
    return Plan(
        method="Score",
        template=template,
        inputs=inputs,
        response_bytes=lambda _: [splitting.score_response_bytes()] * len(inputs),
        parse=lambda received, info: _scores(template, len(inputs), received, info),
        needs_fresh_model=not inputs,
        progress=checked_progress(progress),
    )


# --- Replies --------------------------------------------------------------------------------------


def _checked_results(
    request: pb.ScoreRequest, replies: Sequence[Reply[pb.ScoreResponse]]
) -> tuple[list[tuple[int, pb.ScoreResult]], list[Usage]]:
    """Return all results with the index of their document or pair, and the usage of each input.

    Raises:
        BadReplyError: A reply is invalid or inconsistent.
    """
    consistency = Consistency(model=request.model, activation=request.activation)
    name, is_cut = requests.inputs_name(request), request.long_documents == pb.LONG_DOCUMENTS_TRUNCATE
    results: list[tuple[int, pb.ScoreResult]] = []
    usages: list[Usage] = []
    for first, count, response in replies:
        where = f"{name}[{first}:{first + count}]"
        consistency.check_model(response.model, response.model_version, where)
        consistency.check_computation(response.computation, where)
        consistency.check("activation", response.activation, where)
        check_count(len(response.usages), count, f"usages for {where}")
        check_count(len(response.results), min(request.top_n or count, count), f"results for {where}")
        indices = {result.index for result in response.results}
        if len(indices) < len(response.results) or not indices <= {*range(count)}:
            raise invalid_reply(f"the indices of {where} are repeated or out of range")
        usages += [
            checked_usage(usage, index, may_truncate=is_cut)
            for index, usage in enumerate(response.usages, first)
        ]
        logits = np.array([[result.logit] for result in response.results], np.float32)  # (N, 1)
        expected = _scores_of(logits, response.activation)[:, 0]
        for result, value in zip(response.results, expected, strict=True):
            index = first + result.index
            if not (np.isfinite(result.logit) and abs(result.score - value) <= _TOLERANCE * (1 + abs(value))):
                raise invalid_text(index, f"has the logit {result.logit} and the score {result.score}", name)
            if not 0 <= result.part < result.num_parts:
                raise invalid_text(index, f"has part {result.part} of {result.num_parts}", name)
            results.append((index, result))
    return results, usages


def _scores_of(logits: Array, activation: int) -> Array:
    if activation not in [*ScoreActivation]:
        raise invalid_reply(f"the activation is {activation}")
    return scores_of(logits, ScoreActivation(activation))


def _scores(
    request: pb.ScoreRequest,
    num_inputs: int,
    replies: Sequence[Reply[pb.ScoreResponse]],
    model: ModelInfo | None,
) -> Scores:
    results, usages = _checked_results(request, replies)
    scores, logits = np.zeros(num_inputs, np.float64), np.zeros(num_inputs, np.float32)
    num_parts, parts = np.ones(num_inputs, np.int32), np.zeros(num_inputs, np.int32)
    for index, result in results:
        scores[index], logits[index] = result.score, result.logit
        num_parts[index], parts[index] = result.num_parts, result.part
    if not replies:
        name, version, activation, engine, precision = _of_model(request.activation, model)
    else:
        _, _, last = replies[-1]
        name, version, engine = last.model, last.model_version, last.computation.engine
        activation, precision = _name(last.activation), precision_of(last.computation)
    return Scores(
        scores, logits, num_parts, parts, tuple(usages), activation, name, version, engine, precision
    )


def _ranked(
    request: pb.ScoreRequest, inputs: Sequence[pb.Input], replies: Sequence[Reply[pb.ScoreResponse]]
) -> list[RankedDocument]:
    results, _ = _checked_results(request, replies)
    results.sort(key=lambda each: (-each[1].logit, each[0]))
    return [
        RankedDocument(
            index,
            inputs[index].text,
            result.score,
            result.logit,
            result.num_parts,
            result.part,
            _explanation(request, inputs[index].text, index, result, replies[0][-1]),
        )
        for index, result in results[: request.top_n or None]
    ]


def _explanation(
    request: pb.ScoreRequest, document: str, index: int, result: pb.ScoreResult, response: pb.ScoreResponse
) -> Explanation | None:
    """Return the explanation of a result, if requested."""
    is_present, is_requested = result.HasField("explanation"), request.HasField("explanation")
    check_presence("an explanation", index, is_present=is_present, is_requested=is_requested)
    if not is_requested:
        return None
    pair = pb.Input(text_pair=pb.TextPair(first=request.query, second=document))
    reader = ExplanationReader(
        request.model,
        {index: pair},
        ["contributions"],
        has_words=request.explanation.level == ExplainLevel.EXPLAIN_LEVEL_WORDS,
        has_heads=False,
        may_truncate=request.long_documents == pb.LONG_DOCUMENTS_TRUNCATE,
    )
    return reader.of_score(index, result.explanation, response)


def _classification(
    request: pb.ClassifyRequest, replies: Sequence[Reply[pb.ClassifyResponse]], model: ModelInfo | None
) -> Classification:
    consistency = Consistency(model=request.model, activation=request.activation)
    logits: list[Array] = []
    scores: list[Array] = []
    usages: list[Usage] = []
    for first, count, response in replies:
        where = f"texts[{first}:{first + count}]"
        consistency.check_model(response.model, response.model_version, where)
        consistency.check_computation(response.computation, where)
        consistency.check("activation", response.activation, where)
        consistency.check("labels", "\n".join(response.labels), where)
        check_count(len(response.usages), count, f"usages for {where}")
        shape = (count, len(response.labels))
        for name, tensor, arrays in (
            ("logits", response.logits, logits),
            ("scores", response.scores, scores),
        ):
            arrays.append(checked_array(tensor, DataType.DATA_TYPE_FLOAT32, shape, f"{name} of {where}"))
        expected = _scores_of(logits[-1], response.activation)
        is_valid = np.isclose(scores[-1], expected, _TOLERANCE, _TOLERANCE).all(axis=1)
        is_valid &= np.isfinite(logits[-1]).all(axis=1)
        if not is_valid.all():
            raise invalid_text(first + int(is_valid.argmin()), "has scores that do not fit its logits")
        usages += [
            checked_usage(usage, index, may_truncate=request.truncate)
            for index, usage in enumerate(response.usages, first)
        ]
    if not replies:
        name, version, activation, engine, precision = _of_model(request.activation, model)
        labels = model.labels if model else ()
        empty = np.zeros((0, len(labels)), np.float32)
        return Classification(labels, empty, empty, (), activation, name, version, engine, precision)
    _, _, last = replies[-1]
    return Classification(
        tuple(last.labels),
        np.concatenate(logits),
        np.concatenate(scores),
        tuple(usages),
        _name(last.activation),
        last.model,
        last.model_version,
        last.computation.engine,
        precision_of(last.computation),
    )


def _name(activation: int) -> str:
    return requests.name_of(Activation.DESCRIPTOR, activation)


def _of_model(activation: int, model: ModelInfo | None) -> tuple[str, str, str, str, str]:
    """Return model, version, activation, engine and precision of a result without texts."""
    if model is None:
        return "", "", "", "", ""
    used = _name(activation) if activation else model.activation
    return model.name, model.version, used, model.engine, model.precision
