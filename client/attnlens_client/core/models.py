"""Models and tokens: from messages to the classes of results.py."""

from collections.abc import Iterable

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.manifest_pb2 import Activation, Dense, Pooling
from attnlens.v1.tensor_pb2 import DataType
from attnlens_client.core.checks import wrong_reply
from attnlens_client.results import DenseLayer, Limits, ModelInfo, Parity, ParityFigure, Token

_PRECISIONS: dict[DataType.ValueType, str] = {
    DataType.DATA_TYPE_FLOAT16: "fp16",
    DataType.DATA_TYPE_INT8: "int8",
}


def model(name: str, message: pb.Model) -> ModelInfo:
    """Read the model that was asked for by `name`; "" is any.

    Raises:
        BadReplyError: it is another one, or its sizes and limits can't be.
    """
    if name not in ("", message.name):
        raise wrong_reply(f"the model is {message.name!r} instead of {name!r}")
    info = model_info(message)
    for size in ("hidden_size", "num_layers", "num_heads", "embedding_size", "max_tokens"):
        if getattr(info, size) < 1:
            raise wrong_reply(f"the {size} of the model {info.name!r} is {getattr(info, size)}")
    for limit in message.limits.DESCRIPTOR.fields:
        if getattr(message.limits, limit.name) < 0:
            raise wrong_reply(f"the limit {limit.name} is {getattr(message.limits, limit.name)}")
    return info


def model_info(message: pb.Model) -> ModelInfo:
    """Read one model."""
    sizes, limits = message.architecture, message.limits
    return ModelInfo(
        name=message.name,
        source=message.source,
        weights_license=message.weights_license,
        family=sizes.family,
        hidden_size=sizes.hidden_size,
        num_layers=sizes.num_layers,
        num_heads=sizes.num_heads,
        intermediate_size=sizes.intermediate_size,
        vocab_size=sizes.vocab_size,
        max_position_embeddings=sizes.max_position_embeddings,
        is_causal=sizes.is_causal,
        embedding_size=message.embedding_size,
        pooling=_enum_name(Pooling, message.pooling.pooling),
        dense=tuple(_dense_layer(layer) for layer in message.pooling.dense),
        normalize=message.pooling.normalize,
        exclude_prompt=message.pooling.exclude_prompt,
        prompts=dict(sorted(message.prompts.items())),
        default_prompt_name=message.default_prompt_name,
        max_tokens=message.max_tokens,
        limits=Limits(
            max_inputs_per_request=limits.max_inputs_per_request,
            max_text_bytes=limits.max_text_bytes,
            max_queue=limits.max_queue,
            max_batch_tokens=limits.max_batch_tokens,
            max_message_bytes=limits.max_message_bytes,
            max_request_text_bytes=limits.max_request_text_bytes,
            max_request_bytes=limits.max_request_bytes,
        ),
        execution_providers=tuple(message.execution_providers),
        precision=_PRECISIONS.get(message.precision, "fp32"),
        parity=_parity(message),
        versions=dict(message.versions),
    )


def _dense_layer(message: Dense) -> DenseLayer:
    return DenseLayer(
        in_features=message.in_features,
        out_features=message.out_features,
        bias=message.bias,
        activation=_enum_name(Activation, message.activation),
        normalize_input=message.normalize_input,
    )


def _enum_name(enum: type[Pooling] | type[Activation], number: int) -> str:
    """Return the name of a value, such as "mean"; a newer server may have values that are not known here."""
    names: dict[int, str] = {value: name for name, value in enum.items()}
    prefix = f"{enum.DESCRIPTOR.name.upper()}_"
    return names[number].removeprefix(prefix).lower() if number in names else f"unknown ({number})"


def _parity(message: pb.Model) -> Parity:
    parity = message.parity
    return Parity(
        passed=parity.passed,
        tolerance=parity.tolerance,
        reference_error_ratio=parity.reference_error_ratio,
        num_cases=parity.num_cases,
        figures=tuple(
            ParityFigure(
                graph=figure.graph,
                output=figure.output,
                max_abs_error=figure.max_abs_error,
                max_abs_error_float64=figure.max_abs_error_float64,
                torch_abs_error_float64=figure.torch_abs_error_float64,
                mean_abs_error=figure.mean_abs_error,
                p99_abs_error=figure.p99_abs_error,
                min_cosine=figure.min_cosine,
            )
            for figure in parity.figures
        ),
    )


def tokens(messages: Iterable[pb.Token]) -> tuple[Token, ...]:
    """Read the tokens of a text."""
    return tuple(
        Token(
            id=token.id,
            text=token.text,
            byte_start=token.byte_start,
            byte_end=token.byte_end,
            char_start=token.char_start,
            char_end=token.char_end,
            word_index=token.word_index if token.HasField("word_index") else None,
            is_special=token.is_special,
        )
        for token in messages
    )
