"""Classification of docs/http.md, TEI's /info, and vLLM's /score: results equal gRPC's."""

from typing import Any

import numpy as np
import pytest
from huggingface_hub import InferenceClient

from http_client import HeadServer, HttpClient, documented_requests

TEXT, PAIR = "the man and the sea", ["the man", "a café in the sea"]
LONG = "the man and the sea " * 20
LABELS = ("art", "law", "sea")


def rows(found: list[list[dict[str, Any]]]) -> np.ndarray:
    """Return the scores (N, C) of sorted predictions in the order of the labels."""
    for each in found:
        assert [label["score"] for label in each] == sorted((label["score"] for label in each), reverse=True)
    scores = [{label["label"]: label["score"] for label in each} for each in found]
    return np.array([[score[label] for label in LABELS] for score in scores])


def problem(server: HeadServer, path: str, body: Any) -> tuple[int, str, str]:
    status, value = server.http.ask("POST", path, body)
    return status, value["error_type"], value["error"]


# --- TEI ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/predict"])
def test_predictions_are_those_of_grpc(path: str, topics: HeadServer) -> None:
    texts: list[Any] = [TEXT, tuple(PAIR), ""]
    expected = topics.grpc.classify(texts, activation="softmax")
    found = topics.http.post(path, {"inputs": [[TEXT], PAIR, [""]]})
    np.testing.assert_array_equal(rows(found), expected.scores)
    assert topics.http.post(path, {"inputs": TEXT}) == found[0]
    assert topics.http.post(path, {"inputs": [TEXT]}) == found[0]
    assert topics.http.post(path, {"inputs": PAIR}) == found[1]
    assert topics.http.post(path, {"inputs": [PAIR]}) == found[1:2]
    raw = topics.http.post(path, {"inputs": [[TEXT]], "raw_scores": True})
    np.testing.assert_array_equal(rows(raw), expected.logits[:1])
    assert int(topics.http.headers["x-compute-tokens"]) > 4


def test_predictions_of_a_reranker_are_sigmoids(reranker: HeadServer) -> None:
    [score] = reranker.grpc.score(PAIR[0], PAIR[1:], activation="sigmoid").scores
    [found] = reranker.http.post("/predict", {"inputs": PAIR})
    assert found == {"score": pytest.approx(score, abs=1e-7), "label": "LABEL_0"}


def test_long_texts_are_truncated_by_default(topics: HeadServer) -> None:
    expected = topics.grpc.classify([LONG], truncate=True).scores
    np.testing.assert_array_equal(rows(topics.http.post("/predict", {"inputs": [[LONG]]})), expected)
    for options in ({"truncate": False}, {"truncation_direction": "Left"}):
        status, kind, message = problem(topics, "/predict", {"inputs": LONG, **options})
        assert (status, kind) == (422, "Validation")
        assert "122 tokens" in message


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"inputs": []}, (400, "Empty", "the list of inputs is empty: send at least one")),
        ({"inputs": [[]]}, (422, "Validation", "inputs[0] is one input with 0 texts: send one or two")),
        (
            {"inputs": ["a", "b", "c"]},
            (422, "Validation", "inputs is one input with 3 texts: send one or two"),
        ),
        ({"inputs": ["a", ["b"]]}, (422, "Validation", "inputs mixes texts with lists: send a text, a pair")),
        ({"inputs": [["a"]] * 41}, (422, "Validation", "inputs has 41 texts, but the limit is 40")),
        ({"inputs": [[1]]}, (422, "Validation", "inputs[0][0] is invalid: expected `str`, got `int`")),
        ({}, (422, "Validation", "inputs is missing: set it")),
    ],
)
def test_invalid_inputs_are_rejected(body: Any, expected: tuple[int, str, str], topics: HeadServer) -> None:
    status, kind, message = problem(topics, "/predict", body)
    assert (status, kind) == expected[:2]
    assert message.startswith(expected[2])


def test_huggingface_client_gets_all_labels(topics: HeadServer) -> None:
    expected = topics.grpc.classify([TEXT]).top()[0]
    client = InferenceClient(base_url=topics.url)
    found = client.text_classification(TEXT)
    assert [(each.label, each.score) for each in found] == list(expected)
    found = client.text_classification(TEXT, top_k=1, function_to_apply="none")
    logits = topics.grpc.classify([TEXT], activation="identity").top(1)[0]
    assert [(each.label, each.score) for each in found] == list(logits)


