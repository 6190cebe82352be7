"""OpenAILikeEmbedding of LlamaIndex."""

import asyncio
from typing import Any

import openai
from llama_index.embeddings.openai_like import OpenAILikeEmbedding

from clients_http.server_under_test import LONG, QUERY, SOME, TEXTS, Server, raises


def embedding(server: Server, **options: Any) -> OpenAILikeEmbedding:
    options = {"model_name": server.model} | options
    return OpenAILikeEmbedding(api_base=f"{server.url}/v1", api_key="-", **options)


def check_vectors_are_those_of_grpc(server: Server) -> None:
    server.check(embedding(server, embed_batch_size=16).get_text_embedding_batch(SOME), "some")
    server.check([embedding(server).get_query_embedding(QUERY)], "query")
    server.check(asyncio.run(embedding(server).aget_text_embedding_batch(TEXTS)), "texts")


def check_errors_are_those_of_openai(server: Server) -> None:
    with raises(openai.NotFoundError, "other", server.model):
        embedding(server, model_name="other").get_text_embedding(QUERY)
    with raises(openai.BadRequestError, "402", "256"):
        embedding(server).get_text_embedding(LONG)
    with server.full(), raises(openai.RateLimitError, "try again later"):
        embedding(server, max_retries=0).get_text_embedding(QUERY)
