"""Search in DuckDB with vectors from `attnlens embed`, and explain the ranking.

attnlens embed corpus.jsonl --output vectors.npy
python with_duckdb.py HOST:PORT "How do I reset a forgotten password?" corpus.jsonl vectors.npy
"""

import json
import sys
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
from encoder import Encoder

from attnlens_client import Explanation


def load(database: duckdb.DuckDBPyConnection, corpus: str, vectors: str) -> None:
    """Create the table `passages` from N lines in `corpus` and an array of shape (N, D) in `vectors`."""
    rows = np.asarray(np.load(vectors, mmap_mode="r"), np.float32)
    column = pa.FixedSizeListArray.from_arrays(np.ravel(rows), rows.shape[1])
    lines = [json.loads(line) for line in Path(corpus).read_text("utf-8").splitlines()]
    # Raises an error if the numbers of lines and vectors differ.
    passages = pa.Table.from_pylist(lines).append_column("vector", column)
    database.register("new_passages", passages)
    database.execute("CREATE TABLE passages AS FROM new_passages")


def search(
    database: duckdb.DuckDBPyConnection, encoder: Encoder, query: str, where: str = "true"
) -> list[tuple[str, float]]:
    """Return the three nearest texts with their cosine similarities. `where` must be trusted SQL."""
    vector = encoder.encode_query(query)
    statement = f"""SELECT text, array_cosine_similarity(vector, ?::FLOAT[{len(vector)}]) AS cosine
                    FROM passages WHERE {where} ORDER BY cosine DESC LIMIT 3"""
    return database.execute(statement, [vector.tolist()]).fetchall()


def main(address: str, query: str, corpus: str, vectors: str) -> None:
    encoder = Encoder(address)
    with duckdb.connect() as database:  # pass a file name to persist the table
        load(database, corpus, vectors)
        hits = search(database, encoder, query)
        for text, cosine in hits:
            print(f"{cosine:.4f} {text}")
        [(first, _), (second, _), *_] = hits
        [words] = encoder.client.explain([query], to=first, rather_than=second, level="words")
        print("query words for the first rather than the second:", format_words(words))
        [words] = encoder.client.explain([first], to=query, level="words")
        print("matching words of the first:", format_words(words))
        [(nearest, _), *_] = search(database, encoder, query, where="topic = 'network'")
        print("nearest about the network:", nearest)


def format_words(explanation: Explanation) -> str:
    return ", ".join(f"{word} {score:+.3f}" for word, score in explanation.top(3))


if __name__ == "__main__":
    main(*sys.argv[1:])
