"""Chroma embedding function. Persistent collections store its name and server address."""

import json
import sys
from pathlib import Path
from typing import Any

import chromadb
from chromadb.api.types import Documents, EmbeddingFunction, Embeddings, Space
from chromadb.utils.embedding_functions import register_embedding_function
from encoder import Encoder


@register_embedding_function
class AttnlensEmbeddingFunction(EmbeddingFunction[Documents]):
    def __init__(self, address: str = "127.0.0.1:50051") -> None:
        self.encoder = Encoder(address)
        self.address = address

    def __call__(self, input: Documents) -> Embeddings:
        return list(self.encoder.encode_document(input))

    def embed_query(self, input: Documents) -> Embeddings:
        return list(self.encoder.encode_query(input))

    def default_space(self) -> Space:
        return "cosine"

    @staticmethod
    def name() -> str:
        return "attnlens"

    def get_config(self) -> dict[str, Any]:
        return {"address": self.address}

    @staticmethod
    def build_from_config(config: dict[str, Any]) -> "AttnlensEmbeddingFunction":
        return AttnlensEmbeddingFunction(**config)


def main(address: str, query: str) -> None:
    corpus = Path(__file__).with_name("corpus.jsonl").read_text("utf-8").splitlines()
    database = chromadb.EphemeralClient(chromadb.Settings(anonymized_telemetry=False))
    collection = database.create_collection("help", embedding_function=AttnlensEmbeddingFunction(address))
    texts = [json.loads(line)["text"] for line in corpus]
    collection.add(ids=[str(index) for index in range(len(texts))], documents=texts)
    results = collection.query(query_texts=[query], n_results=3)
    for text, distance in zip(results["documents"][0], results["distances"][0], strict=True):
        print(f"{1 - distance:.4f} {text}")


if __name__ == "__main__":
    main(*sys.argv[1:])
