"""What may be asked of a model: requests of any protocol, typed, but not checked yet.

The fields have the names of those in `attnlens.v1`, whose .proto files say what they mean; violations name
them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from attnlens.pooling import Pooling
from attnlens.reductions import AttentionReduction
from attnlens_server.bundle import OutputRole
from attnlens_server.errors import FieldViolation
from attnlens_server.text import Input

FLOAT32: "np.dtype[np.float32]" = np.dtype(np.float32)
FLOAT16: "np.dtype[np.float16]" = np.dtype(np.float16)
DataType = np.dtype[np.float32] | np.dtype[np.float16]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is put before each text; one of the two is set."""

    name: str | None = None
    text: str | None = None


class AttentionView(IntEnum):
    """What to make of an output of a layer. The numbers are those of `attnlens.v1.AttentionView`."""

    FULL = 1
    HEAD_MEAN = 2
    DENSE = 3


@dataclass(frozen=True, slots=True)
class AttentionQuery:
    """One thing to return of the attention of each text."""

    role: OutputRole = OutputRole.ATTENTION_WEIGHTS
    layers: Sequence[int] = ()
    heads: Sequence[int] = ()
    view: AttentionView = AttentionView.FULL
    reduction: AttentionReduction | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What all have in common."""

    model: str = ""
    inputs: Sequence[Input]
    prompt: Prompt | None = None
    violations: Sequence[FieldViolation] = ()
    """What a protocol has found wrong: numbers of its own, for instance. Told with what the checks find."""

    @property
    def size(self) -> int:
        """Characters and token ids: what checking and tokenizing take time for."""
        return len(self.inputs) + sum(given.size for given in self.inputs)

    @property
    def memory_bytes(self) -> int:
        """Memory of its texts (four bytes a character where one of them is an emoji) and token ids."""
        return sum(given.memory_bytes for given in self.inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedJob(Job):
    """One vector for each text."""

    truncate: bool = False
    pooling: Pooling | None = None
    normalize: bool | None = None
    dimensions: int = 0
    data_type: DataType = FLOAT32


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeJob(Job):
    """Token vectors, attention or both for each text."""

    truncate: bool = False
    last_hidden_state: bool = False
    attention: Sequence[AttentionQuery] = ()
    data_type: DataType = FLOAT32


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeJob(Job):
    """The tokens of each text."""
