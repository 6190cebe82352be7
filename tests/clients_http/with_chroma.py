"""Embedding functions of Chroma for the APIs of OpenAI, TEI and Ollama."""

import os
import tempfile
from typing import Any

import chromadb
import ollama
import openai
from chromadb.utils.embedding_functions import (
    HuggingFaceEmbeddingServer,
    OllamaEmbeddingFunction,
    OpenAIEmbeddingFunction,
)

from clients_http.server_under_test import LONG, QUERY, SOME, TEXTS, Server, raises

os.environ["CHROMA_OPENAI_API_KEY"] = "-"


def openai_function(server: Server, model: str = "") -> Any:
    return OpenAIEmbeddingFunction(model_name=model or server.model, api_base=f"{server.url}/v1")


def tei_function(server: Server) -> Any:
    return HuggingFaceEmbeddingServer(url=f"{server.url}/embed")


def ollama_function(server: Server, model: str = "") -> Any:
    return OllamaEmbeddingFunction(url=server.url, model_name=model or server.model)


def check_openai_function_in_a_collection(server: Server) -> None:
    settings = chromadb.Settings(anonymized_telemetry=False)
    with tempfile.TemporaryDirectory() as directory:
        database = chromadb.PersistentClient(directory, settings)
        database.create_collection("texts", embedding_function=openai_function(server)).add(
            [str(number) for number in range(len(TEXTS))], documents=TEXTS
        )
        collection = chromadb.PersistentClient(directory, settings).get_collection("texts")
        server.check(collection.get(include=["embeddings"])["embeddings"], "texts")
        [[found]] = collection.query(query_texts=[QUERY], n_results=1)["documents"]
    assert found == TEXTS[2]


def check_openai_function(server: Server) -> None:
    server.check(openai_function(server)(SOME), "some")
    with raises(openai.BadRequestError, "402", "256"):
        openai_function(server)([LONG])


def check_tei_function(server: Server) -> None:
    server.check(tei_function(server)(TEXTS), "texts")
    server.check(tei_function(server)([LONG]), "long")


def check_errors_are_lost_in_the_tei_function(server: Server) -> None:
    """The client ignores the status, and converts the keys of the error."""
    with server.full(), raises(ValueError, "error"):
        tei_function(server)(TEXTS)


def check_ollama_function(server: Server) -> None:
    server.check(ollama_function(server)(TEXTS), "texts")
    with raises(ollama.ResponseError, "other", server.model):
        ollama_function(server, "other")(TEXTS)
