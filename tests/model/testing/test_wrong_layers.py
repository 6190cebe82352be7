"""Each mistake in a layer fails the check that explains it first, and correct layers of all kinds pass."""

from collections.abc import Callable
from dataclasses import fields
from itertools import combinations

import pytest
import torch
from torch import nn

from attention_mistakes import layers
from attention_mistakes.layers import CORRECT, VARIANTS, WRONG, Variant, WrongLayer
from attnlens_model.testing import LayerReport, check_attention


def check(make: Callable[[Variant], nn.Module], variant: Variant) -> LayerReport:
    torch.manual_seed(0)
    return check_attention(
        make(variant),
        hidden_size=layers.HIDDEN_SIZE,
        num_heads=layers.NUM_HEADS,
        is_causal=variant.is_causal,
        uses_positions=variant.rotary or make in {layers.BiasByDistance, layers.NoScalingWithBias},
    )


def problem(wrong: WrongLayer, variant: Variant) -> str | None:
    """Return how the report differs from the expected diagnosis, or None."""
    failures = check(wrong.make, variant).failures
    if not failures:
        return f"{wrong}, {variant}: all checks passed"
    first = failures[0]
    is_explained = first.name == wrong.check and wrong.remedy in first.remedy
    return None if is_explained else f"{wrong}, {variant}: {first.name}: {first.measured}; {first.remedy}"


def spread(index: int, variants: list[Variant]) -> list[Variant]:
    """Return two variants that differ from each other, and from those of the other layers."""
    return [variants[(7 * index + offset) % len(variants)] for offset in (0, len(variants) // 2)]


@pytest.mark.parametrize(("index", "wrong"), list(enumerate(WRONG)), ids=str)
def test_first_failure_explains_the_mistake(index: int, wrong: WrongLayer) -> None:
    variants = spread(index, [variant for variant in VARIANTS if wrong.applies(variant)])
    assert [problem(wrong, variant) for variant in variants] == [None, None]


@pytest.mark.parametrize(("index", "make"), list(enumerate(CORRECT)))
def test_other_correct_implementations_pass(index: int, make: Callable[[Variant], nn.Module]) -> None:
    for variant in spread(index, list(VARIANTS)):
        report = check(make, variant)
        assert report.passed, f"{variant}: {report}"


# A quarter of the variants: an orthogonal array, so that no two options hide each other.
PAIRWISE = [
    each
    for each in VARIANTS
    if each.bias == (each.is_causal ^ each.rotary) and (each.groups == 2) == (each.is_causal ^ each.fused)
]


def test_any_two_options_have_all_their_values_together() -> None:
    options = [option.name for option in fields(Variant)]
    for pair in combinations(options, 2):
        assert len({tuple(getattr(each, name) for name in pair) for each in PAIRWISE}) == 4


@pytest.mark.extended
def test_all_mistakes_are_explained_with_any_two_options() -> None:
    cases = [(wrong, variant) for wrong in WRONG for variant in PAIRWISE if wrong.applies(variant)]
    assert [found for case in cases if (found := problem(*case)) is not None] == []


@pytest.mark.extended
def test_correct_layers_pass_with_any_two_options() -> None:
    failed = [
        f"{make}, {variant}: {report.failures}"
        for make in CORRECT
        for variant in PAIRWISE
        if not (report := check(make, variant)).passed
    ]
    assert failed == []
