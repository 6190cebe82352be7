"""The numbers of one head in a file of numpy, for readers who compute on."""

from typing import BinaryIO

import numpy as np

from attnlens_analysis.teach.values import Question


def save_arrays(question: Question, file: BinaryIO) -> None:
    """Write x (T, D), q, k, v, context (T, K), scores, bias, weights (T, T), scale and tokens (T,).

    scores = scale * q k^T + bias, which is very low where a token may not attend.
    """
    values, head = question.values, question.head
    np.savez_compressed(
        file,
        x=values.entering,
        q=values.query[head],
        k=values.key[head],
        v=values.value[head],
        context=values.context[head],
        scores=values.scores[head],
        bias=(values.scores - values.products)[head],
        weights=values.weights[head],
        scale=np.float64(values.scale),
        tokens=np.array(question.sentence.labels),
    )
