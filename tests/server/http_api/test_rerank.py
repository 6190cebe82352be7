"""Rerank APIs of docs/http.md: scores equal gRPC's, and errors have the keys that clients read."""

from typing import Any, cast

import numpy as np
import pytest

from attnlens_server.errors import OverloadedError
from attnlens_server.http_api.rerank import DIALECT, SHARED_DIALECT, RerankRoutes
from attnlens_server.operations.documents import LongDocuments
from http_client import HeadServer, HttpClient, StubService, documented_requests
from toy_models import make_model

QUERY = "the man"
DOCUMENTS = ["a café in the sea", "the man", "", "it was wet and it rained", "the man", "東京 😀"]
LONG = "the man and the sea " * 20  # the model has 34 positions
PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")


def ranked(server: HeadServer, documents: list[str] = DOCUMENTS, **options: Any) -> list[tuple[int, float]]:
    """Return the index and the score of each document over gRPC, with the highest score first."""
    found = server.grpc.rerank(QUERY, documents, **{"activation": "sigmoid"} | options)
    return [(each.index, each.score) for each in found]


def pairs_of(results: list[dict[str, Any]]) -> list[tuple[int, float]]:
    key = "relevance_score" if "relevance_score" in results[0] else "score"
    return [(each["index"], each[key]) for each in results]


