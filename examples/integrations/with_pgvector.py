"""Search in PostgreSQL with pgvector. Vectors are passed as NumPy arrays; `<=>` is 1 - cosine.

python with_pgvector.py HOST:PORT "How do I reset a forgotten password?" postgresql://...
"""

import json
import sys
from pathlib import Path

import psycopg
from encoder import Encoder
from pgvector.psycopg import register_vector


def main(address: str, query: str, database: str) -> None:
    corpus = Path(__file__).with_name("corpus.jsonl").read_text("utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in corpus]
    encoder = Encoder(address)
    with psycopg.connect(database) as connection:
        connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        register_vector(connection)
        width = encoder.model.embedding_size
        connection.execute(f"CREATE TEMPORARY TABLE passages (text text, vector vector({width}))")
        with connection.cursor().copy("COPY passages FROM STDIN (FORMAT BINARY)") as copy:
            copy.set_types(["text", "vector"])
            for row in zip(texts, encoder.encode_document(texts), strict=True):
                copy.write_row(row)
        connection.execute("CREATE INDEX ON passages USING hnsw (vector vector_cosine_ops)")
        nearest = "SELECT text, 1 - (vector <=> %s) FROM passages ORDER BY vector <=> %s LIMIT 3"
        vector = encoder.encode_query(query)
        for text, cosine in connection.execute(nearest, [vector, vector]):
            print(f"{cosine:.4f} {text}")


if __name__ == "__main__":
    main(*sys.argv[1:])
