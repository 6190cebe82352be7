"""Sample walkthrough pages with random values: T tokens, H heads, K query and key size, V value size."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from attnlens_viewer.walkthrough import HeadValues, Walkthrough
from viewer_pages import TOKENS, tokens_of

Array = npt.NDArray[np.float64]


def softmax(scores: Array) -> Array:
    exponentials: Array = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=-1, keepdims=True))


def head_values(
    num_tokens: int, heads: int, sizes: tuple[int, int], *, scale: float, bias: Array | None = None
) -> HeadValues:
    """Return random values with the weights that belong to them."""
    random = np.random.default_rng(heads)
    query, key, value = (
        random.normal(size=(heads, num_tokens, size)).astype(np.float32) for size in (sizes[0], *sizes)
    )
    products = query.astype(np.float64) @ key.astype(np.float64).swapaxes(-1, -2)
    weights = softmax(scale * products + (0 if bias is None else bias.astype(np.float32)))
    return HeadValues(query=query, key=key, value=value, weights=weights, scale=scale, bias=bias)


def window_bias(num_tokens: int, heads: int) -> Array:
    """Return (H, T, T) biases that fall with the distance, -inf beyond a distance of 3."""
    positions = np.arange(num_tokens)
    distance = np.abs(positions[:, None] - positions)
    slopes = 0.5 ** np.arange(1, heads + 1)
    return np.where(distance <= 3, -slopes[:, None, None] * distance, -np.inf)


def sample(spellings: Sequence[str] = TOKENS) -> Walkthrough:
    """Return a page with a scaled layer, an omitted one, and one with more heads, no scale and biases."""
    size = len(spellings)
    return Walkthrough(
        text=" ".join(spellings),
        model="small",
        hidden_size=12,
        tokens=tokens_of(spellings),
        ids=list(range(100, 100 + size)),
        layers={
            0: head_values(size, 2, (6, 6), scale=6**-0.5),
            2: head_values(size, 3, (4, 5), scale=1.0, bias=window_bias(size, 3)),
        },
        omitted={1: "longformer"},
        start=(0, 1, 5 % size),
    )