def test_requests_of_the_page_are_answered(topics: HeadServer) -> None:
    single, batch, classes = documented_requests("Classification")
    text, pair = "The room was clean.", ("It rained.", "It was wet.")
    expected = topics.grpc.classify([text, pair]).scores
    np.testing.assert_array_equal(rows([topics.http.post(*single)]), expected[:1])
    np.testing.assert_array_equal(rows(topics.http.post(*batch)), expected)
    assert topics.http.post(*classes)["data"][0]["label"] == LABELS[expected[0].argmax()]


def test_info_describes_the_head(reranker: HeadServer, topics: HeadServer) -> None:
    kind = topics.http.ask("GET", "/info")[1]["model_type"]
    names = dict(enumerate(LABELS))
    assert kind == {
        "classifier": {
            "id2label": {str(number): label for number, label in names.items()},
            "label2id": {label: number for number, label in names.items()},
        }
    }
    kind = reranker.http.ask("GET", "/info")[1]["model_type"]
    assert kind == {"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}}


def test_embedding_models_have_no_predictions(http: HttpClient) -> None:
    for path, body, status in (("/predict", {"inputs": "a"}, 424), ("/classify", {"input": "a"}, 400)):
        found, value = http.ask("POST", path, body)
        assert found == status
        assert "is not a classifier, which Classify needs: use Embed" in str(value)


# --- vLLM -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores_of_pairs_are_in_their_order(path: str, reranker: HeadServer) -> None:
    documents = ["a café", "the man", "the sea"]
    expected = reranker.grpc.score("the man", documents, activation="sigmoid")
    for first, second in (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents")):
        found = reranker.http.post(path, {first: "the man", second: documents})
        assert [each["score"] for each in found["data"]] == expected.scores.tolist()
        assert [each["index"] for each in found["data"]] == [0, 1, 2]
    assert (found["model"], found["object"]) == ("reranker", "list")
    assert found["usage"]["total_tokens"] == sum(usage.num_tokens for usage in expected.usages)
    pairs = {"text_1": ["a", "b"], "text_2": ["c", "d"], "use_activation": False}
    logits = reranker.grpc.score_pairs([("a", "c"), ("b", "d")]).logits
    assert [each["score"] for each in reranker.http.post(path, pairs)["data"]] == logits.tolist()
    single = reranker.http.post(path, {"text_1": "the man", "text_2": "a café"})["data"]
    assert single == [{"index": 0, "object": "score", "score": expected.scores[0]}]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"text_2": "a"}, "text_1 is missing, or set twice: set one of text_1, data_1, queries"),
        ({"text_1": "a", "queries": "b", "text_2": "a"}, "text_1 is missing, or set twice"),
        (
            {"text_1": ["a", "b"], "text_2": ["a"] * 3},
            "text_1 has 2 texts, but text_2 has 3: send 1 or 3",
        ),
        ({"text_1": "a", "items": []}, "items is empty: send at least one text"),
        ({"text_1": "a", "documents": ["a"] * 41}, "documents has 41 texts, but the limit is 40"),
        ({"queries": LONG, "items": ["a", "b"]}, "queries has 123 tokens, but the limit is 33"),
        ({"queries": ["a", LONG], "items": ["a", "b"]}, "queries[1] has 123 tokens, but the limit is 33"),
    ],
)
def test_invalid_scores_are_rejected_by_field(body: Any, message: str, reranker: HeadServer) -> None:
    status, value = reranker.http.ask("POST", "/score", body)
    assert status == 400
    assert value["error"]["message"].startswith(message)


def test_classes_have_probabilities(topics: HeadServer) -> None:
    expected = topics.grpc.classify([TEXT, ""])
    found = topics.http.post("/classify", {"input": [TEXT, ""], "model": "topics"})
    np.testing.assert_array_equal(
        np.array([each["probs"] for each in found["data"]], np.float32), expected.scores
    )
    assert [each["label"] for each in found["data"]] == [labels[0][0] for labels in expected.top(1)]
    assert [(each["index"], each["num_classes"]) for each in found["data"]] == [(0, 3), (1, 3)]
    raw = topics.http.post("/classify", {"input": TEXT, "use_activation": False})["data"][0]
    np.testing.assert_array_equal(np.array(raw["probs"], np.float32), expected.logits[0])
    status, value = topics.http.ask("POST", "/classify", {"input": ["a", LONG]})
    assert (status, value["error"]["code"]) == (400, "context_length_exceeded")
    assert value["error"]["message"].startswith("input[1] has 122 tokens")
