"""Measures attention against a recurrent layer of the same width. T tokens, D hidden size, H heads."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from attnlens_analysis.timing import growing, measure

_Vectors = npt.NDArray[np.float32]
# One thread. With glibc, memory stays in the process: to return it after each product takes longer than that.
_ENVIRONMENT = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
) | dict.fromkeys(("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"), str(2**30))


def measure_recurrence(
    hidden_size: int, num_heads: int, lengths: Sequence[int]
) -> list[tuple[int, float, float]]:
    """Return (length, milliseconds of attention, milliseconds of a recurrent loop) for each length.

    Both are written in NumPy with random fp32 weights and run on one thread, in a process of their own: NumPy
    reads the number of threads at its import. The times are medians of CPU time. Lengths whose times are
    within the noise are omitted. The width is rounded down to a multiple of the number of heads.
    """
    if not lengths:
        return []
    arguments = json.dumps([hidden_size, num_heads, list(lengths)])
    environment = os.environ | _ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(sys.path)}
    code = "import sys; from attnlens_analysis.teach.recurrence import run; run(sys.argv[1])"
    result = subprocess.run(  # noqa: S603 - this module, in this interpreter
        [sys.executable, "-c", code, arguments], env=environment, stdout=subprocess.PIPE, check=True
    )
    return [(length, attention, loop) for length, attention, loop in json.loads(result.stdout)]


def run(arguments: str) -> None:
    """Measure and print the result, for `measure_recurrence`."""
    hidden_size, num_heads, lengths = json.loads(arguments)
    generator = np.random.default_rng(0)
    width = hidden_size // num_heads * num_heads
    weights = generator.normal(size=(4, width, width), scale=width**-0.5).astype(np.float32)
    functions = []
    for length in lengths:
        inputs = generator.normal(size=(length, width)).astype(np.float32)
        functions += [partial(_attend, inputs, weights, num_heads), partial(_recur, inputs, weights)]
    timings = measure(functions)
    rows = list(zip(timings[::2], timings[1::2], strict=True))
    kept = [(lengths[index], *(each.median_ms for each in rows[index])) for index in growing(rows)]
    sys.stdout.write(json.dumps(kept))


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
