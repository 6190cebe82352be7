"""LlamaIndex embedding model, used in a vector index without an LLM."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from encoder import Encoder
from llama_index.core import VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.schema import TextNode
from pydantic import PrivateAttr


class AttnlensEmbedding(BaseEmbedding):
    address: str = "127.0.0.1:50051"
    _encoder: Encoder = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        self._encoder = Encoder(self.address)
        self.model_name = self._encoder.model.name

    @classmethod
    def class_name(cls) -> str:
        return "AttnlensEmbedding"

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._encoder.encode_query(query).tolist()

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self._encoder.encode_document(texts).tolist()

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await asyncio.to_thread(self._get_query_embedding, query)

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return await asyncio.to_thread(self._get_text_embedding, text)

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return await asyncio.to_thread(self._get_text_embeddings, texts)


def main(address: str, query: str) -> None:
    corpus = Path(__file__).with_name("corpus.jsonl").read_text("utf-8").splitlines()
    nodes = [TextNode(text=json.loads(line)["text"]) for line in corpus]
    index = VectorStoreIndex(nodes, embed_model=AttnlensEmbedding(address=address))
    for hit in index.as_retriever(similarity_top_k=3).retrieve(query):
        print(f"{hit.score:.4f} {hit.text}")


if __name__ == "__main__":
    main(*sys.argv[1:])
