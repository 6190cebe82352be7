"""cohere."""

import asyncio
from typing import Any

import cohere
import numpy as np

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


def options(server: Server, **others: Any) -> dict[str, Any]:
    return {"model": server.model, "texts": TEXTS, "input_type": "search_document"} | others


def check_vectors_are_those_of_grpc(server: Server) -> None:
    embed = cohere.ClientV2("-", base_url=server.url).embed
    found = embed(**options(server, embedding_types=["float", "binary"]))
    server.check(found.embeddings.float_, "texts")
    assert found.texts == TEXTS
    bits = np.packbits(np.array(server.vectors["texts"]) > 0, axis=1).astype(int) - 128
    assert found.embeddings.binary == bits.tolist()
    short = embed(**options(server, embedding_types=["float"], output_dimension=DIMENSIONS))
    server.check(short.embeddings.float_, "short")
    server.check(embed(**options(server, texts=[LONG], truncate="END")).embeddings.float_, "long")


def check_asynchronous_client(server: Server) -> None:
    async def main() -> Any:
        return await cohere.AsyncClientV2("-", base_url=server.url).embed(**options(server))

    server.check(asyncio.run(main()).embeddings.float_, "texts")


def check_errors_are_those_of_the_client(server: Server) -> None:
    embed = cohere.ClientV2("-", base_url=server.url).embed
    with raises(cohere.NotFoundError, "other", server.model):
        embed(**options(server, model="other"))
    with raises(cohere.BadRequestError, "402", "256"):
        embed(**options(server, texts=[LONG], truncate="NONE"))
    with server.full(), raises(cohere.TooManyRequestsError, "try again later"):
        embed(**options(server), request_options={"max_retries": 0})


def reranking(**others: Any) -> dict[str, Any]:
    return {"model": "reranker", "query": RERANK_QUERY, "documents": DOCUMENTS} | others


def ranking(found: Any) -> list[tuple[int, float]]:
    return [(each.index, each.relevance_score) for each in found.results]


def check_scores_are_those_of_grpc(server: Server) -> None:
    rerank = cohere.ClientV2("-", base_url=server.reranker_url).rerank
    found = rerank(**reranking())
    assert len(found.results) == len(DOCUMENTS)
    server.check_ranking(ranking(found))
    assert found.id
    assert found.meta.billed_units.input_tokens > len(DOCUMENTS)
    assert len(rerank(**reranking(top_n=2)).results) == 2
    assert rerank(**reranking(documents=[LONG_DOCUMENT], max_tokens_per_doc=4096)).results

    async def main() -> Any:
        return await cohere.AsyncClientV2("-", base_url=server.reranker_url).rerank(**reranking())

    server.check_ranking(ranking(asyncio.run(main())))


def check_scores_of_version_1(server: Server) -> None:
    """The older client calls /v1/rerank, and may send objects and get them back."""
    rerank = cohere.Client("-", base_url=server.reranker_url).rerank
    objects = [{"text": text} for text in DOCUMENTS]
    found = rerank(**reranking(documents=objects, return_documents=True))
    server.check_ranking(ranking(found))
    assert [each.document.text for each in found.results] == [DOCUMENTS[each.index] for each in found.results]


def check_rerank_errors_are_those_of_the_client(server: Server) -> None:
    client = cohere.ClientV2("-", base_url=server.reranker_url)
    with raises(cohere.NotFoundError, "other", "reranker"):
        client.rerank(**reranking(model="other"))
    with raises(cohere.BadRequestError, "query is empty"):
        client.rerank(**reranking(query=""))
    spanned = client.rerank(**reranking(relevant_spans=cohere.RerankRelevantSpans(mode="enabled")))
    for each in spanned.results:
        for span in each.relevant_spans:
            assert 0 <= span.start < span.end <= len(DOCUMENTS[each.index])
            assert 0.1 <= span.score <= 1 + 1e-6
    with raises(cohere.BadRequestError, "no embeddings", "/rerank"):
        client.embed(**options(server.reranker))
    with server.reranker.full(), raises(cohere.TooManyRequestsError, "try again later"):
        client.rerank(**reranking(), request_options={"max_retries": 0})
