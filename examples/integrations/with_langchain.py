"""LangChain embeddings, used with the in-memory vector store of langchain-core."""

import json
import sys
from pathlib import Path

from encoder import Encoder
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore


class AttnlensEmbeddings(Embeddings):
    """Embeddings from an attnlens server.

    LangChain runs the async methods in threads; the client is thread-safe.
    """

    def __init__(self, address: str) -> None:
        self.encoder = Encoder(address)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return self.encoder.encode_document(texts).tolist()

    def embed_query(self, text: str) -> list[float]:
        return self.encoder.encode_query(text).tolist()


def main(address: str, query: str) -> None:
    corpus = Path(__file__).with_name("corpus.jsonl").read_text("utf-8").splitlines()
    store = InMemoryVectorStore(AttnlensEmbeddings(address))
    store.add_texts([json.loads(line)["text"] for line in corpus])
    for hit, score in store.similarity_search_with_score(query, k=3):
        print(f"{score:.4f} {hit.page_content}")


if __name__ == "__main__":
    main(*sys.argv[1:])