# --- Results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_scores_are_those_of_grpc(path: str, reranker: HeadServer) -> None:
    found = reranker.http.post(path, {"model": "reranker", "query": QUERY, "documents": DOCUMENTS})
    assert pairs_of(found["results"]) == ranked(reranker)
    assert all(list(each) == ["index", "relevance_score"] for each in found["results"])
    assert (found["object"], found["model"], len(found["id"])) == ("rerank", "reranker", 32)
    tokens = sum(usage.num_tokens for usage in reranker.grpc.score(QUERY, DOCUMENTS).usages)
    assert found["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert found["meta"]["billed_units"] == {"input_tokens": tokens}
    assert ("data" in found) == (path != "/v2/rerank")
    assert found.get("data", found["results"]) == found["results"]


@pytest.mark.parametrize("path", PATHS)
def test_options_of_all_clients(path: str, reranker: HeadServer) -> None:
    ask, body = reranker.http.post, {"query": QUERY, "documents": DOCUMENTS}
    assert pairs_of(ask(path, {**body, "top_n": 2})["results"]) == ranked(reranker)[:2]
    assert pairs_of(ask(path, {**body, "top_n": 0})["results"]) == ranked(reranker)
    texts = ask(path, {**body, "return_documents": True})
    assert all(each["document"] == {"text": DOCUMENTS[each["index"]]} for each in texts["results"])
    assert all(each["document"] == DOCUMENTS[each["index"]] for each in texts.get("data", []))
    voyage = ask(path, {**body, "top_k": 3, "truncation": True})
    assert voyage["object"] == "list"
    assert pairs_of(voyage["data"]) == pairs_of(voyage["results"]) == ranked(reranker)[:3]
    objects = [{"text": text, "id": index} for index, text in enumerate(DOCUMENTS)]
    whole = ask(path, {"query": {"text": QUERY}, "documents": objects, "return_documents": True})["results"]
    assert pairs_of(whole) == ranked(reranker)
    assert all(each["document"] == {"text": DOCUMENTS[each["index"]]} for each in whole)
    infinity = ask(path, {**body, "return_documents": True, "raw_scores": False})["results"]
    assert all(each["document"] == DOCUMENTS[each["index"]] for each in infinity)
    raw = ranked(reranker, activation="identity")
    assert pairs_of(ask(path, {**body, "raw_scores": True})["results"]) == raw
    assert pairs_of(ask(path, {**body, "use_activation": False})["results"]) == raw
    assert raw != ranked(reranker)


@pytest.mark.parametrize("path", PATHS)
def test_long_documents_are_truncated_unless_rejected(path: str, reranker: HeadServer) -> None:
    body = {"query": QUERY, "documents": ["a", LONG]}
    assert pairs_of(reranker.http.post(path, body)["results"]) == ranked(reranker, ["a", LONG])
    short = reranker.http.post(path, {**body, "max_tokens_per_doc": 3})["results"]
    assert pairs_of(short) == ranked(reranker, ["a", LONG], max_tokens_per_document=3)
    for option in ("truncate", "truncation"):
        status, value = reranker.http.ask("POST", path, {**body, option: False})
        assert status == (422 if path == "/rerank" else 400)
        assert value["detail"].startswith("documents[1] has 120 tokens, but the limit is "), value
    status, value = reranker.http.ask("POST", path, {"query": LONG, "documents": ["a"]})
    assert value["message"].startswith("query has "), value


@pytest.mark.parametrize("path", ["/", "/rerank"])
def test_texts_get_the_reply_of_tei(path: str, reranker: HeadServer) -> None:
    body = {"query": QUERY, "texts": DOCUMENTS, "truncate": None, "truncation_direction": "Right"}
    found = reranker.http.post(path, body)
    assert pairs_of(found) == ranked(reranker)
    assert all(list(each) == ["index", "score"] for each in found)
    assert reranker.http.headers["x-compute-type"] == "cpu"
    assert reranker.http.headers["x-compute-characters"] == str(len(QUERY + "".join(DOCUMENTS)))
    assert int(reranker.http.headers["x-compute-tokens"]) > 20
    texts = reranker.http.post(path, {**body, "return_text": True})
    assert [each["text"] for each in texts] == [DOCUMENTS[each["index"]] for each in texts]
    raw = reranker.http.post(path, {**body, "raw_scores": True})
    assert pairs_of(raw) == ranked(reranker, activation="identity")


def test_errors_for_texts_are_those_of_tei(reranker: HeadServer) -> None:
    def problem(**body: Any) -> tuple[int, str, str]:
        status, value = reranker.http.ask("POST", "/rerank", {"query": QUERY, **body})
        assert value["error"] == value["detail"] == value["message"]
        return status, value["error_type"], value["error"]

    assert problem(texts=[]) == (400, "Empty", "texts is empty: send at least one")
    for body, message in (
        ({"texts": ["a"] * 41}, "texts has 41 texts, but the limit is 40"),
        ({"texts": ["a", LONG], "truncate": False}, "texts[1] has 120 tokens, but the limit is "),
        ({"texts": ["a", {"text": "b"}]}, "texts[1] is invalid: expected `str`"),
        ({"texts": ["a"], "query": ""}, "query is empty: send some text"),
        ({"texts": ["a"], "documents": ["b"]}, "documents is missing, or texts is set as well"),
        ({}, "documents is missing, or texts is set as well"),
        (
            {"texts": [LONG], "truncation_direction": "Left"},
            "truncation_direction needs truncation on the left, but this model truncates on the right, and a",
        ),
    ):
        found = problem(**body)
        assert found[:2] == (422, "Validation")
        assert found[2].startswith(message)


def test_weaviate_gets_scores_in_the_order_of_documents(reranker: HeadServer) -> None:
    """Weaviate's client sends no Content-Type, and reads the body before the status."""
    body = {"query": QUERY, "documents": DOCUMENTS, "property": ""}
    found = reranker.http.post("/rerank", body)
    assert [each["document"] for each in found["scores"]] == DOCUMENTS
    expected = reranker.grpc.score(QUERY, DOCUMENTS).scores  # with the activation of the checkpoint
    np.testing.assert_array_equal([each["score"] for each in found["scores"]], expected)
    assert (found["query"], found["property"]) == (QUERY, "")
    assert "error" in reranker.http.ask("POST", "/rerank", {**body, "query": ""})[1]
    assert reranker.http.ask("GET", "/meta")[1]["model"] == "reranker"
    assert reranker.http.ask("GET", "/.well-known/ready") == (204, None)


def test_requests_of_the_page_are_answered(reranker: HeadServer) -> None:
    documents = ["It rained.", "Jane Austen wrote Emma."]
    found = {
        path: reranker.http.post(path, body | {"model": ""})
        for path, body in documented_requests("Rerank APIs")
    }
    expected = reranker.grpc.rerank("Who wrote Emma?", documents, activation="sigmoid")
    pairs = [(each.index, each.score) for each in expected]
    assert pairs_of(found.pop("/v2/rerank")["results"]) == pairs[:1]
    assert pairs_of(found.pop("/rerank")) == pairs
    assert sorted(pairs_of(found.pop("/score")["data"])) == sorted(pairs)
    assert not found


# --- Errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"query": "a"}, 400, "documents is missing: set it"),
        ({"documents": ["a"]}, 400, "query is missing: set it"),
        ({"query": "a", "documents": []}, 400, "documents is empty: send at least one text"),
        ({"query": "a", "documents": ["b"] * 41}, 400, "documents has 41 texts, but the limit is 40"),
        ({"query": "a", "documents": [{"image": "b"}]}, 400, "documents[0].text is missing: set it"),
        ({"query": "a", "documents": ["b"], "top_n": -1}, 400, "top_n is invalid: expected `int` >= 0"),
        ({"query": "a", "documents": ["b"], "model": "rerank-v3.5"}, 404, "the model 'rerank-v3.5' is not"),
        (
            {"query": "a", "documents": ["b"], "relevant_spans": {"max_spans": -1}},
            400,
            "relevant_spans.max_spans is invalid: expected `int` >= 0",
        ),
        (b"[]", 400, "the body is invalid: expected `object`, got `array`"),
    ],
)
def test_invalid_bodies_are_rejected_by_field(
    path: str, body: Any, status: int, message: str, reranker: HeadServer
) -> None:
    found, value = reranker.http.ask("POST", path, body)
    assert found == status
    assert value["message"].startswith(message)
    assert value["detail"] == value["message"]


