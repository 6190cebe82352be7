"""The choice of products to compute in int8, and its gate."""

from functools import partial

import numpy as np
import pytest

from attnlens.v1.manifest_pb2 import GateKind
from attnlens.v1.quantization_pb2 import Quantization
from attnlens_export.int8 import search
from attnlens_export.int8.recipes import Group, Method
from attnlens_export.int8.result import Gate, Int8Result, to_result
from attnlens_export.int8.search import Costs, Losses, choose, divide, total_loss
from attnlens_export.int8.texts import (
    Agreement,
    KindAgreement,
    Vectors,
    compare,
)

METHODS = (Method.PLAIN, Method.SMOOTHED, Method.EVENED, Method.EXACT_COLUMNS)


def test_plan_pays_least_time_for_the_loss_that_it_saves() -> None:
    losses = [
        known({Method.PLAIN: 0.5, Method.SMOOTHED: 0.1}),
        known({Method.PLAIN: 0.3, Method.SMOOTHED: 0.25}),
        known({Method.PLAIN: 0.05, Method.SMOOTHED: 0.04}),
    ]
    seconds = [{Method.FP32: 9.0, Method.PLAIN: 1.0, Method.SMOOTHED: 1.5}] * 3
    assert choose(losses, seconds, 1.0) == (Method.PLAIN,) * 3
    assert choose(losses, seconds, 0.5) == (Method.SMOOTHED, Method.PLAIN, Method.PLAIN)
    assert choose(losses, seconds, 0.2) == (Method.SMOOTHED, Method.FP32, Method.PLAIN)
    assert choose(losses, seconds, 0.0) == (Method.FP32,) * 3


@pytest.mark.parametrize("seed", range(20))
def test_only_losses_that_decide_are_measured(seed: int) -> None:
    """The loss of a method is the largest of three kinds of text, which are measured one after the other."""
    generator = np.random.default_rng(seed)
    kinds = [{method: generator.random(3) ** 4 for method in METHODS} for _ in range(12)]
    seconds = [
        {Method.FP32: 4.0} | {method: float(generator.uniform(1, 3)) for method in METHODS} for _ in range(12)
    ]
    measured: list[int] = []

    def measure(unit: int, method: Method, limit: float) -> float:
        largest = np.maximum.accumulate(kinds[unit][method])
        index = min(int(np.searchsorted(largest, limit)), 2)
        measured.append(index + 1)
        return float(largest[index])

    losses = [Losses(partial(measure, unit)) for unit in range(12)]
    expected = [known({method: float(each.max()) for method, each in unit.items()}) for unit in kinds]
    for budget in (2.0, 1.0, 0.5):
        assert choose(losses, seconds, budget) == choose_from_all(expected, seconds, budget)
    assert sum(measured) < 0.9 * 3 * 12 * len(METHODS)


def known(losses: dict[Method, float]) -> Losses:
    """Return losses that are not measured again."""
    result = Losses(lambda method, _limit: losses[method])
    result.update(losses)
    return result


def choose_from_all(losses: Costs, seconds: Costs, budget: float) -> tuple[Method, ...]:
    """Return the plan that results if each choice compares all losses."""
    plan = [min(times, key=times.__getitem__) for times in seconds]
    while total_loss(plan, losses) > budget:
        gains = {
            (unit, method): (losses[unit][chosen] - loss)
            / max(seconds[unit][method] - seconds[unit][chosen], 1e-9)
            for unit, chosen in enumerate(plan)
            for method, loss in losses[unit].items()
        }
        unit, method = max(gains, key=gains.__getitem__)
        plan[unit] = method
    return tuple(plan)


def test_budget_below_a_failed_plan_selects_a_different_plan() -> None:
    """Budgets a little apart often give the same plan, which must not be all that a search measures."""
    losses = [known({Method.PLAIN: 0.2}) for _ in range(3)]
    seconds = [{Method.FP32: 2.0, Method.PLAIN: 1.0} for _ in range(3)]
    plan = choose(losses, seconds, 0.55)
    assert choose(losses, seconds, 0.41) == plan
    assert choose(losses, seconds, 0.99 * total_loss(plan, losses)) != plan


def test_deep_model_is_divided_into_few_units() -> None:
    groups = [Group(f"{kind}{layer}", (), (), kind) for layer in range(24) for kind in "abcd"]
    units = divide(groups)
    assert len(units) == search.MAX_UNITS
    assert sorted(group.source for unit in units for group in unit) == sorted(
        group.source for group in groups
    )
    assert all(len({group.kind for group in unit}) == 1 for unit in units)


