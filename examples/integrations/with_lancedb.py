"""LanceDB embedding function. The table embeds new rows and queries automatically."""

import json
import sys
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any

import lancedb
from encoder import Encoder
from lancedb.embeddings import TextEmbeddingFunction, get_registry, register
from lancedb.pydantic import LanceModel


@register("attnlens")
class AttnlensFunction(TextEmbeddingFunction):
    address: str = "127.0.0.1:50051"

    @cached_property
    def encoder(self) -> Encoder:
        return Encoder(self.address)

    def ndims(self) -> int:
        return self.encoder.model.embedding_size

    def generate_embeddings(self, texts: list[str], *_: Any, **__: Any) -> list[Any]:
        return list(self.encoder.encode_document(texts))

    def compute_query_embeddings(self, query: str, *_: Any, **__: Any) -> list[Any]:
        return [self.encoder.encode_query(query)]


def main(address: str, query: str) -> None:
    corpus = Path(__file__).with_name("corpus.jsonl").read_text("utf-8").splitlines()
    function = get_registry().get("attnlens").create(address=address)

    class Passage(LanceModel):
        text: str = function.SourceField()
        topic: str
        vector: list[float] = function.VectorField()

    with tempfile.TemporaryDirectory() as directory:
        table = lancedb.connect(directory).create_table("help", schema=Passage)
        table.add([json.loads(line) for line in corpus])
        for hit in table.search(query).distance_type("cosine").limit(3).to_list():
            print(f"{1 - hit['_distance']:.4f} {hit['text']}")


if __name__ == "__main__":
    main(*sys.argv[1:])
