"""Reference implementation of attention reductions: float64 loops.

Dimension names: H heads, T tokens, U units.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Maps: TypeAlias = npt.NDArray[Any]


def random_maps(num_heads: int, num_tokens: int, seed: int = 0) -> npt.NDArray[np.float32]:
    """Return maps (H, T, T) with zero and tied weights. Each row sums to 1."""
    generator = np.random.default_rng(seed)
    maps = generator.integers(0, 6, (num_heads, num_tokens, num_tokens)).astype(np.float64)
    maps[..., 0] += 1  # no row is all zeros
    maps /= maps.sum(axis=-1, keepdims=True)
    return np.asarray(maps, dtype=np.float32)


def word_level(maps: Maps, words: Sequence[int]) -> Maps:
    """Sum over the tokens of each key word and average over those of each query word."""
    count = max(words) + 1
    result = np.zeros((len(maps), count, count))
    for head, query, key in np.ndindex(maps.shape):
        share = 1 / list(words).count(words[query])
        result[head, words[query], words[key]] += share * float(maps[head, query, key])
    return result


def without(maps: Maps, dropped: Sequence[bool]) -> tuple[Maps, Maps]:
    """Return the rescaled maps of the kept units, and the weight that was removed from each row."""
    kept = [unit for unit, is_dropped in enumerate(dropped) if not is_dropped]
    result = np.zeros((len(maps), len(kept), len(kept)))
    mass = np.zeros((len(maps), len(kept)))
    for head in range(len(maps)):
        for row, query in enumerate(kept):
            remaining = math.fsum(float(maps[head, query, key]) for key in kept)
            mass[head, row] = math.fsum(map(float, maps[head, query])) - remaining
            for column, key in enumerate(kept):
                result[head, row, column] = float(maps[head, query, key]) / remaining if remaining else 0.0
    return result, mass


def rollout(layers: Sequence[Maps], residual: float) -> Maps:
    """Return the share of each token before the first layer in each token after the last."""
    count = layers[0].shape[-1]
    mixed = np.eye(count)
    for maps in layers:
        after = np.zeros((count, count))
        for query, key in np.ndindex(count, count):
            after[query] += (1 - residual) * float(maps[0, query, key]) * mixed[key]
        mixed = after + residual * mixed
    return mixed[np.newaxis]


def received(maps: Maps, is_special: Sequence[bool]) -> Maps:
    """Return column sums over the rows that are not special."""
    result = np.zeros((maps.shape[0], maps.shape[2]))
    for head, query, key in np.ndindex(maps.shape):
        result[head, key] += 0.0 if is_special[query] else float(maps[head, query, key])
    return result


def entropy(maps: Maps) -> Maps:
    """Return the entropy of each row in nats."""
    result = np.zeros(maps.shape[:2])
    for head, query in np.ndindex(result.shape):
        result[head, query] = -math.fsum(a * math.log(a) for a in map(float, maps[head, query]) if a > 0)
    return result


def top(row: Sequence[float], k: int) -> tuple[list[int], float]:
    """Return the columns of the k largest weights, ties sorted by column, and the sum of the others."""
    order = sorted(range(len(row)), key=lambda column: (-row[column], column))
    return order[:k], math.fsum(float(row[column]) for column in order[k:])


def compressed(maps: Maps, threshold: float) -> tuple[list[int], list[int], list[float], list[float]]:
    """Return row starts, columns, values and kept mass of the weights that are at least `threshold`."""
    starts, columns, values, kept = [0], list[int](), list[float](), list[float]()
    for head, query in np.ndindex(maps.shape[:2]):
        selected = [key for key, weight in enumerate(maps[head, query]) if weight >= np.float32(threshold)]
        columns += selected
        values += [float(maps[head, query, key]) for key in selected]
        kept.append(math.fsum(float(maps[head, query, key]) for key in selected))
        starts.append(len(columns))
    return starts, columns, values, kept
