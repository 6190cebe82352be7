"""The estimated compute cost of reductions, which is checked against the limit before anything runs."""

import pytest

from attnlens.reductions import AttentionReduction, Threshold, TopK
from attnlens_server.bundle import Layout, Output, OutputRole, RowSum
from attnlens_server.errors import TooExpensiveError
from attnlens_server.operations.attention import AttentionQuery, AttentionView, EncodePlan, Part
from attnlens_server.operations.encode import EncodeRequest
from attnlens_server.operations.encode_costs import ReductionCosts
from attnlens_server.text import Input
from model_services import plans_of
from toy_models import make_model

WEIGHTS = [
    Output(f"weights.{layer}", OutputRole.ATTENTION_WEIGHTS, Layout.DENSE, layer, 12, row_sum=RowSum.ONE)
    for layer in range(3)
]
TOKEN_FLOPS = 20_000_000  # MiniLM's sizes
UNLIMITED = 1 << 40


def plan_of(*queries: AttentionQuery) -> EncodePlan:
    checks = plans_of(make_model(*WEIGHTS), max_tokens=512)
    return checks.encode.plan(EncodeRequest(inputs=[Input(text="a")], attention=queries))


def cost(plan: EncodePlan, *runs: tuple[tuple[Part, ...], int]) -> int:
    """Return the estimated cost, or 0 if nothing is reduced."""
    try:
        ReductionCosts(plan, TOKEN_FLOPS).check(runs or [(plan.parts, 256)], -1)
    except TooExpensiveError as error:
        return int(error.metadata["computed_tokens"])
    return 0


def reduced(reduction: AttentionReduction, **fields: object) -> AttentionQuery:
    return AttentionQuery(reduction=reduction, **fields)  # type: ignore[arg-type]


WORDS = AttentionReduction(level="words", form=TopK(3))


def test_full_maps_are_free_and_reductions_cost_by_size() -> None:
    assert cost(plan_of(AttentionQuery(), AttentionQuery(view=AttentionView.HEAD_MEAN))) == 0
    one_layer = cost(plan_of(reduced(WORDS, layers=[0])))
    assert one_layer > 0
    assert cost(plan_of(reduced(WORDS))) == pytest.approx(3 * one_layer, rel=0.1)
    assert cost(plan_of(reduced(WORDS, heads=[1, 2, 3]))) == pytest.approx(3 * one_layer / 4, rel=0.1)
    plan = plan_of(reduced(WORDS))
    assert cost(plan, (plan.parts, 512)) == pytest.approx(4 * cost(plan), rel=0.1)
    assert cost(plan, *[(plan.parts, 256)] * 5) == 5 * cost(plan)
    assert cost(plan_of(reduced(AttentionReduction(level="words")))) < cost(plan)


def test_equal_reductions_of_a_run_are_counted_once() -> None:
    plan, one = plan_of(*[reduced(WORDS)] * 16), cost(plan_of(reduced(WORDS)))
    assert cost(plan) == one
    half = len(plan.parts) // 2
    assert cost(plan, (plan.parts[:half], 256), (plan.parts[half:], 256)) == 2 * one  # one text with two runs
    others = [reduced(AttentionReduction(level="words", form=TopK(k))) for k in range(1, 17)]
    assert cost(plan_of(*others)) == pytest.approx(16 * one, rel=0.01)


def test_most_expensive_field_is_reported_with_estimate_limit_and_remedy() -> None:
    plan = plan_of(
        AttentionQuery(), reduced(WORDS), reduced(AttentionReduction(form=Threshold(0.1)), layers=[2])
    )
    total = cost(plan)
    costs = ReductionCosts(plan, TOKEN_FLOPS)
    costs.check([(plan.parts, 256)], total)
    message = (
        rf"^attention\[1\]\.reduction needs \d+ of {total} computed tokens, but the limit is {total - 1}: "
        "send fewer or shorter texts, .* larger --max-computed-tokens$"
    )
    with pytest.raises(TooExpensiveError, match=message) as caught:
        costs.check([(plan.parts, 256)], total - 1)
    assert [violation.field for violation in caught.value.violations] == ["attention[1].reduction"]
    assert caught.value.metadata == {
        "computed_tokens": str(total),
        "max_computed_tokens": str(total - 1),
    }
