"""Whether a bundle is good: what was measured of all its graphs, together."""

from dataclasses import dataclass

from attnlens.v1.manifest_pb2 import Parity
from attnlens_export.contributions.result import ContributionsResult
from attnlens_export.parity.long_context import LongContext
from attnlens_export.parity.result import ParityResult
from attnlens_export.precision import GraphResult
from attnlens_export.repeats import RepeatsResult


@dataclass(frozen=True)
class Verdict:
    """Every measurement of a bundle.

    Attributes:
        parity: of the graphs in fp32.
        precisions: of the graphs in lower precisions, in the manifest's order.
        contributions: of the graph of contributions; None where there is none.
        long_context: Errors on inputs longer than those of the parity grid. None if not measured.
        repeats: Repeated runs of every graph. None if not measured.
    """

    parity: ParityResult
    precisions: tuple[GraphResult, ...] = ()
    contributions: ContributionsResult | None = None
    long_context: LongContext | None = None
    repeats: RepeatsResult | None = None

    @property
    def passed(self) -> bool:
        """Whether every gate held, and something was measured at all."""
        return all(result.passed for result in self._results) and not self._other_failures()

    @property
    def _results(self) -> tuple[ParityResult | GraphResult, ...]:
        return self.parity, *self.further

    def _other_failures(self) -> list[str]:
        others = (self.long_context, self.repeats)
        return [line for other in others if other is not None for line in other.failures()]

    @property
    def further(self) -> tuple[GraphResult, ...]:
        """The results of all graphs but the two that `parity` is about, in the manifest's order."""
        return self.precisions if self.contributions is None else (self.contributions, *self.precisions)

    def failures(self) -> list[str]:
        """Return a line for each gate that did not hold, the worst of each graph first."""
        return [line for result in self._results for line in result.failures()] + self._other_failures()

    def describe_failure(self) -> str:
        """Return one line with the worst place and the number of others."""
        first, *others = self.failures() or ["nothing was measured"]
        return f"parity failed: {first}" + (f" (and {len(others)} more)" if others else "")

    def to_message(self) -> Parity:
        """Return the manifest's summary."""
        repeats = () if self.repeats is None else (self.repeats,)
        return Parity(
            passed=self.passed,
            num_cases=len(self.parity.cases),
            gates=[gate for result in (*self._results, *repeats) for gate in result.gates()],
            figures=[figure for result in self._results for figure in result.figures()],
            long_context=self.long_context.to_message() if self.long_context else None,
        )
