"""Softmax attention against a float64 NumPy reference, written from the paper with loops and -inf."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

from attention_reference import sizes
from attnlens_model import (
    ATTENTION_WEIGHTS,
    AttentionMask,
    ConfigError,
    MultiHeadSelfAttention,
    SoftmaxAttentionConfig,
    attention_weights,
)
from attnlens_model.attention.parts.masks import MASKED_SCORE, causal_keep_mask, prepare_mask

Array = npt.NDArray[np.float64]


def softmax_row(scores: Array) -> Array:
    if np.all(scores == -np.inf):
        return np.zeros_like(scores)
    exponentials = np.exp(scores - scores.max())
    return np.asarray(exponentials / exponentials.sum(), dtype=np.float64)


def reference(
    module: MultiHeadSelfAttention, hidden: Array, keep: npt.NDArray[np.bool_]
) -> tuple[Array, Array]:
    """Return the output (B, T, D) and weights (B, H, T, T) for a keep-mask (B, T, T)."""

    def projected(layer: nn.Linear, rows: Array) -> Array:
        weight = layer.weight.detach().double().numpy()
        return np.asarray(rows @ weight.T + layer.bias.detach().double().numpy(), dtype=np.float64)

    batch, tokens, width = hidden.shape
    head_dim = width // module.num_heads
    weights = np.zeros((batch, module.num_heads, tokens, tokens))
    concatenated = np.zeros_like(hidden)
    for b in range(batch):
        query, key, value = (projected(p, hidden[b]) for p in (module.query, module.key, module.value))
        for head in range(module.num_heads):
            part = slice(head * head_dim, (head + 1) * head_dim)
            for i in range(tokens):
                scores = np.array([query[i, part] @ key[j, part] for j in range(tokens)]) / math.sqrt(
                    head_dim
                )
                scores[~keep[b, i]] = -np.inf
                weights[b, head, i] = softmax_row(scores)
                concatenated[b, i, part] = sum(weights[b, head, i, j] * value[j, part] for j in range(tokens))
    return projected(module.output, concatenated), weights


def layer(hidden_size: int, num_heads: int, **changes: Any) -> MultiHeadSelfAttention:
    return MultiHeadSelfAttention(SoftmaxAttentionConfig(num_heads=num_heads, **changes), sizes(hidden_size))


def attention(width: int, heads: int, seed: int = 0, dropout: float = 0.0) -> MultiHeadSelfAttention:
    torch.manual_seed(seed)
    module = layer(width, heads, dropout=dropout)
    for projection in (module.query, module.key, module.value, module.output):
        nn.init.normal_(projection.bias, std=0.5)
        with torch.no_grad():
            projection.weight.mul_(2)
    return module.eval()


def attend(
    module: MultiHeadSelfAttention, hidden: Tensor, keep: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the context (B, T, D) and weights (B, H, T, T)."""
    context, outputs = module(hidden, keep)
    assert list(outputs) == [ATTENTION_WEIGHTS]
    return context, outputs[ATTENTION_WEIGHTS]


def keep_masks(batch: int, tokens: int) -> dict[str, Tensor]:
    """Return masks that broadcast to (B, H, T, T)."""
    lengths = torch.arange(1, batch + 1)[:, None]
    right = (torch.arange(tokens)[None] < lengths)[:, None, None, :]
    dead = right.clone()
    dead[0] = False
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    return {
        "nothing masked": torch.ones(1, 1, 1, tokens, dtype=torch.bool),
        "right padding": right,
        "left padding": right.flip(-1),
        "a row of padding only": dead,
        "causal": causal[None, None],
        "causal and left padding": causal & right.flip(-1),
        "arbitrary": torch.rand(batch, 1, tokens, tokens) < 0.5,
    }


