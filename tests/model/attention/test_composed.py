"""Dynamically composed heads against a NumPy reference, and invariants for any weights."""

import math
from typing import Any

import numpy as np
import pytest
import torch

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
from attnlens_model import (
    ATTENTION_WEIGHTS,
    ConfigError,
    MultiHeadSelfAttention,
    SoftmaxAttentionConfig,
)
from attnlens_model.attention.composed import (
    ATTENTION_COMPOSED,
    ComposedAttentionConfig,
    ComposedSelfAttention,
    Composition,
    KernelProjections,
)
from configs import small_config

WIDTH, HEADS = 12, 3
PARTS: list[dict[str, Any]] = [
    {},
    {"static": True},
    {"rank": 1, "by_key": False},
    {"rank": 3, "by_query": False},
    {"by_query": False, "by_key": False, "static": True},
    {"before_softmax": False},
    {"after_softmax": False, "static": True},
]


def make(width: int = WIDTH, dropout: float = 0.0, **changes: Any) -> ComposedSelfAttention:
    config = ComposedAttentionConfig(num_heads=HEADS, dropout=dropout, **changes)
    return ComposedSelfAttention(config, sizes(width))


def kernel(projections: KernelProjections, row: Array) -> Array:
    """Return the matrix (H, H), composed head by head, for one token (D,)."""
    inner = linear(projections.hidden, row)
    inner = inner * 0.5 * (1 + np.vectorize(math.erf)(inner / math.sqrt(2)))
    rank = projections.rank
    factors = linear(projections.factors, inner).reshape(2 * rank, HEADS)
    first, second = factors[:rank], factors[rank:]
    first = first / np.sqrt((first**2).mean(axis=-1, keepdims=True) + 1e-6)
    diagonal = np.tanh(linear(projections.diagonal, row))
    return sum(np.outer(second[r], first[r]) for r in range(rank)) + np.diag(diagonal)


def composed(module: Composition | None, heads: Array, rows: Array) -> Array:
    """(B, H, T, T) -> (B, H, T, T), computed for each pair of tokens separately."""
    if module is None:
        return heads
    result = np.zeros_like(heads)
    for batch, query, key in np.ndindex(heads.shape[0], *heads.shape[2:]):
        matrix = np.eye(HEADS)
        if module.static is not None:
            matrix = matrix + numbers(module.static)
        if module.by_query is not None:
            matrix = matrix + kernel(module.by_query, rows[batch, query])
        if module.by_key is not None:
            matrix = matrix + kernel(module.by_key, rows[batch, key])
        result[batch, :, query, key] = matrix @ heads[batch, :, query, key]
    return result


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_weights_and_context_match_a_numpy_reference(parts: dict[str, Any], padding: str) -> None:
    module = make(**parts)
    randomised(module)
    rows, keep = hidden(3, 5, WIDTH), padded(3, 5)[padding]
    query, key, value = (
        split(linear(projection, rows.numpy()), HEADS)
        for projection in (module.query, module.key, module.value)
    )
    scores = composed(module.before, scores_of(query, key, np.ones_like(keep)), rows.numpy())
    weights = softmax(np.where(keep[:, None, None, :], scores, -np.inf))
    effective = composed(module.after, weights, rows.numpy())
    joined = (effective @ value).transpose(0, 2, 1, 3).reshape(3, 5, WIDTH)

    context, outputs = module(rows, mask_of(keep))
    roles = [ATTENTION_WEIGHTS] if module.after is None else [ATTENTION_WEIGHTS, ATTENTION_COMPOSED]
    assert list(outputs) == roles
    assert largest_difference(outputs[ATTENTION_WEIGHTS], weights) < 1e-13
    assert largest_difference(outputs[roles[-1]], effective) < 1e-12
    assert largest_difference(context, linear(module.output, joined)) < 1e-12
    masked = np.broadcast_to(~keep[:, None, None, :], weights.shape)
    for tensor in outputs.values():
        assert not tensor.detach().numpy()[masked].any()


def test_composed_weights_are_not_a_probability_distribution() -> None:
    module = make()
    randomised(module)
    outputs = module(hidden(2, 6, WIDTH), None)[1]
    assert (outputs[ATTENTION_WEIGHTS].sum(dim=-1) - 1).abs().max() < 1e-14
    sums = outputs[ATTENTION_COMPOSED].sum(dim=-1)
    assert (sums - 1).abs().max() > 0.1
    assert (outputs[ATTENTION_COMPOSED] < 0).any()


def test_without_composition_it_equals_softmax_attention() -> None:
    module = make(static=True)
    config = SoftmaxAttentionConfig(num_heads=HEADS, dropout=0.0)
    plain = MultiHeadSelfAttention(config, sizes(WIDTH)).double().eval()
    randomised(module)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.startswith(("before.", "after.")):
                parameter.zero_()
    projections = ("query.", "key.", "value.", "output.")
    state = {name: value for name, value in module.state_dict().items() if name.startswith(projections)}
    plain.load_state_dict(state)
    rows, mask = hidden(3, 6, WIDTH), mask_of(padded(3, 6)["left"])
    context, outputs = module(rows, mask)
    expected, expected_outputs = plain(rows, mask)
    assert (context - expected).abs().max() < 1e-15
    for tensor in outputs.values():
        assert (tensor - expected_outputs[ATTENTION_WEIGHTS]).abs().max() < 1e-15


def test_result_is_independent_of_padding() -> None:
    check_row_alone(small_config({"attention": {"kind": "composed", "num_heads": 4, "static": True}}))


def test_dropout_applies_only_in_training_and_not_to_outputs() -> None:
    check_dropout(lambda dropout: make(dropout=dropout), WIDTH)


@pytest.mark.parametrize("parts", [{"static": True}, {"rank": 1, "after_softmax": False}], ids=str)
def test_gradients_match_finite_differences(parts: dict[str, Any]) -> None:
    check_gradients(make(width=6, **parts), 6)


def test_kernels_are_initialized_with_the_published_standard_deviations() -> None:
    torch.manual_seed(0)
    width, heads = 512, 32
    config = ComposedAttentionConfig(num_heads=heads, static=True)
    module = ComposedSelfAttention(config, sizes(width))
    assert module.before is not None
    assert module.after is not None
    for composition in (module.before, module.after):
        assert composition.static is not None
        assert numbers(composition.static).std() == pytest.approx(0.1 / math.sqrt(heads), rel=0.1)
        for projections in (composition.by_query, composition.by_key):
            assert projections is not None
            expected = {
                projections.hidden: math.sqrt(2 / (width + 4 * heads)),
                projections.factors: 0.02 / (math.sqrt(4 * heads) * (heads + 2)),
                projections.diagonal: 0.005 * math.sqrt(2 / (width + heads)),
            }
            for layer, std in expected.items():
                assert layer.bias is None
                assert numbers(layer.weight).std() == pytest.approx(std, rel=0.05)
    count = sum(p.numel() for name, p in module.named_parameters() if name.startswith(("before", "after")))
    assert count == 20 * width * heads + 64 * heads**2 + 2 * heads**2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rank": 0}, r"attention\.rank=0: must be at least 1"),
        (
            {"before_softmax": False, "after_softmax": False},
            r"before_softmax=False: must be true if after",
        ),
        ({"by_query": False, "by_key": False}, r"by_query=False: must be true if by_key and static are"),
    ],
)
def test_empty_composition_is_rejected(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small_config({"attention": {"kind": "composed", "num_heads": 4} | values})
