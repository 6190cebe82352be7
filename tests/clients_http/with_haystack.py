"""Components of Haystack for the OpenAI API, and of huggingface-api-haystack for the TEI API."""

import asyncio
from typing import Any

import openai
from haystack import Document
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.utils import Secret
from haystack_integrations.components.embedders.huggingface_api import (
    HuggingFaceAPIDocumentEmbedder,
    HuggingFaceAPITextEmbedder,
)
from huggingface_hub.errors import HfHubHTTPError

from clients_http.server_under_test import LONG, QUERY, SOME, TEXTS, Server, raises


def openai_options(server: Server) -> dict[str, Any]:
    return {
        "api_base_url": f"{server.url}/v1",
        "model": server.model,
        "api_key": Secret.from_token("-"),
        "max_retries": 0,
    }


def tei_options(server: Server) -> dict[str, Any]:
    return {"api_type": "text_embeddings_inference", "api_params": {"url": server.url}}


def vectors(found: dict[str, Any]) -> list[Any]:
    return [document.embedding for document in found["documents"]]


def documents(texts: list[str]) -> list[Document]:
    return [Document(content=text) for text in texts]


def check_openai_text_embedder(server: Server) -> None:
    embedder = OpenAITextEmbedder(**openai_options(server))
    found = embedder.run(QUERY)
    server.check([found["embedding"]], "query")
    assert found["meta"]["model"] == server.model
    assert found["meta"]["usage"]["prompt_tokens"] > 0
    server.check([asyncio.run(embedder.run_async(QUERY))["embedding"]], "query")


def check_openai_document_embedder(server: Server) -> None:
    embedder = OpenAIDocumentEmbedder(**openai_options(server), batch_size=16, progress_bar=False)
    server.check(vectors(embedder.run(documents(SOME))), "some")


def check_openai_document_embedder_raises_errors_of_openai(server: Server) -> None:
    embedder = OpenAIDocumentEmbedder(**openai_options(server), raise_on_failure=True, progress_bar=False)
    with raises(openai.BadRequestError, "402", "256"):
        embedder.run(documents([LONG]))
    with server.full(), raises(openai.RateLimitError, "try again later"):
        embedder.run(documents(TEXTS))


def check_tei_text_embedder(server: Server) -> None:
    embedder = HuggingFaceAPITextEmbedder(**tei_options(server))
    server.check([embedder.run(text)["embedding"] for text in TEXTS], "raw")
    normalizing = HuggingFaceAPITextEmbedder(**tei_options(server), normalize=True)
    server.check([normalizing.run(LONG)["embedding"]], "long")
    with raises(HfHubHTTPError, "402", "256"):
        HuggingFaceAPITextEmbedder(**tei_options(server), truncate=False).run(LONG)


def check_tei_document_embedder(server: Server) -> None:
    """By default, documents and texts are not normalized."""
    embedder = HuggingFaceAPIDocumentEmbedder(**tei_options(server), progress_bar=False)
    server.check(vectors(embedder.run(documents(TEXTS))), "raw")
    options = {"normalize": True, "batch_size": 16, "progress_bar": False}
    normalizing = HuggingFaceAPIDocumentEmbedder(**tei_options(server), **options)
    server.check(vectors(normalizing.run(documents(SOME))), "some")
    server.check(vectors(asyncio.run(normalizing.run_async(documents(SOME)))), "some")


def check_tei_embedders_raise_errors_of_huggingface_hub(server: Server) -> None:
    embedder = HuggingFaceAPIDocumentEmbedder(**tei_options(server), progress_bar=False)
    with server.full(), raises(HfHubHTTPError, "try again later"):
        embedder.run(documents(TEXTS))
