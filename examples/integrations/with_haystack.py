"""Haystack components for embedding queries and documents, in a search and an indexing pipeline."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from encoder import Encoder
from haystack import Document, Pipeline, component
from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
from haystack.components.writers import DocumentWriter
from haystack.document_stores.in_memory import InMemoryDocumentStore


@component
class AttnlensTextEmbedder:
    def __init__(self, address: str = "127.0.0.1:50051") -> None:
        self.encoder = Encoder(address)
        self.address = address  # serialized with the pipeline

    @component.output_types(embedding=list[float])
    def run(self, text: str) -> dict[str, Any]:
        return {"embedding": self.encoder.encode_query(text).tolist()}


@component
class AttnlensDocumentEmbedder:
    def __init__(self, address: str = "127.0.0.1:50051") -> None:
        self.encoder = Encoder(address)
        self.address = address

    @component.output_types(documents=list[Document])
    def run(self, documents: list[Document]) -> dict[str, Any]:
        vectors = self.encoder.encode_document([document.content or "" for document in documents])
        pairs = zip(documents, vectors.tolist(), strict=True)
        return {"documents": [replace(document, embedding=vector) for document, vector in pairs]}


def main(address: str, query: str) -> None:
    corpus = Path(__file__).with_name("corpus.jsonl").read_text("utf-8").splitlines()
    store = InMemoryDocumentStore(embedding_similarity_function="cosine")
    indexing = Pipeline()
    indexing.add_component("embedder", AttnlensDocumentEmbedder(address))
    indexing.add_component("writer", DocumentWriter(store))
    indexing.connect("embedder", "writer")
    indexing.run({"embedder": {"documents": [Document(content=json.loads(line)["text"]) for line in corpus]}})

    search = Pipeline()
    search.add_component("embedder", AttnlensTextEmbedder(address))
    search.add_component("retriever", InMemoryEmbeddingRetriever(store, top_k=3, scale_score=False))
    search.connect("embedder.embedding", "retriever.query_embedding")
    for hit in search.run({"embedder": {"text": query}})["retriever"]["documents"]:
        print(f"{hit.score:.4f} {hit.content}")


if __name__ == "__main__":
    main(*sys.argv[1:])
