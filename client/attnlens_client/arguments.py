"""What the methods of both clients take: texts, queries of the attention, and names for choices."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from attnlens.reductions import AttentionReduction
from attnlens.signatures import checks_arguments

PoolingName: TypeAlias = Literal["mean", "cls", "max", "last_token", "weighted_mean", "mean_sqrt_length"]
DataTypeName: TypeAlias = Literal["float32", "float16"]
RoleName: TypeAlias = Literal["attention_weights", "attention_composed", "head_gates"]
ViewName: TypeAlias = Literal["full", "head_mean", "dense"]
ExplainMethodName: TypeAlias = Literal[
    "contributions", "output_share", "leave_one_out", "rollout", "received_attention", "contribution_norm"
]
ExplainLevelName: TypeAlias = Literal["tokens", "words"]
PairMatrixName: TypeAlias = Literal["output", "interaction", "input"]

MAX_INT32 = 2**31 - 1


@checks_arguments
@dataclass(frozen=True, slots=True)
class TokenIds:
    """A text as token ids, which are used as they are: special tokens must be among them.

    Attributes:
        input_ids: the ids, from 0 to the model's vocab_size - 1.
        token_type_ids: the type of each token. Empty: 0 for all.
    """

    input_ids: Sequence[int]
    token_type_ids: Sequence[int] = ()


# A text, a pair of texts that the model reads as one input, or token ids.
Text: TypeAlias = str | tuple[str, str] | Sequence[int] | TokenIds


@checks_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionQuery:
    """One thing to return of the attention of each text.

    Attributes:
        layers: from 0, in this order; -1 is the last. None: all that have such an output.
        heads: from 0, in this order; -1 is the last. None: all.
        view: "full" returns each head by itself, "head_mean" the mean of the heads as an axis of length 1,
            "dense" each head by itself, with bands and blocks put together by the server.
        role: which output of the layers, one of those in `ModelInfo.outputs`.
        reduction: what the server makes of the weights between tokens: words, means, the largest of them.
            With a rollout the view is "head_mean". None: nothing.

    Raises:
        TypeError: `layers` or `heads` is no list of whole numbers.
        ValueError: it is an empty list, a name is unknown, or the reduction can't be.

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
                raise ValueError(f"{name} is {value!r}: choose one of {', '.join(get_args(known))}")
        if self.reduction is not None:
            self._check_reduction(self.reduction)

    def _check_reduction(self, reduction: AttentionReduction) -> None:
        for field, description in reduction.problems():
            raise ValueError(f"reduction.{field} {description}")
        if reduction.layers == "rollout":
            if self.view == "dense":
                raise ValueError("view is 'dense': a rollout is of the mean over heads, leave the view out")
            object.__setattr__(self, "view", "head_mean")


def whole_number(name: str, value: int) -> int:
    """Return `value` as an int.

    Raises:
        TypeError: it is no whole number.
    """
    try:
        return operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name} is {value!r}: give a whole number") from error


def checked_dimensions(dimensions: int | None) -> int:
    """Return the components of an embedding to keep, as a request says it: 0 for all.

    Raises:
        ValueError: they are out of range.
        TypeError: they are no whole number.
    """
    if dimensions is None:
        return 0
    number = whole_number("dimensions", dimensions)
    if not 1 <= number <= MAX_INT32:
        raise ValueError(f"dimensions is {dimensions}: give 1 to {MAX_INT32}, or None for all")
    return number


def _numbers(name: str, chosen: Sequence[int] | None) -> tuple[int, ...] | None:
    if chosen is None:
        return None
    try:
        numbers = tuple(operator.index(number) for number in chosen)
    except TypeError as error:
        raise TypeError(f"{name} is {chosen!r}: give a list of whole numbers, or None for all") from error
    if not numbers:
        raise ValueError(f"{name} is empty: leave it out for all")
    if any(abs(number) > MAX_INT32 for number in numbers):
        raise ValueError(f"{name} is {chosen!r}: no model has so many")
    return numbers
