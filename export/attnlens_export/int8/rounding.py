"""Rounding to 8 bits with little error in the product. R rows (tokens), K width, N width of the result.

- Weights: integers of -127 to 127 times a scale per column. They are rounded one row of the matrix after the
  other, and what a row loses is made good in the rows that follow, by how the inputs go together: GPTQ
  (Frantar et al. 2022, arXiv 2210.17323, algorithm 1), the rows with the largest inputs first.
- Inputs: integers of 0 to 255, times one scale, which cuts off what is beyond a range. The range is the one
  with the least error in the product, each column of the input counting with its row of the weight.
- Smoothing: column k of the input is divided by s(k) and row k of the weight multiplied by it,
  s(k) = max|x(k)|^alpha / max|w(k)|^(1 - alpha) (SmoothQuant, Xiao et al. 2022, arXiv 2211.10438,
  equation 4).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attnlens_export.int8.products import FloatArray

LARGEST_WEIGHT = 127
LARGEST_INPUT = 255
# Added to the diagonal of the covariance, as a share of its mean: columns that are always 0 exist.
DAMPING = 0.01
# Rows of a weight that are rounded before the rows behind them are corrected, all at once.
BLOCK_ROWS = 128
_SCALE_STEPS = (1.0, 0.95, 0.9, 0.85, 0.8)
_RANGE_STEPS = (1.0, 0.9)
_SMALLEST = 1e-5


@dataclass(frozen=True)
class RoundedWeight:
    """`values` (K, N) int8 times `scales` (N,) fp32."""

    values: npt.NDArray[np.int8]
    scales: FloatArray


@dataclass(frozen=True)
class InputRange:
    """(integer - zero_point) * scale, the integer being of 0 to 255."""

    scale: np.float32
    zero_point: np.uint8


def smoothing_divisors(largest: FloatArray, weights: list[FloatArray], alpha: float) -> FloatArray:
    """Return s (K,) for inputs of magnitudes up to `largest` (K,), its geometric mean being 1."""
    rows = np.max([np.abs(weight).max(axis=1) for weight in weights], axis=0)  # (K,)
    divisors = np.maximum(largest, _SMALLEST) ** alpha / np.maximum(rows, _SMALLEST) ** (1 - alpha)
    return np.asarray(divisors / np.exp(np.log(divisors).mean()), np.float32)


def choose_range(
    rows: FloatArray, extremes: tuple[float, float], importance: FloatArray
) -> tuple[InputRange, float]:
    """Return the range with the least error.

    Args:
        rows: samples of the input, (R, K).
        extremes: the least and the largest value of any input, whether among the samples or not.
        importance: what an error in each column counts, squared: (K,).

    Returns:
        The range, and the mean over rows of the squared error in the product.
    """
    low, high = min(extremes[0], 0.0), max(extremes[1], _SMALLEST)
    found = []
    for low_step in _RANGE_STEPS if low < -_SMALLEST else (1.0,):
        for high_step in _RANGE_STEPS:
            scale = np.float32((high * high_step - low * low_step) / LARGEST_INPUT)
            zero_point = np.uint8(np.clip(np.rint(-low * low_step / scale), 0, LARGEST_INPUT))
            candidate = InputRange(scale, zero_point)
            error = round_inputs(rows, candidate) - rows
            error *= error
            found.append((float((error @ importance).mean()), candidate))
    least, chosen = min(found, key=lambda each: each[0])
    return chosen, least


def round_inputs(rows: FloatArray, chosen: InputRange) -> FloatArray:
    """Return what is left of inputs, as QuantizeLinear and DequantizeLinear do it."""
    zero_point = np.float32(chosen.zero_point)
    integers = np.clip(np.rint(rows / chosen.scale), -zero_point, LARGEST_INPUT - zero_point)
    return np.asarray(integers * chosen.scale, np.float32)


def round_weight(weight: FloatArray, covariance: FloatArray) -> RoundedWeight:
    """Round a weight.

    Args:
        weight: (K, N).
        covariance: the mean of x x' over the inputs x, (K, K).
    """
    importance = np.diag(covariance)
    scales = _choose_scales(weight, importance)
    order = np.argsort(-importance, kind="stable")
    factor = _correction(covariance[np.ix_(order, order)])
    rest = weight[order]
    integers = np.zeros(weight.shape, np.int8)
    for start in range(0, len(rest), BLOCK_ROWS):
        block = slice(start, start + BLOCK_ROWS)
        values, losses = _round_block(rest[block], factor[block, block], scales)
        integers[order[block]] = values
        rest[start + BLOCK_ROWS :] -= factor[block, start + BLOCK_ROWS :].T @ losses
    return RoundedWeight(integers, scales)


def _round_block(
    rows: FloatArray, factor: FloatArray, scales: FloatArray
) -> tuple[npt.NDArray[np.int8], FloatArray]:
    """Round rows in order, `rows` being changed, and return them and what each of them lost."""
    values, losses = np.empty(rows.shape, np.int8), np.empty_like(rows)
    for index, row in enumerate(rows):
        values[index] = np.clip(np.rint(row / scales), -LARGEST_WEIGHT, LARGEST_WEIGHT)
        losses[index] = (row - values[index] * scales) / factor[index, index]
        rows[index:] -= np.outer(factor[index, index:], losses[index])
    return values, losses


def _correction(covariance: FloatArray) -> FloatArray:
    """Return the upper Cholesky factor of the inverse (K, K)."""
    damped = covariance.astype(np.float64)
    damped[np.diag_indices(len(damped))] += DAMPING * np.diag(damped).mean() + np.finfo(np.float32).tiny
    return np.asarray(np.linalg.cholesky(np.linalg.inv(damped)).T, np.float32)


def _choose_scales(weight: FloatArray, importance: FloatArray) -> FloatArray:
    """Return the scale of each column (N,) with the least error, the largest values being cut off."""
    whole = np.abs(weight).max(axis=0) / np.float32(LARGEST_WEIGHT)
    whole[whole == 0] = 1
    candidates = [whole * np.float32(step) for step in _SCALE_STEPS]
    errors = []
    for scales in candidates:
        rounded = np.clip(np.rint(weight / scales), -LARGEST_WEIGHT, LARGEST_WEIGHT) * scales
        errors.append(importance @ (rounded - weight) ** 2)
    best = np.argmin(errors, axis=0)  # (N,)
    return np.asarray(np.take_along_axis(np.array(candidates), best[None], axis=0)[0], np.float32)