def test_gate_uses_the_worse_of_mean_and_smallest() -> None:
    gate = Gate(0.999, 0.995)
    assert gate.used_share(agreement(prose=(0.9995, 0.99))) == pytest.approx(2)
    assert gate.used_share(agreement(prose=(0.998, 0.998))) == pytest.approx(2)
    assert gate.used_share(agreement(prose=(np.nan, 0.998))) > 1e9


def test_gate_applies_to_each_kind_separately() -> None:
    found = agreement(prose=(0.9999, 0.9999), words=(0.9985, 0.998))
    assert Gate(0.999, 0.995).used_share(found) == pytest.approx(1.5)
    (failure,) = result_of(found).failures()
    assert "mean cosine of embedding on 7 texts (words) is 0.998500 (limit 0.999)" in failure


def test_search_keeps_a_part_of_the_gate_in_reserve() -> None:
    tightened = Gate(0.999, 0.995).tightened(0.9)
    assert tightened.min_mean_cosine == pytest.approx(0.9991)
    assert tightened.min_cosine == pytest.approx(0.9955)


def test_nan_cosine_fails_the_gate() -> None:
    for figure, cosines in (("mean", (np.nan, 0.9999)), ("min", (0.9999, np.nan))):
        [failure] = result_of(agreement(prose=cosines)).failures()
        assert f"{figure} cosine of embedding on 7 texts (prose) is nan" in failure


@pytest.mark.parametrize("max_batch_difference", [2e-5, np.nan])
def test_vectors_that_depend_on_the_batch_fail_the_gate(max_batch_difference: float) -> None:
    found = agreement(prose=(0.9999, 0.9999))
    assert not result_of(found, 1e-5).failures()
    [failure] = result_of(found, max_batch_difference).failures()
    assert "max batch difference of last_hidden_state on " in failure


def test_nearest_text_is_another_text() -> None:
    degrees = np.deg2rad([0, 10, 25, 90])
    moved = np.deg2rad([0, 16, 25, 90])  # the second text is nearer to the third now
    expected, found = (
        {"prose": Vectors(embeddings, embeddings)}
        for embeddings in (np.stack([np.cos(angles), np.sin(angles)], axis=1) for angles in (degrees, moved))
    )
    assert compare(found, expected).recorded.neighbor_agreement == 0.75
    assert compare(expected, expected).recorded.neighbor_agreement == 1


def test_zero_vectors_agree_and_the_text_with_the_smallest_cosine_is_named() -> None:
    """A vector of zeros, such as that of an empty text after ReLU, is equal in both precisions."""
    embeddings = np.array([[1, 0], [0, 0], [0.6, 0.8]], np.float32)
    texts = ("a", "", "the text " * 9)
    expected = {"prose": Vectors(embeddings, embeddings, texts)}
    same = compare(expected, expected).recorded
    assert (same.mean_cosine, same.min_cosine, same.min_token_cosine) == (1, 1, 1)
    turned = np.array([[1, 0], [0, 0], [0.8, 0.6]], np.float32)
    found = compare({"prose": Vectors(turned, turned, texts)}, expected)
    assert found.recorded.min_cosine == pytest.approx(0.96)
    named = repr("the text " * 6 + "the te" + "...")
    assert found.describe_kinds().endswith(f" for the text {named}")
    [failure] = result_of(found, limits=(0.9, 0.995)).failures()
    assert failure.endswith(f": {named}")
    lost = np.array([[1, 0], [1, 0], [0.6, 0.8]], np.float32)
    opposite = compare({"prose": Vectors(lost, lost, texts)}, expected)
    assert opposite.recorded.min_cosine == 0
    assert Gate().advice(opposite) == "export without --precision int8"
    assert "--min-cosine" in Gate().advice(found)


def agreement(**kinds: tuple[float, float]) -> Agreement:
    """Return a result for kinds of 7 texts with these mean and minimum cosines."""
    names = GateKind.GATE_KIND_MEAN_COSINE, GateKind.GATE_KIND_MIN_COSINE
    found = {name: KindAgreement(7, dict(zip(names, each, strict=True))) for name, each in kinds.items()}
    return Agreement(found, 1.0)


def result_of(
    found: Agreement, batch_difference: float = 0.0, limits: tuple[float, float] = (0.999, 0.995)
) -> Int8Result:
    return to_result(Gate(*limits), found, Quantization(), 90, batch_difference)
