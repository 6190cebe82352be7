"""The exact products of what the input tokens of two texts contribute to their embeddings.

    C  = what each of T tokens, and last all biases, gave to p: (T + 1, E), its rows add up to p
    N  = C C'^T / (|p| |p'|): (T + 1, T' + 1), its elements add up to the cosine of p and p'

The graph of contributions returns C d / |p| for one direction d. With the unit vectors as directions, E runs
of a text give C / |p|; with the rows of that as directions, T + 1 runs of the other text give N. The vectors
are those of DecompX (Modarressi et al. 2023, https://arxiv.org/abs/2306.02873), with biases in a row of their
own.

Letters: T tokens of a text, E components of an embedding.
"""

import numpy as np

from attnlens.explanations import Float64Array
from attnlens_server.serving.explanations.runs import Call, Runs, Text, unit_vectors


async def input_matrix(first: Text, second: Text, runs: Runs, call: Call) -> Float64Array:
    """Return N, (T + 1, T' + 1), the biases last. The shorter text gets the runs with unit vectors.

    Raises:
        RequestError: a run failed, or the deadline passed.
    """
    if first.encoded.num_tokens < second.encoded.num_tokens:
        return (await input_matrix(second, first, runs, call)).T
    portions = [portion async for portion in runs.sweep(second, unit_vectors(call.plan.dimensions), call)]
    vectors = np.concatenate(portions).T  # (T' + 1, E)
    return np.concatenate([portion async for portion in runs.sweep(first, vectors, call)]).T
