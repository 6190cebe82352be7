"""langchain-openai."""

import asyncio
from typing import Any

import openai
import tiktoken
from langchain_openai import OpenAIEmbeddings

from clients_http.server_under_test import MANY, QUERY, TEXTS, Server, raises


def embeddings(server: Server, **options: Any) -> OpenAIEmbeddings:
    options = {"model": server.model, "check_embedding_ctx_length": False} | options
    return OpenAIEmbeddings(base_url=f"{server.url}/v1", api_key="-", **options)


def check_a_thousand_documents_are_one_request(server: Server) -> None:
    name = 'attnlens_requests_total{method="POST /v1/embeddings",status="200"}'
    before = server.metric(name)
    server.check(embeddings(server).embed_documents(MANY), "many")
    server.wait_for_metric(name, before + 1)


def check_queries_have_the_vectors_of_grpc(server: Server) -> None:
    server.check([embeddings(server).embed_query(QUERY)], "query")
    server.check([asyncio.run(embeddings(server).aembed_query(QUERY))], "query")


def check_token_ids_are_rejected_with_the_option_to_set(server: Server) -> None:
    """By default, LangChain sends token ids. A vocabulary of bytes replaces the one it would download."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    vocabulary = tiktoken.Encoding("bytes", pat_str=r".", mergeable_ranks=ranks, special_tokens={})
    tiktoken.encoding_for_model = lambda _: vocabulary
    with raises(openai.BadRequestError, "check_embedding_ctx_length=False"):
        embeddings(server, check_embedding_ctx_length=True).embed_documents(TEXTS)


def check_errors_are_those_of_openai(server: Server) -> None:
    with raises(openai.NotFoundError, "other", server.model):
        embeddings(server, model="other").embed_documents(TEXTS)
    with server.full(), raises(openai.RateLimitError, "try again later"):
        embeddings(server, max_retries=0).embed_documents(TEXTS)
