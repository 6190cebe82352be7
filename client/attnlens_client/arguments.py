"""Types of arguments: texts, attention queries, and names of choices."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from attnlens.reductions import AttentionReduction
from attnlens.short_repr import short_repr
from attnlens.signatures import checks_arguments

PoolingName: TypeAlias = Literal["mean", "cls", "max", "last_token", "weighted_mean", "mean_sqrt_length"]
DataTypeName: TypeAlias = Literal["float32", "float16"]
EmbeddingTypeName: TypeAlias = Literal["float", "int8", "uint8", "binary", "ubinary"]
RoleName: TypeAlias = Literal["attention_weights", "attention_composed", "head_gates"]
ViewName: TypeAlias = Literal["full", "head_mean", "dense"]
ExplainMethodName: TypeAlias = Literal[
    "contributions", "output_share", "leave_one_out", "rollout", "received_attention", "contribution_norm"
]
ExplainLevelName: TypeAlias = Literal["tokens", "words"]
ActivationName: TypeAlias = Literal["identity", "sigmoid", "softmax"]
LongDocumentsName: TypeAlias = Literal["truncate", "split", "reject"]
PairMatrixName: TypeAlias = Literal["output", "interaction", "input"]

MAX_INT32 = 2**31 - 1


@short_repr
@checks_arguments
@dataclass(frozen=True, slots=True)
class TokenIds:
    """A tokenized text. Special tokens must be included.

    Attributes:
        input_ids: Token ids, from 0 to the model's vocab_size - 1.
        token_type_ids: Type of each token. Empty means 0 for all.
    """

    input_ids: Sequence[int]
    token_type_ids: Sequence[int] = ()


# A text, a pair of texts for one input of the model, or token ids.
Text: TypeAlias = str | tuple[str, str] | Sequence[int] | TokenIds


@short_repr
@checks_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionQuery:
    """Selection of attention outputs to return for each text.

    Attributes:
        layers: Layers in the requested order. -1 is the last. None selects all with this output.
        heads: Heads in the requested order. -1 is the last. None selects all.
        view: "full" returns each head, "head_mean" the mean over heads as an axis of length 1, and "dense"
            each head with bands and blocks expanded to dense arrays.
        role: Output of the layers, one of those in `ModelInfo.outputs`.
        reduction: Reduction of the weights on the server, such as words, means or the largest weights. With a
            rollout, the view is "head_mean".

    Raises:
        TypeError: `layers` or `heads` is not a list of integers.
        ValueError: A list is empty, a name is unknown, or the reduction is invalid.

    >>> AttentionQuery(layers=[-1], view="head_mean").layers
    (-1,)
    """

    layers: Sequence[int] | None = None
    heads: Sequence[int] | None = None
    view: ViewName = "full"
    role: RoleName = "attention_weights"
    reduction: AttentionReduction | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", _numbers("layers", self.layers))
        object.__setattr__(self, "heads", _numbers("heads", self.heads))
        for name, value, known in (("view", self.view, ViewName), ("role", self.role, RoleName)):
            if value not in get_args(known):
                raise ValueError(f"{name} is {value!r}: use one of {', '.join(get_args(known))}")
        if self.reduction is not None:
            self._check_reduction(self.reduction)

    def _check_reduction(self, reduction: AttentionReduction) -> None:
        for field, description in reduction.problems():
            raise ValueError(f"reduction.{field} {description}")
        if reduction.layers == "rollout":
            if self.view == "dense":
                raise ValueError("view is 'dense', but rollout uses the mean over heads: omit the view")
            object.__setattr__(self, "view", "head_mean")


def checked_int(name: str, value: int) -> int:
    """Return `value` as an int.

    Raises:
        TypeError: `value` is not an integer.
    """
    try:
        return operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name} is {value!r}: use an integer") from error


def checked_dimensions(dimensions: int | None) -> int:
    """Return the value for a request, where 0 means all.

    Raises:
        ValueError: `dimensions` is out of range.
        TypeError: `dimensions` is not an integer.
    """
    if dimensions is None:
        return 0
    number = checked_int("dimensions", dimensions)
    if not 1 <= number <= MAX_INT32:
        raise ValueError(f"dimensions is {dimensions}: use 1 to {MAX_INT32}, or None for all")
    return number


def _numbers(name: str, chosen: Sequence[int] | None) -> tuple[int, ...] | None:
    if chosen is None:
        return None
    try:
        numbers = tuple(operator.index(number) for number in chosen)
    except TypeError as error:
        raise TypeError(f"{name} is {chosen!r}: use a list of integers, or None for all") from error
    if not numbers:
        raise ValueError(f"{name} is empty: use None for all")
    if any(abs(number) > MAX_INT32 for number in numbers):
        raise ValueError(f"{name} is {chosen!r}: use numbers up to {MAX_INT32}")
    return numbers
