"""litellm, which needs openai 2."""

import asyncio
from typing import Any

import litellm

from clients_http.server_under_test import (
    DIMENSIONS,
    DOCUMENTS,
    LONG,
    RERANK_QUERY,
    TEXTS,
    Server,
    raises,
)

RERANK_PROVIDERS = ("hosted_vllm", "infinity", "huggingface", "cohere", "jina_ai", "voyage")


def options(server: Server, **others: Any) -> dict[str, Any]:
    return {
        "model": f"openai/{server.model}",
        "api_base": f"{server.url}/v1",
        "api_key": "-",
        "input": TEXTS,
    } | others


def rows(result: Any) -> list[Any]:
    return [item["embedding"] for item in result.data]


def check_vectors_are_those_of_grpc(server: Server) -> None:
    result = litellm.embedding(**options(server))
    server.check(rows(result), "texts")
    assert result.usage.prompt_tokens == sum(map(len, server.vectors["tokens"]))
    short = litellm.embedding(**options(server, dimensions=DIMENSIONS, allowed_openai_params=["dimensions"]))
    server.check(rows(short), "short")


def check_asynchronous_call(server: Server) -> None:
    server.check(rows(asyncio.run(litellm.aembedding(**options(server)))), "texts")


def check_errors_are_those_of_the_client(server: Server) -> None:
    with raises(litellm.NotFoundError, "other", server.model):
        litellm.embedding(**options(server, model="openai/other"))
    with raises(litellm.BadRequestError, "402", "256"):
        litellm.embedding(**options(server, input=[LONG]))
    with server.full(), raises(litellm.RateLimitError, "try again later"):
        litellm.embedding(**options(server, max_retries=0))


def rerank(server: Server, provider: str, **others: Any) -> Any:
    options = {"model": f"{provider}/reranker", "query": RERANK_QUERY, "documents": DOCUMENTS, "top_n": 5}
    return litellm.rerank(**options | {"api_base": server.reranker_url, "api_key": "-"} | others)


def check_scores_of_all_providers_are_those_of_grpc(server: Server) -> None:
    for provider in RERANK_PROVIDERS:
        # By default, litellm requests documents, which are strings in Infinity's API.
        others = {"return_documents": False} if provider == "infinity" else {}
        found = rerank(server, provider, **others)
        server.check_ranking((each["index"], each["relevance_score"]) for each in found.results)
    found = rerank(server, "hosted_vllm", return_documents=True)
    assert [each["document"]["text"] for each in found.results] == [
        DOCUMENTS[index] for index, _ in server.ranking
    ]


def check_rerank_errors_are_those_of_the_client(server: Server) -> None:
    with raises(litellm.NotFoundError, "other", "reranker"):
        rerank(server, "cohere", model="cohere/other")
    with server.reranker.full(), raises(litellm.RateLimitError, "try again later"):
        rerank(server, "hosted_vllm", num_retries=0)
