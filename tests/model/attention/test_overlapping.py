"""Overlapping heads against a NumPy reference, and against softmax attention with repeated weight rows."""

import math

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
)
from attnlens_model import (
    ATTENTION_WEIGHTS,
    ConfigError,
    MultiHeadSelfAttention,
    SoftmaxAttentionConfig,
)
from attnlens_model.attention.overlapping import (
    OverlappingAttentionConfig,
    OverlappingSelfAttention,
    layer_overlaps,
)
from configs import small_config

WIDTH, HEADS = 12, 3
HEAD_DIM = WIDTH // HEADS


def make(overlap: int, dropout: float = 0.0, width: int = WIDTH, *, bias: bool = True) -> nn.Module:
    config = OverlappingAttentionConfig(num_heads=HEADS, overlap=overlap, dropout=dropout, bias=bias)
    return OverlappingSelfAttention(config, sizes(width))


def components(overlap: int) -> list[list[int]]:
    """Return the components that each head uses, as indices in the concatenated heads. -1 is a zero."""
    wide = [-1] * overlap + list(range(WIDTH)) + [-1] * overlap
    return [wide[head * HEAD_DIM : (head + 1) * HEAD_DIM + 2 * overlap] for head in range(HEADS)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("overlap", [0, 1, 3, HEAD_DIM])
def test_heads_use_components_of_their_neighbors(overlap: int, padding: str, bias: bool) -> None:
    module, rows, keep = randomised(make(overlap, bias=bias)), hidden(3, 6, WIDTH), padded(3, 6)[padding]
    assert isinstance(module, OverlappingSelfAttention)

    def heads(projection: nn.Linear) -> Array:
        with_zero = np.pad(linear(projection, rows.numpy()), [(0, 0), (0, 0), (0, 1)])
        return np.stack([with_zero[..., indices] for indices in components(overlap)], axis=1)

    query, key, value = (heads(projection) for projection in (module.query, module.key, module.value))
    weights = softmax(scores_of(query, key, keep, 1 / math.sqrt(HEAD_DIM)))
    joined = np.concatenate([weights[:, head] @ value[:, head] for head in range(HEADS)], axis=-1)
    context, outputs = module(rows, mask_of(keep))
    assert list(outputs) == [ATTENTION_WEIGHTS]
    assert largest_difference(outputs[ATTENTION_WEIGHTS], weights) < 1e-14
    assert largest_difference(context, linear(module.output, joined)) < 1e-13


@pytest.mark.parametrize("overlap", [1, 3, HEAD_DIM])
def test_overlap_equals_softmax_attention_with_repeated_weight_rows(overlap: int) -> None:
    module, rows, mask = randomised(make(overlap)), hidden(3, 6, WIDTH), mask_of(padded(3, 6)["middle"])
    assert isinstance(module, OverlappingSelfAttention)
    config = SoftmaxAttentionConfig(
        num_heads=HEADS, head_size=HEAD_DIM + 2 * overlap, scale=1 / math.sqrt(HEAD_DIM)
    )
    plain = MultiHeadSelfAttention(config, sizes(WIDTH)).double()
    indices = torch.tensor(components(overlap)).flatten()
    with torch.no_grad():
        for name in ("query", "key", "value"):
            source, target = module.get_submodule(name), plain.get_submodule(name)
            for parameter in ("weight", "bias"):
                values = source.get_parameter(parameter)
                with_zero = torch.cat([values, torch.zeros_like(values[:1])])
                target.get_parameter(parameter).copy_(with_zero[indices])
        plain.output.load_state_dict(module.output.state_dict())
        context, outputs = module(rows, mask)
        expected, expected_outputs = plain.eval()(rows, mask)
    assert (outputs[ATTENTION_WEIGHTS] - expected_outputs[ATTENTION_WEIGHTS]).abs().max() < 1e-15
    assert (context - expected).abs().max() < 1e-14


def test_without_overlap_it_equals_softmax_attention() -> None:
    torch.manual_seed(1)
    module = make(0).eval()
    plain = MultiHeadSelfAttention(SoftmaxAttentionConfig(num_heads=HEADS), sizes(WIDTH)).eval()
    plain.load_state_dict(module.state_dict())
    rows = torch.randn(2, 5, WIDTH)
    assert torch.equal(module(rows, None)[0], plain(rows)[0])


def test_result_is_independent_of_padding() -> None:
    pattern = [{"kind": "overlapping", "num_heads": 4, "overlap": overlap} for overlap in (0, 5)]
    check_row_alone(small_config({"attention": pattern}))


def test_dropout_applies_only_in_training_and_not_to_weights() -> None:
    check_dropout(lambda dropout: make(2, dropout), WIDTH)


def test_gradients_match_finite_differences() -> None:
    check_gradients(make(1, width=6), 6)


def test_only_the_output_projection_grows_with_the_overlap() -> None:
    torch.manual_seed(2)
    config = OverlappingAttentionConfig(num_heads=4, overlap=16)
    module = OverlappingSelfAttention(config, sizes(256))
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    assert {shapes[f"{name}.weight"] for name in ("query", "key", "value")} == {(256, 256)}
    assert shapes["output.weight"] == (256, 4 * (64 + 2 * 16))
    for projection in (module.query, module.key, module.value, module.output):
        expected = math.sqrt(2 / (projection.in_features + projection.out_features))
        assert numbers(projection.weight).std() == pytest.approx(expected, rel=0.02)
        assert not projection.bias.any()


def test_layer_overlaps_follow_the_published_patterns() -> None:
    assert layer_overlaps("depth", 5) == (0, 1, 2, 3, 4)
    assert layer_overlaps("depth + 1", 5) == (1, 2, 3, 4, 5)
    assert layer_overlaps("half depth", 5) == (0, 0, 1, 1, 2)
    assert layer_overlaps("half depth + 1", 5) == (1, 1, 2, 2, 3)
    assert layer_overlaps("depth", 5, reverse=True) == (4, 3, 2, 1, 0)
    assert layer_overlaps("half depth + 1", 5, reverse=True) == (3, 2, 2, 1, 1)
    with pytest.raises(ValueError, match="pattern='width' is unknown: choose one of depth, "):
        layer_overlaps("width", 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(("overlap", "limit"), [(-1, "at least 0"), (13, "at most 12, the head size")])
def test_overlap_out_of_range_is_rejected(overlap: int, limit: str) -> None:
    with pytest.raises(ConfigError, match=rf"attention\.overlap={overlap}: must be {limit}"):
        small_config({"attention": {"kind": "overlapping", "num_heads": 4, "overlap": overlap}})
