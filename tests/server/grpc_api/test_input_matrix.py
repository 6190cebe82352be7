"""PAIR_MATRIX_INPUT on a real server with real weights, checked against references and other explanations."""

from typing import Any

import grpc
import numpy as np
import pytest

from attnlens.tensors import from_tensor
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens.v1.explanation_pb2 import (
    EXPLAIN_LEVEL_WORDS,
    EXPLAIN_METHOD_LEAVE_ONE_OUT,
    PAIR_MATRIX_INPUT,
    PAIR_MATRIX_OUTPUT,
)
from attnlens.v1.manifest_pb2 import POOLING_CLS, POOLING_MAX, POOLING_WEIGHTED_MEAN, Pooling
from failures import read_failure

A, B = "A man is playing a guitar.", "Someone plays an instrument."


def pair_of(a: str, b: str) -> pb.ComparedPair:
    return pb.ComparedPair(a=pb.Input(text=a), b=pb.Input(text=b))


def compare(stub: EncoderServiceStub, a: str, b: str, **fields: Any) -> pb.Comparison:
    request = pb.CompareRequest(pairs=[pair_of(a, b)], matrix=PAIR_MATRIX_INPUT, **fields)
    [result] = stub.Compare(request, timeout=60).results
    return result


def cells(pair: pb.Comparison) -> np.ndarray:
    """Return matrix and baselines as one array, (n + 1, m + 1) float64."""
    last = np.append(from_tensor(pair.baseline_row), pair.baseline)
    rows = np.column_stack([from_tensor(pair.matrix), from_tensor(pair.baseline_column)])
    return np.vstack([rows, last]).astype(np.float64)


def check_sums(found: np.ndarray, pair: pb.Comparison, tolerance: float = 1e-4) -> None:
    """Check that all cells sum to the cosine similarity, and rows and columns to the scores of each side."""
    assert found.sum() == pytest.approx(pair.similarity, abs=tolerance)
    for axis, side in ((1, pair.a), (0, pair.b)):
        [scores] = side.scores
        expected = np.append(from_tensor(scores.values), scores.baseline)
        np.testing.assert_allclose(found.sum(axis=axis), expected, atol=tolerance)


def test_input_matrix_of_a_pair_matches_the_reference(stub: EncoderServiceStub) -> None:
    pair = compare(stub, A, B)
    matrix = from_tensor(pair.matrix)
    assert matrix.shape == (9, 7)
    assert matrix.max() == matrix[6, 4] == pytest.approx(0.2335, abs=2e-4)  # guitar, instrument
    assert matrix[4, 2] == pytest.approx(0.1125, abs=2e-4)  # playing, plays
    assert matrix.sum(dtype=np.float64) == pytest.approx(0.99353, abs=2e-4)
    found = cells(pair)
    assert found.sum() - matrix.sum(dtype=np.float64) == pytest.approx(-0.32609, abs=2e-4)
    check_sums(found, pair, 2e-5)


def test_swapping_the_texts_transposes_the_matrix(stub: EncoderServiceStub) -> None:
    np.testing.assert_allclose(cells(compare(stub, A, B)), cells(compare(stub, B, A)).T, atol=2e-5)


@pytest.mark.parametrize("pooling", [POOLING_CLS, POOLING_MAX, POOLING_WEIGHTED_MEAN])
def test_rows_and_columns_sum_to_the_scores_for_every_pooling(
    stub: EncoderServiceStub, pooling: Pooling.ValueType
) -> None:
    for fields in ({}, {"dimensions": 50}):
        pair = compare(stub, A, B, pooling=pooling, **fields)
        check_sums(cells(pair), pair)


def test_word_cells_are_the_sums_of_token_cells(stub: EncoderServiceStub) -> None:
    text = "Unbelievably electroencephalographic!"
    tokens, words = compare(stub, text, A), compare(stub, text, A, level=EXPLAIN_LEVEL_WORDS)
    found = cells(words)
    assert found.shape == (6, 10)  # [CLS], two words, the punctuation mark, [SEP] and the baseline
    numbers = np.array([*words.a.unit_ids, 5])
    sums = [cells(tokens)[numbers == number].sum(axis=0) for number in range(6)]
    np.testing.assert_allclose(found, sums, atol=1e-5)
    check_sums(found, words)


def test_pairs_of_one_request_get_their_own_matrices(stub: EncoderServiceStub) -> None:
    pairs = [pair_of(A, B), pair_of(B, "It rained."), pair_of("wet", A)]
    request = pb.CompareRequest(pairs=pairs, matrix=PAIR_MATRIX_INPUT, dimensions=64)
    for given, found in zip(pairs, stub.Compare(request, timeout=60).results, strict=True):
        alone = compare(stub, given.a.text, given.b.text, dimensions=64)
        np.testing.assert_allclose(cells(found), cells(alone), atol=2e-5)
        check_sums(cells(found), found)


def test_other_matrices_have_no_baselines(stub: EncoderServiceStub) -> None:
    request = pb.CompareRequest(pairs=[pair_of(A, B)], matrix=PAIR_MATRIX_OUTPUT)
    [pair] = stub.Compare(request, timeout=60).results
    assert pair.HasField("matrix")
    assert not any(pair.HasField(name) for name in ("baseline_row", "baseline_column", "baseline"))


def test_request_with_too_many_runs_is_rejected(stub: EncoderServiceStub) -> None:
    pairs = [pair_of(A, B)] * 48
    request = pb.CompareRequest(pairs=pairs, matrix=PAIR_MATRIX_INPUT, methods=[EXPLAIN_METHOD_LEAVE_ONE_OUT])
    with pytest.raises(grpc.RpcError) as caught:
        stub.Compare(request, timeout=60)
    failure = read_failure(caught.value)
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "REQUEST_TOO_EXPENSIVE")
    swept, masked = 2 * (384 * 7 + 8 * 9), 7 * 9 + 5 * 7
    assert failure.metadata["computed_tokens"] == str(48 * (swept + masked))
    assert f"matrix needs {48 * swept} of {48 * (swept + masked)} computed tokens" in failure.message
    assert "request fewer dimensions, or omit leave-one-out" in failure.message
