"""Measures attention against a recurrent layer of the same width. T tokens, D hidden size, H heads."""

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

_Vectors = npt.NDArray[np.float32]


def measure_recurrence(
    hidden_size: int, num_heads: int, lengths: Sequence[int]
) -> list[tuple[int, float, float]]:
    """Return (length, milliseconds of attention, milliseconds of a recurrent loop) for each length.

    Both are written in NumPy with random fp32 weights and run in the same process. The times are the minimum
    of 3 runs. The width is rounded down to a multiple of the number of heads.
    """
    generator = np.random.default_rng(0)
    width = hidden_size // num_heads * num_heads
    weights = generator.normal(size=(4, width, width), scale=width**-0.5).astype(np.float32)
    results = []
    for length in lengths:
        inputs = generator.normal(size=(length, width)).astype(np.float32)
        attention = _fastest(partial(_attend, inputs, weights, num_heads))
        results.append((length, attention, _fastest(partial(_recur, inputs, weights))))
    return results


def _attend(inputs: _Vectors, weights: _Vectors, num_heads: int) -> _Vectors:
    """Return the output (T, D) of an attention layer with four projections (4, D, D)."""
    query, key, value = (
        (inputs @ matrix).reshape(len(inputs), num_heads, -1).swapaxes(0, 1) for matrix in weights[:3]
    )  # (H, T, K)
    scores = query @ key.swapaxes(-1, -2) * np.float32(query.shape[-1] ** -0.5)  # (H, T, T)
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    context = (powers / powers.sum(-1, keepdims=True)) @ value
    output: _Vectors = np.matmul(context.swapaxes(0, 1).reshape(inputs.shape), weights[3])
    return output


def _recur(inputs: _Vectors, weights: _Vectors) -> _Vectors:
    """Return the states (T, D) of h_t = tanh(W h_(t-1) + U x_t), with all U x_t computed at once."""
    states: _Vectors = inputs @ weights[0]
    state = np.zeros(inputs.shape[1], np.float32)
    for index in range(len(states)):
        state = states[index] = np.tanh(weights[1] @ state + states[index])
    return states


def _fastest(function: Callable[[], object]) -> float:
    """Return the time of the fastest of 3 calls, in milliseconds."""
    function()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1000 * min(times)