@pytest.mark.parametrize("case", keep_masks(1, 1))
@pytest.mark.parametrize(("width", "heads"), [(12, 1), (12, 3), (20, 20)])
def test_weights_and_context_match_the_paper(width: int, heads: int, case: str) -> None:
    module = attention(width, heads)
    hidden = torch.randn(3, 6, width)
    keep = keep_masks(3, 6)[case]
    full = keep.expand(3, 1, 6, 6)[:, 0].numpy()

    expected_output, expected_weights = reference(module, hidden.double().numpy(), full)
    output, weights = attend(module, hidden, keep)
    assert np.abs(output.detach().numpy() - expected_output).max() < 2e-5
    assert np.abs(weights.detach().numpy() - expected_weights).max() < 2e-6

    output64, weights64 = attend(module.double(), hidden.double(), keep)
    assert np.abs(output64.detach().numpy() - expected_output).max() < 1e-13
    assert np.abs(weights64.detach().numpy() - expected_weights).max() < 1e-13


@pytest.mark.parametrize("case", keep_masks(1, 1))
def test_rows_sum_to_one_and_masked_columns_are_exactly_zero(case: str) -> None:
    query, key = torch.randn(2, 3, 4, 7, 5).mul(4)
    keep = keep_masks(3, 7)[case].expand(3, 4, 7, 7)
    weights = attention_weights(query, key, keep, 1 / math.sqrt(5))
    alive = keep.any(dim=-1)
    assert not weights.isnan().any()
    assert torch.equal(weights[~keep], torch.zeros(int((~keep).sum())))
    assert (weights.sum(-1)[alive] - 1).abs().max() < 1e-6
    assert (weights.sum(-1)[~alive] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1.0, 1e3])
def test_fully_masked_row_is_zero_for_every_dtype_and_magnitude(dtype: torch.dtype, size: float) -> None:
    query = torch.full((1, 1, 3, 4), size).to(dtype)
    key = -query / size
    keep = torch.tensor([[True, True, False], [False, False, False], [False, True, False]])
    weights = attention_weights(query, key, keep, 0.5)
    assert weights.dtype == dtype
    assert weights[0, 0].tolist() == [[0.5, 0.5, 0], [0, 0, 0], [0, 1, 0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_mask_bias_is_exact_in_every_dtype(dtype: torch.dtype) -> None:
    assert torch.tensor(MASKED_SCORE, dtype=dtype).item() == MASKED_SCORE
    # The lowest fp16 score for which the sum is finite.
    assert (torch.tensor(-32736.0, dtype=dtype) + MASKED_SCORE).isfinite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("masked_score", [0.0, 1e3, 1e4, 32_000.0])
def test_large_unscaled_scores_stay_masked(masked_score: float, dtype: torch.dtype) -> None:
    """T5 does not scale scores, so masked keys may have much larger scores than the others."""
    query = torch.ones(1, 1, 3, 1, dtype=dtype)
    key = torch.tensor([0.0, masked_score, -1.0, masked_score], dtype=dtype)[None, None, :, None]
    keep = torch.tensor([[1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]])
    weights = attention_weights(query, key, keep, 1.0)[0, 0]
    live = torch.tensor([0.0, -1.0], dtype=dtype).softmax(-1)
    assert torch.equal(weights[0, [0, 2]], live)
    assert weights[:, [1, 3]].tolist() == [[0, 0], [1, 0], [0, 0]]
    assert weights[2].tolist() == [0, 0, 0, 0]


def test_mask_may_be_bool_int_float_prepared_or_absent() -> None:
    query, key = torch.randn(2, 1, 2, 5, 3)
    keep = torch.tensor([1, 1, 1, 0, 0])
    expected = attention_weights(query, key, keep.bool(), 1.0)
    for same in (keep, keep.float(), prepare_mask(keep, torch.float32)):
        assert torch.equal(attention_weights(query, key, same, 1.0), expected)
    assert isinstance(prepare_mask(keep, torch.float32), AttentionMask)
    all_kept = attention_weights(query, key, torch.ones(5), 1.0)
    assert torch.equal(attention_weights(query, key, None, 1.0), all_kept)


def test_causal_mask_keeps_current_and_previous_tokens() -> None:
    assert torch.equal(causal_keep_mask(torch.arange(5)), torch.ones(5, 5).tril())


def test_gradients_are_finite_when_rows_are_fully_masked() -> None:
    module = attention(12, 3)
    hidden = torch.randn(2, 4, 12, requires_grad=True)
    keep = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]])[:, None, None, :]
    output, weights = attend(module, hidden, keep)
    (output.square().sum() + weights.square().sum()).backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()
    assert hidden.grad[0].abs().max() > 0
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize(
    ("shape", "heads", "output_shape", "weights_shape"),
    [
        ((2, 5, 64), 8, (2, 5, 64), (2, 8, 5, 5)),
        ((2, 5, 64), 1, (2, 5, 64), (2, 1, 5, 5)),
        ((1, 1, 6), 2, (1, 1, 6), (1, 2, 1, 1)),
        ((0, 5, 6), 2, (0, 5, 6), (0, 2, 5, 5)),
    ],
)
def test_outputs_have_the_documented_shapes(
    shape: tuple[int, ...], heads: int, output_shape: tuple[int, ...], weights_shape: tuple[int, ...]
) -> None:
    output, weights = attend(attention(shape[-1], heads), torch.randn(shape))
    assert (output.shape, weights.shape) == (output_shape, weights_shape)


