"""Typed requests of all methods, independent of the protocol and not yet validated.

Field names match the messages of `attnlens.v1`, whose .proto files document them. Violations refer to them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from attnlens.explanations import ExplainLevel, ExplainMethod, PairMatrix
from attnlens.pooling import FloatArray, Pooling
from attnlens.reductions import AttentionReduction
from attnlens_server.bundle import OutputRole
from attnlens_server.errors import FieldViolation
from attnlens_server.text import Input

FLOAT32: "np.dtype[np.float32]" = np.dtype(np.float32)
FLOAT16: "np.dtype[np.float16]" = np.dtype(np.float16)
DataType = np.dtype[np.float32] | np.dtype[np.float16]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Text that precedes each input. Exactly one of `name` and `text` is set."""

    name: str | None = None
    text: str | None = None


class AttentionView(IntEnum):
    """Form of an attention output. The values are those of `attnlens.v1.AttentionView`."""

    FULL = 1
    HEAD_MEAN = 2
    DENSE = 3


@dataclass(frozen=True, slots=True)
class AttentionQuery:
    """Selection of attention outputs. Empty `layers` or `heads` select all."""

    role: OutputRole = OutputRole.ATTENTION_WEIGHTS
    layers: Sequence[int] = ()
    heads: Sequence[int] = ()
    view: AttentionView = AttentionView.FULL
    reduction: AttentionReduction | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Base class of all requests."""

    model: str = ""
    model_version: str = ""
    inputs: Sequence[Input]
    prompt: Prompt | None = None
    violations: Sequence[FieldViolation] = ()
    """Violations found during parsing, such as unknown enum values, reported with those of the validation."""

    @property
    def other_inputs(self) -> Sequence[Input]:
        """Inputs in fields other than `inputs`."""
        return ()

    @property
    def size(self) -> int:
        """Number of characters and token ids, which validation and tokenization time depends on."""
        return len(self.inputs) + sum(each.size for each in (*self.inputs, *self.other_inputs))

    @property
    def memory_bytes(self) -> int:
        """Memory of the texts (4 bytes per character if one of them is an emoji) and token ids."""
        return sum(each.memory_bytes for each in (*self.inputs, *self.other_inputs))


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedRequest(Request):
    """Request for one vector per text. `dimensions` 0 means all."""

    truncate: bool = False
    pooling: Pooling | None = None
    normalize: bool | None = None
    dimensions: int = 0
    data_type: DataType = FLOAT32


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeRequest(Request):
    """Request for token vectors, attention or both."""

    truncate: bool = False
    last_hidden_state: bool = False
    attention: Sequence[AttentionQuery] = ()
    data_type: DataType = FLOAT32


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest(Request):
    """Request for the tokens of each text."""


@dataclass(frozen=True, slots=True)
class ExplanationTarget:
    """Direction that contributions refer to. If nothing is set, each text's own embedding.

    Attributes:
        direction: Vector, whose shape is not yet validated.
        to: Text whose embedding is the direction.
        contrast: Two texts. The direction is the difference between their embeddings, first minus second.
    """

    direction: FloatArray | None = None
    to: Input | None = None
    contrast: tuple[Input, Input] | None = None

    @property
    def inputs(self) -> dict[str, Input]:
        """Texts by field path."""
        if self.contrast is not None:
            return {"contrast.to": self.contrast[0], "contrast.rather_than": self.contrast[1]}
        return {} if self.to is None else {"to": self.to}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplanationRequest(Request):
    """Base class of ExplainRequest and CompareRequest."""

    truncate: bool = False
    pooling: Pooling | None = None
    dimensions: int = 0
    methods: Sequence[ExplainMethod] = ()
    level: ExplainLevel = ExplainLevel.TOKENS
    head_contributions: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainRequest(ExplanationRequest):
    """Request for the contribution of each token to its text's embedding or to a similarity."""

    target: ExplanationTarget = ExplanationTarget()
    target_prompt: Prompt | None = None

    @property
    def other_inputs(self) -> Sequence[Input]:
        """Texts of the target."""
        return tuple(self.target.inputs.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRequest(ExplanationRequest):
    """Request for the contribution of each token to the similarity of two texts.

    `inputs` and `prompt` belong to the first text of each pair, `second_inputs` and `prompt_b` to the second.
    """

    second_inputs: Sequence[Input]
    prompt_b: Prompt | None = None
    matrix: PairMatrix | None = None

    @property
    def other_inputs(self) -> Sequence[Input]:
        """Second text of each pair."""
        return self.second_inputs
