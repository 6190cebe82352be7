"""Estimated compute cost of the reductions of a request, compared with the limit."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from attnlens.costs import reduction_cost
from attnlens_server.errors import TooExpensiveError
from attnlens_server.serving.checks import EncodePlan, Part, QueryPlan
from attnlens_server.serving.jobs import AttentionView

_CHEAPER = "ask for fewer layers, heads or reductions"


class ReductionCosts:
    """Estimates the reductions of one plan. Equal queries of one run are computed once, and counted once."""

    def __init__(self, plan: EncodePlan, token_flops: int) -> None:
        self._token_flops = token_flops
        first: dict[QueryPlan, QueryPlan] = {}
        self._equal = {
            query.index: first.setdefault(replace(query, index=0), query)
            for query in plan.queries
            if query.reduction is not None
        }

    def check(self, runs: Iterable[tuple[Sequence[Part], int]], max_computed_tokens: int) -> None:
        """Compare the cost of all runs with the limit.

        Args:
            runs: The parts and the number of tokens of each run of the attention graph.
            max_computed_tokens: The limit.

        Raises:
            TooExpensiveError: The cost is over the limit.
        """
        if not self._equal:
            return
        costs: Counter[int] = Counter()  # by index of the query
        known: dict[tuple[int, int, int], int] = {}
        for parts, num_tokens in runs:
            for index, num_layers in self._num_layers(parts).items():
                key = index, num_layers, num_tokens
                if key not in known:
                    known[key] = self._cost(self._equal[index], num_layers, num_tokens)
                costs[index] += known[key]
        if costs.total() > max_computed_tokens:
            fields = {f"attention[{index}].reduction": cost for index, cost in costs.items()}
            raise TooExpensiveError(fields, max_computed_tokens, _CHEAPER)

    def _num_layers(self, parts: Sequence[Part]) -> Counter[int]:
        """Return the number of layers that are reduced for each query, without those of equal queries."""
        layers = {
            (self._equal[query.index].index, outputs[0].layer): len(outputs)
            for query, outputs in parts
            if query.reduction is not None
        }
        counts: Counter[int] = Counter()
        for (index, _), count in layers.items():
            counts[index] += count
        return counts

    def _cost(self, query: QueryPlan, num_layers: int, num_tokens: int) -> int:
        assert query.reduction is not None  # noqa: S101 - only queries with a reduction are in `_equal`
        return reduction_cost(
            query.reduction,
            num_layers,
            len(query.heads),
            num_tokens,
            is_mean_of_heads=query.view is AttentionView.HEAD_MEAN,
            token_flops=self._token_flops,
        )
