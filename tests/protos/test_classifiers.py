"""Scores of logits, compared with PyTorch."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from attnlens.classifiers import ScoreActivation, scores_of

FUNCTIONS: dict[ScoreActivation, Callable[[torch.Tensor], torch.Tensor]] = {
    ScoreActivation.IDENTITY: lambda x: x,
    ScoreActivation.SIGMOID: torch.sigmoid,
    ScoreActivation.SOFTMAX: lambda x: torch.softmax(x, dim=-1),
}
LOGITS = np.array([[0.5, -3.0, 2.0], [1000.0, -1000.0, 0.0], [-50.0, 50.0, -50.0]], np.float32)


@pytest.mark.parametrize("activation", ScoreActivation)
def test_scores_equal_pytorch_in_float64(activation: ScoreActivation) -> None:
    expected = FUNCTIONS[activation](torch.tensor(LOGITS, dtype=torch.float64)).numpy()
    scores = scores_of(LOGITS, activation)
    assert scores.dtype == np.float64
    np.testing.assert_allclose(scores, expected, rtol=1e-14, atol=1e-300)


def test_scores_of_large_logits_differ() -> None:
    logits = np.array([[20.0], [20.5], [21.0]], np.float32)
    assert len({*scores_of(logits, ScoreActivation.SIGMOID).ravel()}) == 3
