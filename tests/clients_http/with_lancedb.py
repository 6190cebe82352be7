"""The function "openai" in the registry of LanceDB."""

import tempfile
from typing import Any

import lancedb
from lancedb.embeddings import EmbeddingFunctionConfig, get_registry

from clients_http.server_under_test import QUERY, TEXTS, Server, raises


def function(server: Server) -> Any:
    return (
        get_registry()
        .get("openai")
        .create(name=server.model, base_url=f"{server.url}/v1", api_key="$var:key")
    )


def check_vectors_are_those_of_grpc(server: Server) -> None:
    get_registry().set_var("key", "-")
    server.check(function(server).compute_source_embeddings(TEXTS), "texts")
    server.check(function(server).compute_query_embeddings(QUERY), "query")


def check_schemas_reject_other_models(server: Server) -> None:
    """LanceDB only has the dimensions of OpenAI models."""
    get_registry().set_var("key", "-")
    config = EmbeddingFunctionConfig(source_column="text", vector_column="vector", function=function(server))
    with tempfile.TemporaryDirectory() as directory, raises(ValueError, f"Unknown model name {server.model}"):
        lancedb.connect(directory).create_table("texts", [{"text": QUERY}], embedding_functions=[config])
