"""STS benchmark on a running server: Spearman correlation between similarity and human score.

    python -m bench.studies.stsb --address HOST:PORT

Prints a row for each embedding type and similarity.

Shapes: N pairs.
"""

import argparse
import csv
from collections.abc import Iterator
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
from scipy.stats import spearmanr

from attnlens_client import Client, Embeddings
from attnlens_client.arguments import EmbeddingTypeName
from bench.workloads import DATA


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure the Spearman correlation of a served model on STS-B dev."
    )
    parser.add_argument("--address", required=True, help="Server address as HOST:PORT.")
    with (DATA / "stsb-en-dev.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    sentences = [row[0] for row in rows] + [row[1] for row in rows]
    scores = [float(row[2]) for row in rows]
    print("| embedding_type | bytes per vector | similarity | Spearman |\n|---|---|---|---|")
    with Client(parser.parse_args().address) as client:
        variants: dict[str, dict[str, Any]] = {
            name: {"embedding_type": name} for name in get_args(EmbeddingTypeName)
        }
        variants["float16"] = {"dtype": "float16"}
        for label, options in variants.items():
            result = client.embed_with_usage(sentences, **options)
            for name, similarities in _similarities(result, options.get("embedding_type", "float")):
                correlation = spearmanr(similarities, scores).statistic
                print(f"| {label} | {result.vectors[0].nbytes} | {name} | {correlation:.5f} |")


def _similarities(
    result: Embeddings, embedding_type: EmbeddingTypeName
) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Yield similarities (N,) of the first half of the vectors with the second half."""
    vectors = result.vectors
    if embedding_type in ("binary", "ubinary"):
        first, second = np.split(vectors, 2)
        yield "Hamming distance", -np.bitwise_count((first ^ second).view(np.uint8)).sum(axis=1, dtype=int)
        return
    yield "cosine", _cosines(vectors)
    if result.ranges is not None:
        low, high = result.ranges
        levels = vectors.astype(np.float64) + (128 if embedding_type == "int8" else 0)
        yield "cosine after decoding", _cosines(low + (levels + 0.5) * (high - low) / 255)


def _cosines(vectors: npt.NDArray[Any]) -> npt.NDArray[Any]:
    first, second = np.split(vectors / np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True), 2)
    return np.asarray((first * second).sum(axis=1))


if __name__ == "__main__":
    main()
