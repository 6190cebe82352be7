"""Mixture-of-head attention against a NumPy reference, and invariants of its gates for any weights."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from attention_reference import (
    PADDINGS,
    Array,
    check_dropout,
    check_gradients,
    check_row_alone,
    hidden,
    largest_difference,
    linear,
    mask_of,
    numbers,
    padded,
    randomised,
    scores_of,
    sizes,
    softmax,
    split,
)
from attnlens_model import ATTENTION_WEIGHTS, ConfigError, new_encoder
from attnlens_model.attention.mixture import (
    HEAD_GATES,
    LearnedRouter,
    MixtureAttentionConfig,
    MixtureSelfAttention,
    NormRouter,
    Routing,
    TopKMask,
    load_balance_loss,
    recorded_routing,
)
from configs import small_config

WIDTH, HEADS = 24, 6
# Numbers of shared and active heads.
CHOICES = [(0, 2), (1, 2), (2, 3), (4, 1), (6, 0), (2, 4), (0, 6)]
ROUTERS = [("learned", "code"), ("learned", "paper"), ("norm", "code")]


def make(
    shared: int, active: int, router: str = "learned", gates: str = "code", dropout: float = 0.0
) -> MixtureSelfAttention:
    chosen: Any = {"shared_heads": shared, "active_heads": active, "router": router, "gates": gates}
    config = MixtureAttentionConfig(num_heads=HEADS, dropout=dropout, **chosen)
    return MixtureSelfAttention(config, sizes(WIDTH))


def top(values: Array, count: int) -> Array:
    """Return 1 for the `count` largest values, the first of equal ones, like ONNX TopK."""
    marks = np.zeros_like(values)
    order = np.argsort(-values, axis=-1, kind="stable")[..., :count]
    np.put_along_axis(marks, order, 1.0, axis=-1)
    return marks


def learned_gates(router: LearnedRouter, rows: Array, shared: int, active: int, gates: str) -> Array:
    is_code = gates == "code"
    shared_gates = np.zeros((*rows.shape[:2], 0))
    if shared:
        ones = np.ones((*rows.shape[:2], 1))
        shared_gates = softmax(linear(router.shared, rows)) if router.shared is not None else ones
        shared_gates = shared_gates * (shared if is_code else 1)
    if router.routed is None:
        return shared_gates
    probabilities = softmax(linear(router.routed, rows))
    chosen = probabilities * top(probabilities, active)
    if is_code:
        epsilon = np.finfo(np.float64).eps
        chosen = active * chosen / np.maximum(chosen.sum(axis=-1, keepdims=True), epsilon)
    if router.balance is None:
        return np.concatenate([shared_gates, chosen], axis=-1)
    balance = softmax(linear(router.balance, rows)) * (2 if is_code else 1)
    return np.concatenate([balance[..., :1] * shared_gates, balance[..., 1:] * chosen], axis=-1)


def norm_gates(query: Array, shared: int, active: int) -> Array:
    lengths = np.linalg.norm(query[:, shared:], axis=-1).transpose(0, 2, 1)
    probabilities = softmax(lengths / lengths.std(axis=-1, ddof=1, keepdims=True))
    ones = np.ones((*lengths.shape[:2], shared))
    return np.concatenate([ones, top(probabilities, active)], axis=-1)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize(("router", "gates"), ROUTERS)
@pytest.mark.parametrize(("shared", "active"), CHOICES)
def test_gates_and_context_match_the_paper_and_the_published_code(
    shared: int, active: int, router: str, gates: str, padding: str
) -> None:
    if router == "norm" and shared == HEADS:
        return  # an invalid configuration
    module = make(shared, active, router, gates)
    randomised(module)
    rows, keep = hidden(3, 7, WIDTH), padded(3, 7)[padding]
    query, key, value = (
        split(linear(projection, rows.numpy()), HEADS)
        for projection in (module.query, module.key, module.value)
    )
    if isinstance(module.router, NormRouter):
        expected_gates = norm_gates(query, shared, active)
    else:
        expected_gates = learned_gates(module.router, rows.numpy(), shared, active, gates)
    weights = softmax(scores_of(query, key, keep))
    heads = (weights @ value) * expected_gates.transpose(0, 2, 1)[..., None]
    joined = heads.transpose(0, 2, 1, 3).reshape(3, 7, WIDTH)

    context, outputs = module(rows, mask_of(keep))
    assert list(outputs) == [ATTENTION_WEIGHTS, HEAD_GATES]
    assert largest_difference(outputs[ATTENTION_WEIGHTS], weights) < 1e-14
    assert largest_difference(outputs[HEAD_GATES], expected_gates) < 1e-13
    assert largest_difference(context, linear(module.output, joined)) < 1e-12
    assert ((outputs[HEAD_GATES] > 0).sum(dim=-1) == shared + active).all()


@pytest.mark.parametrize(("shared", "active"), CHOICES)
def test_zero_router_gives_active_heads_a_gate_of_one(shared: int, active: int) -> None:
    module = make(shared, active)
    for parameter in module.router.parameters():
        nn.init.zeros_(parameter)
    gates = module(torch.randn(2, 5, WIDTH), None)[1][HEAD_GATES]
    # All heads are tied, so the first are selected. Their softmax is not exactly 1/3 or 1/6.
    expected = torch.tensor([1.0] * (shared + active) + [0.0] * (HEADS - shared - active))
    assert (gates - expected).abs().max() < 2e-7


@pytest.mark.parametrize(("shared", "active"), CHOICES)
def test_gate_sums_follow_from_the_formulas(shared: int, active: int) -> None:
    rows = hidden(2, 9, WIDTH)
    for gates in ("code", "paper"):
        module = make(shared, active, "learned", gates)
        randomised(module)
        router = module.router
        assert isinstance(router, LearnedRouter)
        total = module(rows, None)[1][HEAD_GATES].sum(dim=-1)
        if gates == "paper":
            assert (total <= 1 + 1e-12).all()
        else:
            balance = np.ones((2, 9, 2))
            if router.balance is not None:
                balance = 2 * softmax(linear(router.balance, rows.numpy()))
            expected = balance[..., 0] * shared + balance[..., 1] * active
            assert largest_difference(total, expected) < 1e-13


def test_weights_do_not_depend_on_gates() -> None:
    module = make(2, 2)
    randomised(module)
    rows = hidden(2, 9, WIDTH)
    before = module(rows, None)[1]
    with torch.no_grad():
        for parameter in module.router.parameters():
            parameter.neg_()
    after = module(rows, None)[1]
    assert torch.equal(before[ATTENTION_WEIGHTS], after[ATTENTION_WEIGHTS])
    assert not torch.equal(before[HEAD_GATES], after[HEAD_GATES])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_mask_marks_the_largest_numbers_and_the_first_of_equal_ones(dtype: torch.dtype) -> None:
    values = torch.tensor(list(itertools.product([0.0, 1.0, 1.0 + 2**-10, -3.0], repeat=4)), dtype=dtype)
    for count in range(5):
        marks = TopKMask(4, count).to(dtype)(values)
        assert np.array_equal(marks.numpy(), top(values.numpy(), count))
    neighbours = torch.tensor([1e-8, np.nextafter(np.float32(1e-8), np.float32(1))], dtype=torch.float32)
    assert TopKMask(2, 1)(neighbours).tolist() == [0.0, 1.0]


def test_query_of_zeros_has_gates_and_finite_gradients() -> None:
    module = make(2, 2, "norm")
    with recorded_routing(module) as routings:
        context, outputs = module(torch.zeros(1, 3, WIDTH), None)
    assert outputs[HEAD_GATES][0, 0].tolist() == [1, 1, 1, 1, 0, 0]
    (context.sum() + load_balance_loss(routings[0], torch.ones(1, 3))).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())


def test_result_is_independent_of_padding() -> None:
    mixture = {"kind": "mixture", "num_heads": 4, "shared_heads": 1, "active_heads": 2}
    for changes in ({}, {"gates": "paper"}, {"router": "norm"}):
        check_row_alone(small_config({"attention": mixture | changes}))


def test_dropout_applies_only_in_training_and_not_to_outputs() -> None:
    check_dropout(lambda dropout: make(2, 2, dropout=dropout), WIDTH)


@pytest.mark.parametrize(("router", "gates"), ROUTERS)
def test_gradients_match_finite_differences(router: str, gates: str) -> None:
    check_gradients(make(2, 2, router, gates), WIDTH)


def test_load_balance_loss_ignores_padding() -> None:
    module = make(2, 2)
    randomised(module)
    rows, keep = hidden(3, 8, WIDTH), padded(3, 8)["middle"]
    with recorded_routing(module) as routings:
        module(rows, mask_of(keep))
    assert isinstance(module.router, LearnedRouter)
    assert module.router.routed is not None
    live = softmax(linear(module.router.routed, rows.numpy()))[keep]
    expected = 4 * (live.mean(axis=0) * top(live, 2).mean(axis=0)).sum()
    loss = load_balance_loss(routings[0], torch.from_numpy(keep))
    assert loss.item() == pytest.approx(expected, abs=1e-14)
    loss.backward()  # type: ignore[no-untyped-call]
    gradient = module.router.routed.weight.grad
    assert gradient is not None
    assert gradient.abs().max() > 0

    even = Routing(
        torch.ones(1, 4, 6),
        torch.full((1, 4, 4), 0.25),
        torch.tensor([[[1.0, 1, 0, 0]] * 2 + [[0, 0, 1, 1]] * 2]),
    )
    assert load_balance_loss(even, torch.ones(1, 4)).item() == 2.0


def test_routings_are_recorded_in_layer_order_while_the_context_is_open() -> None:
    mixture = {"kind": "mixture", "num_heads": 4, "shared_heads": 1, "active_heads": 2}
    softmax_layer = {"kind": "softmax", "num_heads": 4}
    encoder = new_encoder(small_config({"num_layers": 3, "attention": [mixture, softmax_layer]}), seed=0)
    ids = torch.randint(0, 101, (2, 5))
    with recorded_routing(encoder) as routings:
        output = encoder(ids, torch.ones_like(ids), output_attentions=True)
    assert len(routings) == 2
    for routing, layer in zip(routings, (0, 2), strict=True):
        assert torch.equal(routing.gates, output.layers[layer][HEAD_GATES])
    encoder(ids, torch.ones_like(ids))
    assert len(routings) == 2


def test_margins_are_the_gap_between_the_last_selected_and_the_next_head() -> None:
    probabilities = torch.tensor([[[0.5, 0.2, 0.3], [0.4, 0.35, 0.25]]], dtype=torch.float64)
    router = make(0, 2).router
    for count, expected in [(1, [0.2, 0.05]), (2, [0.1, 0.1])]:
        chosen = torch.from_numpy(top(probabilities.numpy(), count))
        margins = router.margins(Routing(probabilities, probabilities, chosen))
        assert margins[0].tolist() == pytest.approx(expected)
    everything = Routing(probabilities, probabilities, torch.ones_like(probabilities))
    assert (router.margins(everything) > 1).all()
    nothing = Routing(probabilities, probabilities[..., :0], probabilities[..., :0])
    assert (router.margins(nothing) > 1).all()


def test_routers_are_initialized_xavier_uniform_without_biases() -> None:
    torch.manual_seed(0)
    config = MixtureAttentionConfig(num_heads=64, shared_heads=32, active_heads=8)
    router = MixtureSelfAttention(config, sizes(512)).router
    parameters = dict(router.named_parameters())
    assert {name: tuple(parameter.shape) for name, parameter in parameters.items()} == {
        "shared.weight": (32, 512),
        "routed.weight": (32, 512),
        "balance.weight": (2, 512),
    }
    for parameter in parameters.values():
        assert numbers(parameter).std() == pytest.approx(math.sqrt(2 / sum(parameter.shape)), rel=0.05)
    assert list(make(1, 2, "norm").router.parameters()) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"shared_heads": 5}, r"attention\.shared_heads=5: must be from 0 to num_heads=4"),
        ({"active_heads": 4}, r"attention\.active_heads=4: must be from 1 to num_heads - shared_heads = 3"),
        ({"active_heads": 0}, r"attention\.active_heads=0: must be from 1 to num_heads - shared_heads = 3"),
        ({"shared_heads": 3, "active_heads": 1, "router": "norm"}, r"router='norm': must be 'learned' if"),
    ],
)
def test_invalid_number_of_heads_is_rejected(values: dict[str, object], message: str) -> None:
    mixture = {"kind": "mixture", "num_heads": 4, "shared_heads": 1, "active_heads": 2}
    with pytest.raises(ConfigError, match=message):
        small_config({"attention": mixture | values})
