"""What was found in another runtime, and whether that is good enough."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from attnlens_export.contributions.result import Completeness, ContributionsResult
from attnlens_export.graph.names import (
    ATTENTIONS_PATH,
    EMBEDDINGS_PATH,
    GRAPH_PURPOSES,
    HIDDEN_OUTPUT,
)
from attnlens_export.parity.result import ParityResult, max_or_nan, summarize
from attnlens_model import ATTENTION_WEIGHTS
from attnlens_runtimes import FP32

# In bf16 or fp16: of a token's vector with PyTorch's in fp32.
MIN_COSINE = 0.999
# In bf16 or fp16: how far a row of attention weights may be from summing to 1.
ROW_SUM_TOLERANCE = 0.02

# The outputs of a bundle in the order of the table: graph and role.
COLUMNS = (
    (EMBEDDINGS_PATH, HIDDEN_OUTPUT),
    (ATTENTIONS_PATH, HIDDEN_OUTPUT),
    (ATTENTIONS_PATH, ATTENTION_WEIGHTS),
)


@dataclass(frozen=True)
class Missing:
    """A runtime that is not installed.

    Attributes:
        name: what `--runtime` calls it.
        reason: a sentence that says how to install it.
    """

    name: str
    reason: str


@dataclass(frozen=True)
class RuntimeResult:
    """What was measured in one runtime, in one precision.

    Attributes:
        name: what `--runtime` calls it.
        version: of its package.
        precision: what it computed in, as it says: fp32, bf16 or fp16; fp32 where no graph opened.
        parity: the measurements, for a graph that was stopped those until then.
        stops: by graph, where it stopped and the runtime's reason.
        contributions: the measurements of the graph of contributions.
    """

    name: str
    version: str
    precision: str
    parity: ParityResult
    stops: dict[str, str]
    contributions: tuple[Completeness, ...] = ()

    @property
    def label(self) -> str:
        """The name, with the precision where that is not fp32."""
        return self.name if self.precision == FP32 else f"{self.name} in {self.precision}"

    @property
    def passed(self) -> bool:
        """Whether both graphs ran on every case, and each gate held."""
        return bool(self.parity.measurements) and not self.failures()

    @property
    def num_cases(self) -> int:
        """On how many cases both graphs ran."""
        return min(sum(each.graph == path for each in self.parity.invariants) for path in GRAPH_PURPOSES)

    def failures(self) -> list[str]:
        """Return a line for each graph that was stopped and each gate that did not hold."""
        lines = [f"{graph}: {reason}" for graph, reason in self.stops.items()]
        if self.precision == FP32:
            lines += [*self.parity.failures(), *ContributionsResult(self.contributions).failures()]
        else:
            lines += self._reduced_failures()
        return [f"{self.label}: {line}" for line in lines]

    def _reduced_failures(self) -> Iterator[str]:
        """Yield a line for each gate of lower precision that did not hold, the smallest cosines first."""
        hidden = [each for each in self.parity.measurements if each.role == HIDDEN_OUTPUT]
        for each in sorted(hidden, key=lambda each: float(np.nan_to_num(each.min_cosine, nan=-1.0))):
            if not each.min_cosine >= MIN_COSINE:
                yield (
                    f"{each.graph} at {each.case}: the cosine of a token's vector with PyTorch's is "
                    f"{each.min_cosine:.6f}, at least {MIN_COSINE} is allowed"
                )
        for invariants in self.parity.invariants:
            yield from invariants.failures(ROW_SUM_TOLERANCE)

    @property
    def incompleteness(self) -> float | None:
        """How far scores and baseline are from d . p, as a share of |d| |p|; None: not measured."""
        return max_or_nan(case.incompleteness for case in self.contributions) if self.contributions else None

    def worst_errors(self) -> list[float | None]:
        """Return the largest |runtime - PyTorch fp32| of each of `COLUMNS`; None if nothing was measured."""
        groups = self.parity.by_role()
        return [summarize(groups[key]).max_abs_error if key in groups else None for key in COLUMNS]

    def min_cosines(self) -> list[float | None]:
        """Return the smallest cosine of a row with PyTorch's, of each of `COLUMNS`."""
        groups = self.parity.by_role()
        return [summarize(groups[key]).min_cosine if key in groups else None for key in COLUMNS]
