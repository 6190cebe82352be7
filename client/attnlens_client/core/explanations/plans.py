"""What `explain` and `compare` will do. Nothing is sent."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from attnlens.tensors import to_tensor
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.explanation_pb2 import ExplainLevel, ExplainMethod, PairMatrix
from attnlens.v1.tensor_pb2 import DataType, Tensor
from attnlens_client.arguments import (
    ExplainLevelName,
    ExplainMethodName,
    PairMatrixName,
    PoolingName,
    Text,
    checked_dimensions,
)
from attnlens_client.core import enums, requests, splitting
from attnlens_client.core.explanations.replies import ExplanationReader
from attnlens_client.core.plans import Plan
from attnlens_client.explanations import Comparison, Explanation
from attnlens_client.model_info import ModelInfo

ExplainPlan: TypeAlias = Plan[pb.ExplainRequest, pb.ExplainResponse, list[Explanation]]

_METHODS = enums.values(ExplainMethod.DESCRIPTOR)
_LEVELS = enums.values(ExplainLevel.DESCRIPTOR)
_MATRICES = enums.values(PairMatrix.DESCRIPTOR)


@dataclass(frozen=True, slots=True)
class ComparePlan:
    """The only call of `compare`, and what its response is read with."""

    request: pb.CompareRequest
    reader: ExplanationReader

    def parse(self, response: pb.CompareResponse) -> Comparison:
        """Return the comparison.

        Raises:
            BadReplyError: the response is not what was asked for.
        """
        return self.reader.comparison(response, self.request.matrix)


def explain(
    texts: Iterable[Text],
    *,
    to: Text | None = None,
    rather_than: Text | None = None,
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
    """Plan `Client.explain`, whose arguments these are."""
    names = _method_names(methods)
    template = pb.ExplainRequest(
        model=model,
        truncate=truncate,
        prompt=requests.prompt(prompt_name, prompt),
        pooling=requests.pooling_value(pooling),
        dimensions=checked_dimensions(dimensions),
        target_prompt=requests.prompt(target_prompt_name, target_prompt),
        methods=[_chosen("methods", name, _METHODS) for name in names],
        level=_chosen("level", level, _LEVELS),
        head_contributions=head_contributions,
    )
    _set_target(template, to, rather_than, direction)
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

    def sizes(told: ModelInfo) -> list[int]:
        return splitting.explain_response_bytes(template, inputs, told)

    return Plan(
        method="Explain",
        template=template,
        inputs=inputs,
        response_bytes=sizes,
        parse=lambda received, _: reader.texts(received),
        computed_tokens=lambda told: splitting.explain_computed_tokens(template, inputs, told),
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
    """Plan `Client.compare`, whose arguments these are."""
    names = _method_names(methods)
    request = pb.CompareRequest(
        model=model,
        pairs=[pb.ComparedPair(a=requests.one_input("a", a), b=requests.one_input("b", b))],
        truncate=truncate,
        prompt_a=requests.prompt(prompt_name_a, prompt_a),
        prompt_b=requests.prompt(prompt_name_b, prompt_b),
        pooling=requests.pooling_value(pooling),
        dimensions=checked_dimensions(dimensions),
        methods=[_chosen("methods", name, _METHODS) for name in names],
        level=_chosen("level", level, _LEVELS),
        head_contributions=head_contributions,
        matrix=_chosen("matrix", matrix, _MATRICES) if matrix else PairMatrix.PAIR_MATRIX_UNSPECIFIED,
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
    rather_than: Text | None, direction: Sequence[float] | npt.NDArray[np.floating[Any]] | None
) -> float:
    """Return |d|, or the largest that it can be: the difference of two vectors of length 1 has at most 2."""
    if direction is not None:
        return float(np.linalg.norm(np.asarray(direction, dtype=np.float64)))
    return 1.0 if rather_than is None else 2.0


def _set_target(
    template: pb.ExplainRequest,
    to: Text | None,
    rather_than: Text | None,
    direction: Sequence[float] | npt.NDArray[np.floating[Any]] | None,
) -> None:
    """Put what is explained into a request.

    Raises:
        TypeError, ValueError: the arguments do not go together, or one can't be sent.
    """
    if rather_than is not None and to is None:
        raise ValueError("rather_than needs to: explain to this text rather than that one")
    if direction is not None and to is not None:
        raise ValueError("to and direction are both given: choose one")
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
        raise TypeError(f"direction is {type(direction).__name__}: give a vector of numbers") from error
    if vector.ndim != 1 or not vector.size:
        raise ValueError(f"direction has the shape {vector.shape}: give one vector")
    return to_tensor(vector, DataType.DATA_TYPE_FLOAT32)


def _method_names(
    methods: ExplainMethodName | Sequence[ExplainMethodName],
) -> tuple[ExplainMethodName, ...]:
    """Return the methods as a tuple.

    Raises:
        ValueError: there is none, one twice, or an unknown one.
    """
    names: tuple[ExplainMethodName, ...] = (methods,) if isinstance(methods, str) else tuple(methods)
    for name in names:
        _chosen("methods", name, dict.fromkeys(get_args(ExplainMethodName), 0))
    if not names or len({*names}) < len(names):
        raise ValueError(f"methods is {methods!r}: give each method once, and at least one")
    return names


def _chosen(name: str, value: str, choices: dict[str, int]) -> Any:  # noqa: ANN401 - a type of enum
    if value not in choices:
        raise ValueError(f"{name} is {value!r}: choose one of {', '.join(choices)}")
    return choices[value]
