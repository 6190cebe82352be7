"""Explain and Compare on a real server with real weights, checked against references and ONNX Runtime."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnxruntime
import pytest
import tokenizers

from attnlens.tensors import from_tensor, to_tensor
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens.v1.explanation_pb2 import (
    EXPLAIN_LEVEL_WORDS,
    EXPLAIN_METHOD_CONTRIBUTIONS,
    EXPLAIN_METHOD_LEAVE_ONE_OUT,
    EXPLAIN_METHOD_OUTPUT_SHARE,
    EXPLAIN_METHOD_RECEIVED_ATTENTION,
    EXPLAIN_METHOD_ROLLOUT,
    PAIR_MATRIX_INTERACTION,
    PAIR_MATRIX_OUTPUT,
    PairMatrix,
)
from attnlens.v1.manifest_pb2 import POOLING_MAX, POOLING_MEAN, Pooling
from attnlens.v1.tensor_pb2 import DataType, Tensor
from failures import Failure, read_failure
from references import TEXTS

SENTENCE = "The animal didn't cross the street because it was too tired."
A, B = "A man is playing a guitar.", "Someone plays an instrument."
# Computed in float64 by an independent program from the formulas in docs/explanations.md.
REFERENCE_SCORES: dict[int, list[float]] = {
    EXPLAIN_METHOD_CONTRIBUTIONS: [
        .01596, .04536, .28130, .04249, .00595, .01989, .09207, .01495,
        .15746, .02761, .01113, .02128, .02190, .14598, .00344, .01074,
    ],
    EXPLAIN_METHOD_OUTPUT_SHARE: [
        .04884, .06977, .08549, .06892, .04894, .05531, .06407, .05702,
        .07360, .05323, .07127, .06242, .04315, .07252, .05931, .06614,
    ],
    EXPLAIN_METHOD_LEAVE_ONE_OUT: [
        np.nan, .01477, .16094, .02793, .00359, .01509, .04965, .00622,
        .10288, .00725, .00387, .00353, .00903, .10590, .00499, np.nan,
    ],
    EXPLAIN_METHOD_ROLLOUT: [
        .60106, .02934, .02315, .02290, .01693, .01317, .01987, .02203,
        .02182, .02380, .01699, .01827, .01516, .02435, .04231, .08886,
    ],
}  # fmt: skip
RECEIVED = {0: 5.88997, 13: 1.77558, 2: 1.43840, 8: 1.17325}
PAIR = (
    ([.0343, .0388, .0203, .0264, .1549, .0226, .3205, .0321, .0319], -.01444),
    ([.0311, .1341, .1924, .0330, .3126, .0321, .0330], -.10084),
)  # fmt: skip
TOLERANCE = 2e-4


def given(text: str) -> pb.Input:
    return pb.Input(text=text)


def explain(stub: EncoderServiceStub, *texts: str, **fields: Any) -> list[pb.Explanation]:
    return list(stub.Explain(pb.ExplainRequest(inputs=map(given, texts), **fields), timeout=60).results)


def compare(stub: EncoderServiceStub, a: str, b: str, **fields: Any) -> pb.Comparison:
    pair = pb.ComparedPair(a=given(a), b=given(b))
    [result] = stub.Compare(pb.CompareRequest(pairs=[pair], **fields), timeout=60).results
    return result


def rejection(stub: EncoderServiceStub, **fields: Any) -> Failure:
    with pytest.raises(grpc.RpcError) as caught:
        explain(stub, SENTENCE, **fields)
    return read_failure(caught.value)


def vector(stub: EncoderServiceStub, text: str, **fields: Any) -> np.ndarray:
    reply = stub.Embed(pb.EmbedRequest(inputs=[given(text)], normalize=True, **fields))
    return np.asarray(from_tensor(reply.embeddings)[0], dtype=np.float64)


def total(scores: pb.TokenScores) -> float:
    return float(from_tensor(scores.values).sum(dtype=np.float64)) + scores.baseline


def tensor(values: Any) -> Tensor:
    return to_tensor(np.asarray(values, np.float32), DataType.DATA_TYPE_FLOAT32)


# --- reference values -----------------------------------------------------------------------------


def test_scores_of_a_sentence_match_the_reference(stub: EncoderServiceStub) -> None:
    [text] = explain(stub, SENTENCE, methods=[*REFERENCE_SCORES, EXPLAIN_METHOD_RECEIVED_ATTENTION])
    assert text.target_value == pytest.approx(1, abs=1e-9)
    for scores, (method, expected) in zip(text.scores, REFERENCE_SCORES.items(), strict=False):
        assert scores.method == method
        np.testing.assert_allclose(from_tensor(scores.values), expected, atol=TOLERANCE)
    contributions, shares, effects, rollout, received = text.scores
    assert contributions.baseline == pytest.approx(0.082509, abs=TOLERANCE)
    assert contributions.sum == pytest.approx(1, abs=1e-5)
    assert shares.sum == pytest.approx(1, abs=1e-6)
    assert rollout.sum == pytest.approx(1, abs=1e-6)
    for token, weight in RECEIVED.items():
        assert from_tensor(received.values)[token] == pytest.approx(weight, abs=TOLERANCE)
    for ranking in (effects, rollout, received):
        assert not ranking.HasField("baseline")
        assert not ranking.HasField("expected_sum")
    assert received.sum == pytest.approx(16, abs=1e-5)
    measured = {
        each.method: each.rank_correlation for each in stub.GetModel(pb.GetModelRequest()).model.faithfulness
    }
    for scores in text.scores:
        assert scores.HasField("faithfulness") == (scores.method in measured)
        assert scores.faithfulness == measured.get(scores.method, 0)


def test_scores_of_a_pair_match_the_reference(stub: EncoderServiceStub) -> None:
    pair = compare(stub, A, B, matrix=PAIR_MATRIX_OUTPUT)
    assert pair.similarity == pytest.approx(0.667446, abs=TOLERANCE)
    for side, (values, baseline) in zip((pair.a, pair.b), PAIR, strict=True):
        [scores] = side.scores
        np.testing.assert_allclose(from_tensor(scores.values), values, atol=TOLERANCE)
        assert scores.baseline == pytest.approx(baseline, abs=TOLERANCE)
        assert total(scores) == pytest.approx(pair.similarity, abs=1e-5)
    matrix = from_tensor(pair.matrix)
    assert matrix.max() == matrix[4, 2] == pytest.approx(0.0501, abs=TOLERANCE)
    assert matrix[6, 4] == pytest.approx(0.0391, abs=TOLERANCE)
    assert matrix.sum(dtype=np.float64) == pytest.approx(pair.similarity, abs=1e-6)


def test_interaction_of_a_pair_matches_the_reference(stub: EncoderServiceStub) -> None:
    pair = compare(stub, A, B, matrix=PAIR_MATRIX_INTERACTION)
    matrix = from_tensor(pair.matrix)
    assert matrix[6, 4] == pytest.approx(0.4181, abs=TOLERANCE)
    assert np.isnan(matrix[[0, -1]]).all()
    assert np.isnan(matrix[:, [0, -1]]).all()
    assert np.isfinite(matrix[1:-1, 1:-1]).all()


def test_leave_one_out_matches_embeddings_without_the_token(
    stub: EncoderServiceStub, minilm_bundle: Path
) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(minilm_bundle / "tokenizer.json"))
    tokenizer.no_padding()
    session = onnxruntime.InferenceSession(minilm_bundle / "onnx" / "model.onnx")
    ids = np.array([tokenizer.encode(SENTENCE).ids])

    def embed(without: int | None) -> np.ndarray:
        mask = np.ones_like(ids)
        if without is not None:
            mask[0, without] = 0
        feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        [hidden] = session.run(["last_hidden_state"], feed)
        mean = hidden[0, mask[0] == 1].mean(axis=0, dtype=np.float64)
        return np.asarray(mean / np.linalg.norm(mean))

    whole, other = embed(None), vector(stub, B)
    [text] = explain(stub, SENTENCE, methods=[EXPLAIN_METHOD_LEAVE_ONE_OUT], to=given(B))
    found = from_tensor(text.scores[0].values)
    for token in range(1, ids.shape[1] - 1):
        assert found[token] == pytest.approx((whole - embed(token)) @ other, abs=1e-5)
    assert np.isnan(found[[0, -1]]).all()  # special tokens


# --- every target, pooling and truncation ----------------------------------------------------------

TARGETS: dict[str, dict[str, Any]] = {
    "own_embedding": {},
    "direction": {"direction": tensor(np.random.default_rng(0).standard_normal(384))},
    "to": {"to": given(B)},
    "contrast": {"contrast": pb.Contrast(to=given(B), rather_than=given("It rained."))},
}


@pytest.mark.parametrize("pooling", Pooling.values()[1:])
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_scores_and_baseline_sum_to_the_embed_similarity(
    stub: EncoderServiceStub, target: dict[str, Any], pooling: Pooling.ValueType
) -> None:
    texts = [SENTENCE, A, "wet"]
    for text, explained in zip(texts, explain(stub, *texts, pooling=pooling, **target), strict=True):
        own = vector(stub, text, pooling=pooling)
        direction = own
        if "direction" in target:
            direction = from_tensor(target["direction"])
        elif target:
            direction = vector(stub, B, pooling=pooling)
            if "contrast" in target:
                direction = direction - vector(stub, "It rained.", pooling=pooling)
        [scores] = explained.scores
        size = float(np.linalg.norm(direction))
        assert explained.target_value == pytest.approx(direction @ own, abs=1e-5 * max(size, 1))
        assert scores.expected_sum == explained.target_value
        assert total(scores) == pytest.approx(explained.target_value, abs=2e-5 * max(size, 1))
        assert scores.sum == pytest.approx(total(scores), abs=1e-9)


def test_contrast_is_the_difference_of_two_explanations(stub: EncoderServiceStub) -> None:
    to, rather_than = given(B), given("It rained.")
    [both] = explain(stub, A, contrast=pb.Contrast(to=to, rather_than=rather_than))
    [first], [second] = explain(stub, A, to=to), explain(stub, A, to=rather_than)
    difference = from_tensor(first.scores[0].values) - from_tensor(second.scores[0].values)
    np.testing.assert_allclose(from_tensor(both.scores[0].values), difference, atol=1e-5)
    assert both.target_value == pytest.approx(first.target_value - second.target_value, abs=1e-6)
    assert first.target_value == pytest.approx(vector(stub, A) @ vector(stub, B), abs=1e-5)


def test_only_the_requested_dimensions_are_explained(stub: EncoderServiceStub) -> None:
    for fields in ({}, {"to": given(B)}):
        methods = [EXPLAIN_METHOD_CONTRIBUTIONS, EXPLAIN_METHOD_OUTPUT_SHARE]
        [text] = explain(stub, A, dimensions=50, methods=methods, **fields)
        own = vector(stub, A, dimensions=50)
        direction = vector(stub, B, dimensions=50) if fields else own
        assert text.target_value == pytest.approx(direction @ own, abs=1e-5)
        for scores in text.scores:
            assert total(scores) == pytest.approx(direction @ own, abs=1e-5)
    assert (
        "has the shape [384]: use [50], the shape of the embedding"
        in rejection(stub, dimensions=50, direction=TARGETS["direction"]["direction"]).message
    )


def test_text_and_target_have_separate_prompts(stub: EncoderServiceStub) -> None:
    prompt, other = pb.Prompt(text="query: "), pb.Prompt(text="passage: ")
    [text] = explain(stub, A, prompt=prompt, to=given(B), target_prompt=other)
    expected = vector(stub, A, prompt=prompt) @ vector(stub, B, prompt=other)
    assert text.target_value == pytest.approx(expected, abs=1e-5)
    assert [token.source for token in text.tokens[:3]] == [1, 2, 2]
    pair = compare(stub, A, B, prompt_a=prompt, prompt_b=other)
    assert pair.similarity == pytest.approx(expected, abs=1e-5)
    assert "target_prompt is set, but" in rejection(stub, target_prompt=other).message


def test_word_scores_are_the_sums_of_their_token_scores(stub: EncoderServiceStub) -> None:
    methods = [EXPLAIN_METHOD_CONTRIBUTIONS, EXPLAIN_METHOD_LEAVE_ONE_OUT]
    text = "Unbelievably electroencephalographic!"
    [tokens] = explain(stub, text, methods=methods)
    [words] = explain(stub, text, methods=methods, level=EXPLAIN_LEVEL_WORDS)
    numbers = list(words.unit_ids)
    assert numbers[0] == 0
    assert max(numbers) + 1 == 5  # [CLS], two words, the punctuation mark, [SEP]
    for of_tokens, of_words in zip(tokens.scores, words.scores, strict=True):
        values = from_tensor(of_tokens.values)
        sums = [values[np.array(numbers) == word].sum() for word in range(5)]
        np.testing.assert_allclose(from_tensor(of_words.values), sums, atol=1e-6)
        assert of_words.sum == pytest.approx(of_tokens.sum, abs=1e-6)
    pair = compare(stub, text, B, matrix=PAIR_MATRIX_OUTPUT, level=EXPLAIN_LEVEL_WORDS)
    assert from_tensor(pair.matrix).shape == (5, 7)
    ids = pb.Input(token_ids=pb.TokenIds(input_ids=[101, 102]))
    with pytest.raises(grpc.RpcError, match="ids have no words"):
        stub.Explain(pb.ExplainRequest(inputs=[ids], level=EXPLAIN_LEVEL_WORDS))


def test_head_contributions_are_returned_on_request(stub: EncoderServiceStub) -> None:
    [text] = explain(stub, SENTENCE, head_contributions=True)
    heads = from_tensor(text.head_contributions)
    assert heads.shape == (6, 12)
    assert np.isfinite(heads).all()
    assert heads.any(axis=1).all()
    assert not explain(stub, SENTENCE)[0].HasField("head_contributions")


# --- batches --------------------------------------------------------------------------------------


def test_scores_are_the_same_alone_and_in_a_batch(stub: EncoderServiceStub) -> None:
    fields: list[dict[str, Any]] = [
        {"pooling": pooling, **target}
        for pooling in (POOLING_MEAN, POOLING_MAX)
        for target in TARGETS.values()
    ]
    calls = [(text, each) for each in fields for text in TEXTS]
    alone = [explain(stub, text, **each)[0] for text, each in calls]
    with ThreadPoolExecutor(16) as pool:
        in_parallel = list(pool.map(lambda call: explain(stub, call[0], **call[1])[0], calls * 2))
    for one, other in zip(alone * 2, in_parallel, strict=True):
        size = max(1.0, abs(one.target_value))
        np.testing.assert_allclose(
            from_tensor(other.scores[0].values), from_tensor(one.scores[0].values), atol=2e-5 * size
        )
        assert other.target_value == pytest.approx(one.target_value, abs=1e-5 * size)


def test_texts_of_one_request_get_their_own_scores(stub: EncoderServiceStub) -> None:
    texts = [text[:100] for text in TEXTS]  # one run for each omitted token
    together = explain(stub, *texts, to=given(B), methods=list(REFERENCE_SCORES))
    for text, found in zip(texts, together, strict=True):
        [alone] = explain(stub, text, to=given(B), methods=list(REFERENCE_SCORES))
        assert [token.id for token in found.tokens] == [token.id for token in alone.tokens]
        for one, other in zip(alone.scores, found.scores, strict=True):
            np.testing.assert_allclose(from_tensor(other.values), from_tensor(one.values), atol=1e-5)


def test_texts_of_one_batch_get_their_own_scores(stub: EncoderServiceStub) -> None:
    texts = [
        f"The {name} sat there." for name in ("cat", "dog", "king", "car", "judge", "rain", "child", "sun")
    ]
    for fields in ({}, {"to": given(B)}, {"pooling": POOLING_MAX}):
        together = explain(stub, *texts, **fields)
        assert len({len(found.tokens) for found in together}) == 1
        for text, found in zip(texts, together, strict=True):
            [alone] = explain(stub, text, **fields)
            assert found.scores[0].baseline == pytest.approx(alone.scores[0].baseline, abs=1e-5)
            assert found.target_value == pytest.approx(alone.target_value, abs=1e-6)
            values = from_tensor(found.scores[0].values)
            np.testing.assert_allclose(values, from_tensor(alone.scores[0].values), atol=1e-5)
    pairs = [pb.ComparedPair(a=given(a), b=given(b)) for a, b in zip(texts, texts[::-1], strict=True)]
    for pair, found_pair in zip(pairs, stub.Compare(pb.CompareRequest(pairs=pairs)).results, strict=True):
        [alone_pair] = stub.Compare(pb.CompareRequest(pairs=[pair])).results
        for side in ("a", "b"):
            one, other = getattr(found_pair, side).scores[0], getattr(alone_pair, side).scores[0]
            np.testing.assert_allclose(from_tensor(one.values), from_tensor(other.values), atol=1e-5)


def test_both_sides_of_a_pair_are_explained_towards_each_other(stub: EncoderServiceStub) -> None:
    pair = compare(stub, A, B)
    [a], [b] = explain(stub, A, to=given(B)), explain(stub, B, to=given(A))
    for side, alone in ((pair.a, a), (pair.b, b)):
        np.testing.assert_allclose(
            from_tensor(side.scores[0].values), from_tensor(alone.scores[0].values), atol=1e-5
        )
    pairs = [pb.ComparedPair(a=given(text), b=given(B)) for text in TEXTS]
    several = stub.Compare(pb.CompareRequest(pairs=pairs)).results
    for text, found in zip(TEXTS, several, strict=True):
        assert found.similarity == pytest.approx(compare(stub, text, B).similarity, abs=1e-5)


# --- rejected requests ----------------------------------------------------------------------------

INVALID_REQUESTS: dict[str, tuple[dict[str, Any], str]] = {
    "zeros": ({"direction": tensor(np.zeros(384))}, "direction is zero"),
    "NaN": ({"direction": tensor([np.nan] * 384)}, "direction contains NaN or infinity"),
    "wrong size": ({"direction": tensor([1, 2, 3])}, r"direction has the shape \[3\]"),
    "invalid tensor": (
        {"direction": Tensor(shape=[4], data=b"12")},
        "direction is not a valid tensor: 2 bytes",
    ),
    "empty tensor": ({"direction": Tensor()}, r"direction has the shape \[\]|is not a valid tensor"),
    "fp16": ({"direction": Tensor(data_type=DataType.DATA_TYPE_FLOAT16)}, "direction.data_type is 2"),
    "empty text": ({"to": pb.Input()}, "to is empty: set text"),
    "ids out of range": (
        {"to": pb.Input(token_ids=pb.TokenIds(input_ids=[30522]))},
        r"to.token_ids.input_ids\[0\] is 30522",
    ),
    "incomplete contrast": ({"contrast": pb.Contrast(to=given("a"))}, "contrast.rather_than is empty"),
    "identical contrast texts": (
        {"contrast": pb.Contrast(to=given("a"), rather_than=given("a"))},
        "contrast has two texts with the same embedding",
    ),
    "long target": ({"to": given("word " * 300)}, "to has 302 tokens, but the limit is 256"),
    "unknown target prompt": (
        {"to": given("a"), "target_prompt": pb.Prompt(name="x")},
        "target_prompt.name is 'x', but the model has no prompts",
    ),
    "repeated method": (
        {"methods": [1, 1]},
        r"methods\[1\] is EXPLAIN_METHOD_CONTRIBUTIONS, which is listed twice",
    ),
    "unknown method": ({"methods": [9]}, r"methods\[0\] is 9: use one of EXPLAIN_METHOD_CONTRIBUTIONS"),
    "unknown level": ({"level": 7}, "level is 7: use one of"),
    "contributions with max pooling": (
        {"methods": [2], "pooling": 3},
        "the maximum is not a sum of token vectors",
    ),
    "head contributions of another method": (
        {"methods": [4], "head_contributions": True},
        "head_contributions is set",
    ),
    "too many dimensions": ({"dimensions": 385}, "dimensions is 385: use 1 to 384"),
}


@pytest.mark.parametrize(("fields", "message"), INVALID_REQUESTS.values(), ids=INVALID_REQUESTS)
def test_invalid_request_is_reported_with_its_field(
    stub: EncoderServiceStub, fields: dict[str, Any], message: str
) -> None:
    failure = rejection(stub, **fields)
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert re.search(message, failure.message), failure.message


def test_invalid_pair_is_reported_with_its_index(stub: EncoderServiceStub) -> None:
    pairs = [pb.ComparedPair(a=given("a"), b=given("b")), pb.ComparedPair(a=given("a"))]
    request = pb.CompareRequest(pairs=pairs, prompt_b=pb.Prompt(name="x"), matrix=PairMatrix.ValueType(9))
    with pytest.raises(grpc.RpcError) as caught:
        stub.Compare(request)
    failure = read_failure(caught.value)
    assert set(failure.violations) == {"pairs[1].b", "prompt_b.name", "matrix"}
    with pytest.raises(grpc.RpcError) as caught:
        stub.Compare(pb.CompareRequest(pairs=[pb.ComparedPair(a=given("a"), b=given("word " * 300))]))
    failure = read_failure(caught.value)
    assert failure.reason == "INPUT_TOO_LONG"
    assert "pairs[0].b has 302 tokens, but the limit is 256" in failure.message
    with pytest.raises(grpc.RpcError, match="pairs is empty"):
        stub.Compare(pb.CompareRequest())


def test_request_with_too_many_runs_is_rejected(stub: EncoderServiceStub) -> None:
    texts, methods = ["word " * 200] * 7, [EXPLAIN_METHOD_LEAVE_ONE_OUT]
    with pytest.raises(grpc.RpcError) as caught:
        explain(stub, *texts, methods=methods)
    failure = read_failure(caught.value)
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "REQUEST_TOO_EXPENSIVE")
    assert failure.metadata == {"computed_tokens": str(7 * 200 * 202), "max_computed_tokens": str(1 << 18)}
    assert "methods[0] needs 282800 computed tokens, but the limit is 262144" in failure.message


def test_model_info_lists_the_supported_explanations(stub: EncoderServiceStub) -> None:
    model = stub.GetModel(pb.GetModelRequest()).model
    assert list(model.explain_methods) == [1, 2, 3, 4, 5, 6]
    assert list(model.pair_matrices) == [1, 2, 3]
    assert model.limits.max_computed_tokens == 1 << 18
