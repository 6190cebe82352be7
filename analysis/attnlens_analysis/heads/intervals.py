"""Confidence intervals: Wilson for shares of correct predictions, bootstrap for means over texts.

Shape legend: I items (texts), N heads.
"""

import math

import numpy as np
import numpy.typing as npt

NUM_RESAMPLES = 1000
SEED = 0
_Z95 = 1.959964  # quantile of the standard normal distribution for a 95 % interval
_PERCENTILES = (2.5, 97.5)
_BATCH = 100

Values = npt.NDArray[np.float64]


def wilson_interval(num_correct: int, number: int) -> tuple[float, float]:
    """Return the 95 % interval of `num_correct / number` (Wilson 1927), or NaN if `number` is 0."""
    if not number:
        return math.nan, math.nan
    share, z2 = num_correct / number, _Z95**2
    center = share + z2 / (2 * number)
    spread = _Z95 * math.sqrt(share * (1 - share) / number + z2 / (4 * number**2))
    return (center - spread) / (1 + z2 / number), (center + spread) / (1 + z2 / number)


def bootstrap_ratio(numerators: Values, denominators: Values) -> Values:
    """Return the 95 % percentile interval of sum(numerators) / sum(denominators) over items, (2, N).

    Draws `NUM_RESAMPLES` samples of I items with replacement (Efron 1979) with the seed `SEED`. A ratio whose
    denominator is 0 in a sample is ignored. The interval is NaN if all of them are.

    Args:
        numerators: (I, N).
        denominators: (I, N) or (I, 1), not negative. Use ones for the interval of a mean.
    """
    generator = np.random.default_rng(SEED)
    num_items = len(numerators)
    ratios = np.empty((NUM_RESAMPLES, numerators.shape[1]))
    for start in range(0, NUM_RESAMPLES, _BATCH):
        counts = generator.multinomial(num_items, np.full(num_items, 1 / num_items), size=_BATCH)
        above, below = counts @ numerators, counts @ denominators
        ratios[start : start + _BATCH] = np.where(below > 0, above / np.where(below > 0, below, 1), np.nan)
    interval = np.full((2, numerators.shape[1]), np.nan)
    is_defined = ~np.isnan(ratios).all(axis=0)
    interval[:, is_defined] = np.nanpercentile(ratios[:, is_defined], _PERCENTILES, axis=0)
    return interval
