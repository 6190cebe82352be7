"""Portable forms of PyTorch functions, compared with the functions."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from attnlens_model.portable_functions import PortableFunctions

BATCH_SIZE, NUM_TOKENS, HIDDEN_SIZE, NUM_HEADS = 2, 5, 12, 3
PADDING = torch.arange(NUM_TOKENS)[None] >= torch.tensor([[5], [3]])  # (B, T), True for padding
LATER = torch.ones(NUM_TOKENS, NUM_TOKENS, dtype=torch.bool).triu(1)  # (T, T), True for later tokens


class Functions(TorchFunctionMode):
    """Records the functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.called.append(func)
        return func(*args, **(kwargs or {}))


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"average_attn_weights": False},
        {"need_weights": False},
        {"key_padding_mask": PADDING},
        {"key_padding_mask": PADDING.float() * -9},
        {"attn_mask": LATER},
        {"attn_mask": random(NUM_TOKENS, NUM_TOKENS)},
        {"attn_mask": LATER, "key_padding_mask": PADDING},
        {"attn_mask": random(BATCH_SIZE * NUM_HEADS, NUM_TOKENS, NUM_TOKENS), "average_attn_weights": False},
        {"attn_mask": LATER.expand(BATCH_SIZE * NUM_HEADS, -1, -1), "key_padding_mask": PADDING},
    ],
    ids=[
        "plain",
        "each head",
        "no weights",
        "padding",
        "added",
        "causal",
        "added to pairs",
        "both",
        "per head",
        "per head, both",
    ],
)
@pytest.mark.parametrize("bias", [True, False])
def test_multihead_attention(options: dict[str, Any], bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(HIDDEN_SIZE, NUM_HEADS, bias=bias, batch_first=True).eval()
    states = random(BATCH_SIZE, NUM_TOKENS, HIDDEN_SIZE)
    expected = layer(states, states, states, **options)
    with PortableFunctions():
        result = layer(states, states, states, **options)
    torch.testing.assert_close(result, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"attn_mask": ~LATER},
        {"attn_mask": random(NUM_TOKENS, NUM_TOKENS)},
        {"scale": 3.0},
        {"enable_gqa": True},
    ],
    ids=["plain", "causal", "mask", "added", "scale", "grouped"],
)
def test_scaled_dot_product_attention(options: dict[str, Any]) -> None:
    query, key, value = random(3, BATCH_SIZE, NUM_HEADS, NUM_TOKENS, 4)
    if "enable_gqa" in options:
        query = query.repeat_interleave(2, dim=1)
    expected = functional.scaled_dot_product_attention(query, key, value, **options)
    with PortableFunctions():
        result = functional.scaled_dot_product_attention(query, key, value, **options)
    torch.testing.assert_close(result, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bqhd,bkhd->bhqk", [(2, 5, 3, 4), (2, 6, 3, 4)]),
        ("bhqk,bkhd->bqhd", [(2, 3, 5, 6), (2, 6, 3, 4)]),
        ("qhd, khd -> hqk", [(5, 3, 4), (6, 3, 4)]),
        ("td,de->te", [(5, 3), (3, 4)]),
        ("btd,dhk->bthk", [(2, 5, 3), (3, 2, 4)]),
        ("btd,cdhk->cbhtk", [(2, 5, 3), (3, 3, 2, 4)]),
        ("bqhk,hkd->bqd", [(2, 5, 3, 4), (3, 4, 6)]),
        ("bhqt,bthk,hkd->bqd", [(2, 3, 5, 6), (2, 6, 3, 4), (3, 4, 7)]),
        ("bgnqk,bgtk->bgnqt", [(2, 3, 2, 5, 4), (2, 3, 6, 4)]),
        ("bhtk,h->bhtk", [(2, 3, 5, 4), (3,)]),
        ("h,bhtk->bthk", [(3,), (2, 3, 5, 4)]),
        ("btd,d->bt", [(2, 5, 3), (3,)]),
        ("bt,btd->bd", [(2, 5), (2, 5, 3)]),
        ("a,b->ba", [(2,), (3,)]),
        ("bqd,bkdx->bqk", [(2, 5, 3), (2, 6, 3, 4)]),
        ("...qd,...kd->...qk", [(2, 4, 5, 3), (2, 4, 6, 3)]),
        ("...td,dhk->...htk", [(2, 5, 3), (3, 2, 4)]),
        ("...qd,...kd", [(2, 5, 3), (4, 2, 6, 3)]),
        ("bqd,bkd", [(2, 5, 3), (2, 6, 3)]),
    ],
)
def test_einsum_is_a_matrix_product(equation: str, shapes: list[tuple[int, ...]]) -> None:
    factors = [random(*shape) for shape in shapes]
    expected = torch.einsum(equation, *factors)
    for operands in (factors, [factors]):
        with Functions() as functions, PortableFunctions():
            result = torch.einsum(equation, *operands)
        torch.testing.assert_close(result, expected, atol=1e-6, rtol=0)
        assert torch.einsum not in functions.called


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bii->bi", [(2, 3, 3)]),
        ("bii,bi->b", [(2, 3, 3), (2, 3)]),
        ("bqd,bkd->bqk", [(2, 5, 3), (1, 6, 3)]),
        ("...qd,...kd->...qk", [(2, 5, 3), (1, 6, 3)]),
    ],
    ids=["one factor", "diagonal", "broadcast", "broadcast ellipsis"],
)
def test_other_equations_use_einsum_itself(equation: str, shapes: list[tuple[int, ...]]) -> None:
    factors = [random(*shape) for shape in shapes]
    expected = torch.einsum(equation, *factors)
    with PortableFunctions():
        torch.testing.assert_close(torch.einsum(equation, *factors), expected)


@pytest.mark.parametrize("counts", [(1, 3, 1), [2, 1, 2], (2, 1, 1, 1)])
def test_repeat(counts: Any) -> None:
    tensor = random(2, 3, 4)
    with Functions() as functions, PortableFunctions():
        result = tensor.repeat(counts)
        torch.testing.assert_close(tensor.repeat(*counts), result)
    assert torch.equal(result, tensor.repeat(counts))
    assert (Tensor.repeat in functions.called) == (len(counts) > tensor.ndim)


@pytest.mark.parametrize(
    "function",
    [
        lambda states: states.mean(-1, keepdim=True),
        lambda states: torch.mean(states, dim=(1, 2)),
        lambda states: states.mean(),
        lambda states: states.var(-1, unbiased=False),
        lambda states: states.var(dim=-1, correction=0, keepdim=True),
        lambda states: torch.var(states, 1),
        lambda states: states.std(-1, keepdim=True),
        lambda states: states.std(),
        nn.RMSNorm(HIDDEN_SIZE),
        nn.RMSNorm(HIDDEN_SIZE, eps=0.1, elementwise_affine=False),
    ],
)
def test_moments(function: Callable[[Tensor], Tensor]) -> None:
    states = random(BATCH_SIZE, NUM_TOKENS, HIDDEN_SIZE)
    expected = function(states)
    with PortableFunctions():
        result = function(states)
    torch.testing.assert_close(result, expected, atol=1e-6, rtol=0)


def test_other_arguments_use_the_function_itself() -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(HIDDEN_SIZE, NUM_HEADS, add_bias_kv=True).eval()
    states, others = random(NUM_TOKENS, BATCH_SIZE, HIDDEN_SIZE), random(NUM_TOKENS, BATCH_SIZE, HIDDEN_SIZE)
    expected = layer(states, others, others)
    with PortableFunctions():
        result = layer(states, others, others)
    torch.testing.assert_close(result, expected)
