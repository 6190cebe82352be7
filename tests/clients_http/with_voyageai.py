"""voyageai."""

import asyncio
from typing import Any

import voyageai
from voyageai.error import APIError, InvalidRequestError, RateLimitError

from clients_http.server_under_test import (
    DIMENSIONS,
    DOCUMENTS,
    LONG,
    LONG_DOCUMENT,
    RERANK_QUERY,
    TEXTS,
    Server,
    raises,
)


def options(server: Server) -> dict[str, Any]:
    return {"api_key": "-", "base_url": f"{server.reranker_url}/v1"}


def ranking(found: Any) -> list[tuple[int, float]]:
    return [(each.index, each.relevance_score) for each in found.results]


def check_scores_are_those_of_grpc(server: Server) -> None:
    rerank = voyageai.Client(**options(server)).rerank
    found = rerank(RERANK_QUERY, DOCUMENTS, "reranker")
    server.check_ranking(ranking(found))
    assert found.total_tokens > len(DOCUMENTS)
    assert len(rerank(RERANK_QUERY, DOCUMENTS, "reranker", top_k=2).results) == 2
    assert [each.document for each in found.results] == [DOCUMENTS[each.index] for each in found.results]

    async def main() -> Any:
        return await voyageai.AsyncClient(**options(server)).rerank(RERANK_QUERY, DOCUMENTS, "reranker")

    server.check_ranking(ranking(asyncio.run(main())))


def check_vectors_are_those_of_grpc(server: Server) -> None:
    client = voyageai.Client(api_key="-", base_url=f"{server.url}/v1")
    server.check(client.embed(TEXTS, server.model, input_type="document").embeddings, "texts")
    short = client.embed(TEXTS, server.model, output_dimension=DIMENSIONS, output_dtype="float")
    server.check(short.embeddings, "short")
    server.check(client.embed([LONG], server.model).embeddings, "long")  # truncated by default
    # The route has errors of OpenAI, whose text the client shows.
    with raises(APIError, "output_dtype is int8, which is not supported: use"):
        client.embed(TEXTS, server.model, output_dtype="int8")
    with raises(APIError, "input[0] has 402 tokens"):
        client.embed([LONG], server.model, truncation=False)


def check_errors_are_those_of_the_client(server: Server) -> None:
    rerank = voyageai.Client(**options(server)).rerank
    with raises(InvalidRequestError, "documents[0] has 120 tokens"):
        rerank(RERANK_QUERY, [LONG_DOCUMENT], "reranker", truncation=False)
    with raises(APIError, "other", "reranker"):
        rerank(RERANK_QUERY, DOCUMENTS, "other")
    with server.reranker.full(), raises(RateLimitError, "try again later"):
        rerank(RERANK_QUERY, DOCUMENTS, "reranker")
