"""Rankers of Haystack for TEI, Jina and Cohere."""

import asyncio
from typing import Any

import cohere
from haystack import Document
from haystack.utils import Secret
from haystack_integrations.components.rankers.cohere import CohereRanker
from haystack_integrations.components.rankers.huggingface_api import HuggingFaceTEIRanker
from haystack_integrations.components.rankers.jina import JinaRanker

from clients_http.server_under_test import DOCUMENTS, RERANK_QUERY, Server, raises

KEY = Secret.from_token("-")


def documents() -> list[Document]:
    return [Document(id=str(index), content=text) for index, text in enumerate(DOCUMENTS)]


def ranking(found: dict[str, Any]) -> list[tuple[int, float]]:
    return [(int(document.id), document.score) for document in found["documents"]]


def jina(server: Server, model: str = "reranker") -> JinaRanker:
    return JinaRanker(model, KEY, base_url=f"{server.reranker_url}/v1/rerank")


def check_scores_are_those_of_grpc(server: Server) -> None:
    tei = HuggingFaceTEIRanker(url=server.reranker_url)
    server.check_ranking(ranking(tei.run(RERANK_QUERY, documents())))
    server.check_ranking(ranking(asyncio.run(tei.run_async(RERANK_QUERY, documents(), top_k=2))))
    found = jina(server).run(RERANK_QUERY, documents())
    server.check_ranking(ranking(found))
    assert found["meta"]["model"] == "reranker"
    assert found["meta"]["usage"]["total_tokens"] > len(DOCUMENTS)
    url = server.reranker_url
    by_cohere = CohereRanker("reranker", api_key=KEY, api_base_url=url, top_k=2)
    server.check_ranking(ranking(by_cohere.run(RERANK_QUERY, documents())))


def check_errors_have_our_messages(server: Server) -> None:
    with raises(RuntimeError, "query is empty", "Validation"):
        HuggingFaceTEIRanker(url=server.reranker_url).run("", documents())
    with server.reranker.full(), raises(RuntimeError, "try again later"):
        HuggingFaceTEIRanker(url=server.reranker_url, max_retries=1).run(RERANK_QUERY, documents())
    with raises(RuntimeError, "other", "reranker"):
        jina(server, "other").run(RERANK_QUERY, documents())
    other = CohereRanker("other", api_key=KEY, api_base_url=server.reranker_url)
    with raises(cohere.NotFoundError, "other", "reranker"):
        other.run(RERANK_QUERY, documents())
