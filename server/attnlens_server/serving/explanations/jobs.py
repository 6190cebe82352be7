"""What may be asked, typed, but not checked yet.

The fields have the names of those in `attnlens.v1`; violations name them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from attnlens.explanations import ExplainLevel, ExplainMethod, PairMatrix
from attnlens.pooling import FloatArray, Pooling
from attnlens_server.serving.jobs import Job, Prompt
from attnlens_server.text import Input


@dataclass(frozen=True, slots=True)
class Towards:
    """What is explained; at most one is set. None: the embedding of each text itself.

    Attributes:
        direction: numbers, of any shape yet.
        to: a text, towards whose embedding.
        contrast: two texts: towards the first one's, away from the second one's.
    """

    direction: FloatArray | None = None
    to: Input | None = None
    contrast: tuple[Input, Input] | None = None

    @property
    def inputs(self) -> dict[str, Input]:
        """The texts by the path of their field."""
        if self.contrast is not None:
            return {"contrast.to": self.contrast[0], "contrast.rather_than": self.contrast[1]}
        return {} if self.to is None else {"to": self.to}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplanationJob(Job):
    """What both jobs have in common."""

    truncate: bool = False
    pooling: Pooling | None = None
    dimensions: int = 0
    methods: Sequence[ExplainMethod] = ()
    level: ExplainLevel = ExplainLevel.TOKENS
    head_contributions: bool = False

    @property
    def others(self) -> Sequence[Input]:
        """The texts beside `inputs`."""
        return ()

    @property
    def size(self) -> int:
        """Characters and token ids: what checking and tokenizing take time for."""
        return len(self.inputs) + sum(given.size for given in (*self.inputs, *self.others))

    @property
    def memory_bytes(self) -> int:
        """Memory of its texts and token ids."""
        return sum(given.memory_bytes for given in (*self.inputs, *self.others))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainJob(ExplanationJob):
    """What each token of each text did."""

    target: Towards = Towards()
    target_prompt: Prompt | None = None

    @property
    def others(self) -> Sequence[Input]:
        """The texts of the target."""
        return tuple(self.target.inputs.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareJob(ExplanationJob):
    """What each token of two texts did for their similarity. `inputs` and `prompt` are the first texts'."""

    seconds: Sequence[Input]
    prompt_b: Prompt | None = None
    matrix: PairMatrix | None = None

    @property
    def others(self) -> Sequence[Input]:
        """The second texts, as many as `inputs`."""
        return self.seconds
