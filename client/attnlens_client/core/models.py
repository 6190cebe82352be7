"""Conversion of `attnlens.v1.Model` to `ModelInfo`."""

import dataclasses
from collections.abc import Iterable
from typing import Any, TypeVar

from google.protobuf.message import Message

from attnlens.v1 import explanation_pb2 as explanation
from attnlens.v1 import manifest_pb2 as manifest
from attnlens.v1 import model_pb2 as pb
from attnlens_client.core.replies import invalid_reply
from attnlens_client.core.requests import name_of
from attnlens_client.model_info import (
    Dense,
    EngineCheck,
    Faithfulness,
    Gate,
    LayerInfo,
    Limits,
    LongContext,
    ModelInfo,
    OutputInfo,
    Parity,
    ParityFigure,
    PublisherComparison,
    PublisherFigure,
)

_T = TypeVar("_T")


def model(name: str, message: pb.Model) -> ModelInfo:
    """Validate and convert a requested model. An empty name matches any model.

    Raises:
        BadReplyError: The model has a different name, or invalid sizes or limits.
    """
    if name not in ("", message.name):
        raise invalid_reply(f"the model is {message.name!r}, expected {name!r}")
    info = model_info(message)
    for size in ("hidden_size", "num_layers", "num_heads", "embedding_size", "max_tokens"):
        if getattr(info, size) < (0 if size == "embedding_size" and info.labels else 1):
            raise invalid_reply(f"the {size} of the model {info.name!r} is {getattr(info, size)}")
    for limit in message.limits.DESCRIPTOR.fields:
        if getattr(message.limits, limit.name) < 0:
            raise invalid_reply(f"the limit {limit.name} is {getattr(message.limits, limit.name)}")
    return info


def model_info(message: pb.Model) -> ModelInfo:
    """Convert a model without validation."""
    sizes, parity = message.architecture, message.parity
    return ModelInfo(
        name=message.name,
        version=message.version,
        state=name_of(pb.ModelState.DESCRIPTOR, message.state),
        source=message.source,
        source_revision=message.source_revision,
        weights_license=message.weights_license,
        family=sizes.family,
        hidden_size=sizes.hidden_size,
        num_layers=sizes.num_layers,
        num_heads=sizes.num_heads,
        intermediate_size=sizes.intermediate_size,
        vocab_size=sizes.vocab_size,
        max_position_embeddings=sizes.max_position_embeddings,
        is_causal=sizes.is_causal,
        layers=_all(LayerInfo, sizes.layers),
        outputs=tuple(_output(output) for output in message.outputs),
        embedding_size=message.embedding_size,
        pooling=name_of(manifest.Pooling.DESCRIPTOR, message.pooling.pooling),
        dense=_all(Dense, message.pooling.dense),
        normalize=message.pooling.normalize,
        exclude_prompt=message.pooling.exclude_prompt,
        prompts=dict(sorted(message.prompts.items())),
        default_prompt_name=message.default_prompt_name,
        supports_text_pairs=message.supports_text_pairs,
        max_tokens=message.max_tokens,
        limits=_read(Limits, message.limits),
        execution_providers=tuple(message.execution_providers),
        precision=name_of(manifest.Precision.DESCRIPTOR, message.precision),
        parity=Parity(
            passed=parity.passed,
            num_cases=parity.num_cases,
            gates=_all(Gate, parity.gates),
            figures=_all(ParityFigure, parity.figures),
            long_context=_long_context(parity.long_context) if parity.HasField("long_context") else None,
        ),
        versions=dict(message.versions),
        explain_methods=tuple(
            name_of(explanation.ExplainMethod.DESCRIPTOR, each) for each in message.explain_methods
        ),
        pair_matrices=tuple(
            name_of(explanation.PairMatrix.DESCRIPTOR, each) for each in message.pair_matrices
        ),
        faithfulness=tuple(_faithfulness(each) for each in message.faithfulness),
        engine=message.engine,
        device=message.device,
        engine_check=_engine_check(message.engine_check) if message.HasField("engine_check") else None,
        labels=tuple(message.classifier.labels),
        activation=_activation(message),
        publisher=_publisher(message.publisher) if message.HasField("publisher") else None,
        similarity=_similarity(message),
        tokenizer_choice=message.tokenizer_choice,
        chat_template=_chat_template(message.chat_template) if message.HasField("chat_template") else None,
    )


def _activation(message: pb.Model) -> str:
    """Return the name of a classifier's activation, or an empty string for an embedding model."""
    if not message.HasField("classifier"):
        return ""
    return name_of(manifest.Activation.DESCRIPTOR, message.classifier.activation)


def _similarity(message: pb.Model) -> str:
    """Return the name of the function. Older servers only know the cosine."""
    if message.HasField("classifier"):
        return ""
    return name_of(manifest.Similarity.DESCRIPTOR, message.similarity or manifest.SIMILARITY_COSINE)


def _chat_template(message: manifest.ChatTemplate) -> tuple[str, str]:
    return message.without_prompt.before_text, message.without_prompt.after_text


def _publisher(message: manifest.PublisherComparison) -> PublisherComparison:
    return PublisherComparison(
        library=message.library,
        versions=dict(message.versions),
        figures=_all(PublisherFigure, message.figures),
        not_compared=tuple(message.not_compared),
        longest_tokens=message.longest_tokens,
    )


def _long_context(message: manifest.LongContext) -> LongContext:
    long_context = _read(LongContext, message)
    if message.HasField("hidden_states_error"):
        return long_context
    return dataclasses.replace(long_context, hidden_states_error=None)


def _faithfulness(message: explanation.Faithfulness) -> Faithfulness:
    return Faithfulness(
        method="" if message.control else name_of(explanation.ExplainMethod.DESCRIPTOR, message.method),
        rank_correlation=message.rank_correlation,
        num_texts=message.num_texts,
        interval_low=message.interval_low if message.HasField("interval_low") else None,
        interval_high=message.interval_high if message.HasField("interval_high") else None,
        control=message.control,
    )


def _engine_check(message: manifest.EngineCheck) -> EngineCheck:
    return EngineCheck(
        engine=message.engine,
        version=message.version,
        precision=name_of(manifest.Precision.DESCRIPTOR, message.precision),
        device=message.device,
        processor=message.processor,
        passed=message.passed,
        num_cases=message.num_cases,
        num_texts=message.num_texts,
        gates=_all(Gate, message.gates),
        figures=_all(ParityFigure, message.figures),
    )


def _output(message: manifest.GraphOutput) -> OutputInfo:
    return OutputInfo(
        role=name_of(manifest.OutputRole.DESCRIPTOR, message.role),
        layer=message.layer if message.HasField("layer") else None,
        layout=name_of(manifest.OutputLayout.DESCRIPTOR, message.layout),
        num_heads=message.num_heads,
        row_sum=name_of(manifest.RowSum.DESCRIPTOR, message.row_sum),
    )


def _all(kind: type[_T], messages: Iterable[Message]) -> tuple[_T, ...]:
    return tuple(_read(kind, message) for message in messages)


def _read(kind: type[_T], message: Message) -> _T:
    """Return a dataclass with the message fields of the same names. Enums become names."""
    fields = message.DESCRIPTOR.fields_by_name
    values: dict[str, Any] = {}
    for name in kind.__annotations__:
        value = getattr(message, name)
        enum: Any = fields[name].enum_type
        values[name] = value if enum is None else name_of(enum, value)
    return kind(**values)