def test_dropout_applies_only_in_training_and_not_to_weights() -> None:
    module = attention(16, 2, dropout=0.5)
    hidden = torch.randn(2, 6, 16)
    output, weights = attend(module, hidden)
    assert torch.equal(module(hidden)[0], output)
    module.train()
    torch.manual_seed(1)
    dropped_output, dropped_weights = attend(module, hidden)
    assert torch.equal(dropped_weights, weights)
    assert (dropped_output - output).abs().max() > 1e-3


def test_each_projection_is_initialized_xavier_uniform_with_zero_bias() -> None:
    torch.manual_seed(3)
    width = 256
    module = layer(width, 4)
    expected_std = math.sqrt(2 / (width + width))
    for projection in (module.query, module.key, module.value, module.output):
        assert projection.weight.std().item() == pytest.approx(expected_std, rel=0.02)
        assert projection.weight.abs().max().item() == pytest.approx(expected_std * math.sqrt(3), rel=0.01)
        assert not projection.bias.any()
    assert not torch.equal(module.query.weight, module.key.weight)


@pytest.mark.parametrize(
    ("heads", "message"),
    [(0, "num_heads=0: must be at least 1"), (5, "num_heads=5 does not divide hidden_size=64")],
)
def test_heads_that_do_not_divide_the_hidden_size_are_rejected(heads: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layer(64, heads)


def test_key_value_heads_that_do_not_divide_the_heads_are_rejected() -> None:
    with pytest.raises(ConfigError, match="num_key_value_heads=3: must divide num_heads=4, or be null"):
        layer(64, 4, num_key_value_heads=3)


def test_normalized_values_have_unit_mean_square_per_head() -> None:
    torch.manual_seed(2)
    module, plain = layer(16, 2, value_norm=True), layer(16, 2)
    plain.load_state_dict(module.state_dict())
    hidden = torch.randn(2, 5, 16)
    (query, key, value), expected = module.project(hidden), plain.project(hidden)
    assert torch.equal(query, expected[0])
    assert torch.equal(key, expected[1])
    root = expected[2].square().mean(dim=-1, keepdim=True).sqrt()  # (B, H, T, 1)
    torch.testing.assert_close(value, expected[2] / root)


def plain_attention(module: MultiHeadSelfAttention, hidden: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output (B, T, D) and weights (B, H, T, T), computed head by head from slices of weights."""
    group = module.num_heads // module.num_key_value_heads
    heads, maps = [], []
    for head in range(module.num_heads):
        parts = ((module.query, head), (module.key, head // group), (module.value, head // group))
        sizes_of_heads = (
            module.head_dim,
            module.head_dim,
            len(module.value.weight) * group // module.num_heads,
        )
        query, key, value = (
            nn.functional.linear(
                hidden,
                projection.weight[index * size : (index + 1) * size],
                None if projection.bias is None else projection.bias[index * size : (index + 1) * size],
            )
            for (projection, index), size in zip(parts, sizes_of_heads, strict=True)
        )
        scores = query @ key.mT / module.head_dim**0.5
        maps.append(scores.masked_fill(~keep, -math.inf).softmax(dim=-1))
        heads.append(maps[-1] @ value)
    concatenated = torch.cat(heads, dim=-1)
    is_projected = isinstance(module.output, nn.Linear)
    output = module.output(concatenated) if is_projected else concatenated
    return output, torch.stack(maps, dim=1)


VALUE_SIZES: list[dict[str, Any]] = [
    {"value_head_size": 7},
    {"value_head_size": 1, "bias": False},
    {"value_head_size": 11, "num_key_value_heads": 2, "head_size": 3},
    {"output_projection": False},
    {"value_head_size": 6, "head_size": 10, "output_projection": False, "num_key_value_heads": 1},
]


@pytest.mark.parametrize("changes", VALUE_SIZES, ids=str)
def test_values_of_another_size_and_no_output_projection_follow_the_formula(changes: dict[str, Any]) -> None:
    torch.manual_seed(4)
    module = layer(24, 4, **changes).double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, dtype=torch.float64))
    hidden = torch.randn(3, 6, 24, dtype=torch.float64)
    keep = keep_masks(3, 6)["causal"]
    output, weights = attend(module, hidden, keep)
    expected_output, expected_weights = plain_attention(module, hidden, keep[0, 0])
    assert output.shape == (3, 6, 24)
    assert (output - expected_output).abs().max() < 1e-13
    assert (weights - expected_weights).abs().max() < 1e-13


def test_projections_have_the_documented_sizes() -> None:
    changes = {"value_head_size": 7, "head_size": 5, "num_key_value_heads": 2}
    tensors = layer(24, 4, **changes).state_dict()
    shapes = {"query": (20, 24), "key": (10, 24), "value": (14, 24), "output": (24, 28)}
    weights = {f"{name}.weight": shape for name, shape in shapes.items()}
    biases = {f"{name}.bias": shape[:1] for name, shape in shapes.items()}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == weights | biases
    assert not [name for name in layer(24, 4, output_projection=False).state_dict() if "output" in name]


def test_default_sizes_are_the_same_layer() -> None:
    torch.manual_seed(5)
    plain = layer(24, 4)
    torch.manual_seed(5)
    stated = layer(24, 4, value_head_size=6, output_projection=True)
    assert all(torch.equal(stated.state_dict()[name], tensor) for name, tensor in plain.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value_head_size": 0}, "attention.value_head_size=0: must be at least 1, or null"),
        ({"value_head_size": 2.5}, "attention.value_head_size=2.5 is float: it must be int"),
        (
            {"value_head_size": 5, "output_projection": False},
            r"output_projection=False: must be true, because num_heads \* value_head_size = 20 is not hidden",
        ),
        ({"head_size": 8, "output_projection": False}, "num_heads \\* value_head_size = 32 is not"),
        (
            {"output_projection": False, "output_bias": True},
            "attention.output_bias=True: must be false or null if output_projection is false",
        ),
        ({"output_projection": "no"}, "attention.output_projection='no' is str: it must be bool"),
    ],
    ids=str,
)
def test_impossible_sizes_are_rejected_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layer(24, 4, **changes)


def test_biases_of_values_are_attended_and_reach_the_output_without_a_projection() -> None:
    module = layer(24, 4, output_projection=False).eval()
    with torch.no_grad():
        module.value.weight.zero_()
        module.value.bias.copy_(torch.arange(24.0))
    output, _ = attend(module, torch.randn(2, 5, 24))
    torch.testing.assert_close(output, torch.arange(24.0).expand(2, 5, 24))
