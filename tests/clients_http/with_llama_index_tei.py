"""TextEmbeddingsInference of LlamaIndex."""

import asyncio
from typing import Any

from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference

from clients_http.server_under_test import LONG, QUERY, SOME, TEXTS, Server, raises


def embedding(server: Server, **options: Any) -> TextEmbeddingsInference:
    # The name is not sent: it selects prefixes of other models.
    return TextEmbeddingsInference(base_url=server.url, model_name=server.model, **options)


def check_vectors_are_those_of_grpc(server: Server) -> None:
    server.check(embedding(server, embed_batch_size=16).get_text_embedding_batch(SOME), "some")
    server.check([embedding(server).get_query_embedding(QUERY)], "query")
    server.check([embedding(server).get_text_embedding(LONG)], "long")
    server.check(asyncio.run(embedding(server).aget_text_embedding_batch(TEXTS)), "texts")


def check_errors_are_lost_in_the_client(server: Server) -> None:
    """The client ignores the status and indexes the error body like a list."""
    with server.full(), raises(KeyError, "0"):
        embedding(server).get_query_embedding(QUERY)