def test_disabled_spans_are_accepted(reranker: HeadServer) -> None:
    body = {"query": "a", "documents": ["b"], "relevant_spans": {"mode": "disabled"}}
    found, value = reranker.http.ask("POST", "/v2/rerank", body)
    assert found == 200
    assert "relevant_spans" not in value["results"][0]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_relevant_spans_are_words_of_the_document(path: str, reranker: HeadServer) -> None:
    documents = ["naïve 😀 café in the sea and it rained", "the man and the sea"]
    spans = {"mode": "enabled", "threshold": 0.0}
    body = {"query": "the man", "documents": documents, "relevant_spans": spans}
    status, value = reranker.http.ask("POST", path, body)
    assert status == 200
    for ranked in value["results"]:
        found, document = ranked["relevant_spans"], documents[ranked["index"]]
        assert sum(span["score"] for span in found) <= 1 + 1e-6
        for span in found:
            assert span["score"] > 0
            assert {*document[span["start"] : span["end"]].split()} <= {*document.split()}
    assert any(ranked["relevant_spans"] for ranked in value["results"])
    one = reranker.http.ask("POST", path, body | {"relevant_spans": spans | {"max_spans": 1}})[1]
    assert all(len(ranked["relevant_spans"]) <= 1 for ranked in one["results"])
    none = reranker.http.ask("POST", path, body | {"relevant_spans": {"threshold": 1.1}})[1]
    assert [ranked["relevant_spans"] for ranked in none["results"]] == [[], []]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/rerank", {"query": "a", "texts": ["b"]}, 424),
        ("/rerank", {"query": "a", "documents": ["b"]}, 424),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}, 400),
        ("/v2/rerank", {"query": "a", "documents": ["b"]}, 400),
        ("/score", {"text_1": "a", "text_2": ["b"]}, 400),
    ],
)
def test_other_models_name_the_method_to_use(
    path: str, body: Any, status: int, http: HttpClient, topics: HeadServer
) -> None:
    for client, message in (
        (http, "is not a classifier, which Score needs: use Embed"),
        (topics.http, "has 3"),
    ):
        found, value = client.ask("POST", path, body)
        assert found == status
        assert message in str(value)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/embed", {"inputs": "a"}, 424),
        ("/v1/embeddings", {"input": "a"}, 400),
        ("/v2/embed", {"texts": ["a"]}, 400),
        ("/vectors", {"text": "a"}, 400),
        ("/api/embed", {"input": "a"}, 400),
    ],
)
def test_embedding_routes_name_the_route_to_use(
    path: str, body: Any, status: int, reranker: HeadServer, topics: HeadServer
) -> None:
    for server, route in ((reranker, "/rerank"), (topics, "/predict")):
        found, value = server.http.ask("POST", path, body)
        assert found == status
        assert (
            f"has no embeddings: use {'Score' if route == '/rerank' else 'Classify'}, or {route} over"
            in str(value)
        )


def test_overload_tells_when_to_retry() -> None:
    stub = StubService(np.ones((1, 4), np.float32))
    stub.error = OverloadedError("full", retry_after_s=2)
    routes = RerankRoutes(cast("Any", stub), make_model(), cast("Any", None)).routes()
    for path, dialect in (("/rerank", SHARED_DIALECT), ("/v1/rerank", DIALECT)):
        status, headers, value = stub.post(routes, path, {"query": "a", "documents": ["b"]})
        assert (status, headers["retry-after"], value["detail"]) == (429, "2", "full")
        assert value == dialect.body(stub.error)


def test_text_on_the_left_is_only_rejected_if_it_is_long() -> None:
    stub = StubService(np.ones((1, 4), np.float32))
    stub.error = OverloadedError("full", retry_after_s=2)
    routes = RerankRoutes(cast("Any", stub), make_model(), cast("Any", None)).routes()
    for options, expected in (
        ({}, LongDocuments.TRUNCATE),
        ({"truncation_direction": "right"}, LongDocuments.TRUNCATE),
        ({"truncation_direction": "Left"}, LongDocuments.REJECT),
        ({"truncate": False}, LongDocuments.REJECT),
    ):
        stub.post(routes, "/rerank", {"query": "a", "texts": ["b"], **options})
        assert stub.request.long_documents is expected
