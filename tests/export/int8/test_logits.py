"""Texts and pairs for the logits of classifiers, the agreement of their logits, and its gate."""

import numpy as np
import pytest
from scipy.stats import kendalltau

from attnlens.v1.manifest_pb2 import GateKind
from attnlens.v1.quantization_pb2 import Quantization
from attnlens_export.int8.logits import (
    MAX_QUERIES,
    Logits,
    Scorer,
    make_pairs,
    rank_agreement,
)
from attnlens_export.int8.result import LogitsGate, to_result
from attnlens_export.int8.texts import Agreement, Batch, KindAgreement
from attnlens_export.parity.grid import Inputs

RANDOM = np.random.default_rng(0)


def draw(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


RANKS, ERROR = GateKind.GATE_KIND_MIN_RANK_AGREEMENT, GateKind.GATE_KIND_MAX_LOGIT_ERROR


def agreement(rank: float, error: float, kind: str = "prose") -> Agreement:
    return Agreement({kind: KindAgreement(7, {RANKS: rank, ERROR: error})}, error**2 / 9)


@pytest.mark.parametrize("num_ties", [0, 5])
def test_rank_agreement_of_one_query_is_that_of_scipy(num_ties: int) -> None:
    expected = draw(30, 1)
    measured = expected + draw(30, 1)
    measured[:num_ties] = 0.5  # ties in int8 count as compared, as in tau-a
    found = rank_agreement(measured, expected, np.zeros(30, np.int64))
    tau_b = kendalltau(measured, expected).statistic
    ties = num_ties * (num_ties - 1) / 2
    assert found == pytest.approx(tau_b * np.sqrt(1 - ties / (30 * 29 / 2)))


def test_ranks_are_compared_within_a_query_and_a_label() -> None:
    expected = np.array([[1, 9], [2, 8], [10, 7], [30, 6]], np.float32)
    of_two = np.array([0, 0, 1, 1])
    # The second query moves below the first, which changes no rank within them.
    assert rank_agreement(expected - np.array([[0], [0], [50], [50]]), expected, of_two) == 1
    swapped = expected[:, ::-1]
    assert rank_agreement(swapped, expected, of_two) == -1
    assert rank_agreement(expected[[0, 1, 3, 2]], expected, of_two) == 0
    assert np.isnan(rank_agreement(expected * np.nan, expected, of_two))


def test_equal_logits_in_fp32_are_not_compared() -> None:
    expected = np.zeros((3, 1), np.float32)
    assert rank_agreement(draw(3, 1), expected, np.zeros(3, np.int64)) == 1


def test_documents_of_a_query_have_less_and_less_in_common_with_it() -> None:
    pairs = list(make_pairs(["a b c d", "e f g", "h i", "k"]))
    assert [pair for number, pair in pairs if number == 0] == [
        ("a b c d", document) for document in ("a b c d", "a b", "c d", "a b f g", "e f g", "h i")
    ]
    assert [pair for number, pair in pairs if number == 3][1:4] == [("k", ""), ("k", "k"), ("k", " c d")]
    assert len(list(make_pairs([str(index) for index in range(1000)]))) <= 6 * MAX_QUERIES


def test_errors_are_relative_to_the_spread_of_all_kinds() -> None:
    batch = Batch(Inputs(np.zeros((4, 1), np.int64), np.ones((4, 1), np.int64), None), (0, 1, 2, 3))
    scorer, queries = Scorer([batch], [0, 0, 1, 1]), np.array([0, 0, 1, 1])
    expected = {
        "a": Logits(np.add(draw(4, 2), 10, dtype=np.float32), queries),
        "b": Logits(draw(4, 2), queries),
    }
    both = np.concatenate([logits.per_text for logits in expected.values()])
    spread = np.sqrt(both.var(axis=0).mean())
    errors = draw(4, 2) / 100
    measured = expected | {"b": Logits(np.add(expected["b"].per_text, errors, dtype=np.float32), queries)}
    found = scorer.compare(measured, expected)
    assert found.remark.endswith(f"{spread:.4g}")
    assert found.kinds["a"].values == {RANKS: 1, ERROR: 0}
    assert found.kinds["b"].values[ERROR] == pytest.approx(abs(errors).max() / spread, rel=1e-3)
    assert found.loss == pytest.approx((errors**2).mean() / spread**2, rel=1e-3)
    assert "b" in found.describe_kinds()


def test_gate_limits_ranks_and_errors_of_each_kind() -> None:
    gate = LogitsGate(0.95, 0.3)
    assert gate.used_share(agreement(0.975, 0.1)) == pytest.approx(0.5)
    assert gate.used_share(agreement(0.99, 0.6)) == pytest.approx(2)
    assert gate.used_share(agreement(np.nan, 0.1)) > 1e9
    assert gate.used_share(agreement(1.0, np.nan)) > 1e9
    assert gate.tightened(0.5) == LogitsGate(0.975, 0.15)
    [failure] = to_result(gate, agreement(0.94, 0.1), Quantization(), 90, 0.0).failures()
    assert "min rank agreement of logits on 7 texts (prose) is 0.940000 (limit 0.95)" in failure
    [failure] = to_result(gate, agreement(0.96, 0.1), Quantization(), 90, 2e-5).failures()
    assert "max batch difference of logits on the first and last text of each batch is 2e-05" in failure
    assert LogitsGate.from_messages(gate.to_messages()) == gate
    assert gate.limits == {RANKS: 0.95, ERROR: 0.3}


def test_rank_agreement_at_the_allowed_loss_is_the_limit() -> None:
    """Checks the formula in the docstring of `LogitsGate` on normal logits and errors."""
    gate = LogitsGate()
    expected = draw(1500, 1)
    measured = expected + np.sqrt(gate.allowed_loss) * draw(1500, 1)
    found = rank_agreement(measured, expected, np.zeros(1500, np.int64))
    assert found == pytest.approx(gate.min_rank_agreement, abs=0.004)


def test_cosines_of_a_classifier_are_not_recorded() -> None:
    result = to_result(LogitsGate(), agreement(0.99, 0.1), Quantization(), 90, 0.0)
    assert result.quantization == Quantization(num_texts=7, num_tokens=90)
