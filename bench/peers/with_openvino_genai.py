"""Runs openvino-genai's TextEmbeddingPipeline on a model from convert_openvino_genai.py.

    python -m bench.peers.with_openvino_genai DIRECTORY (f32|bf16) THREADS MAX_TOKENS

The pipeline pads to the longest text in a batch, so texts are sorted by length. With `side_by_side`, several
pipelines run concurrently (calls release the GIL) and share the threads.
"""

import sys
import threading
from typing import Any

from openvino_genai import TextEmbeddingPipeline

from bench.peers.timing import run_in_threads, serve_texts, sorted_batches

Vectors = list[Any]


class Pipelines:
    """Pools of concurrent pipelines, opened on first use."""

    def __init__(self, directory: str, precision: str, threads: int, max_tokens: int) -> None:
        self._directory, self._precision = directory, precision
        self._threads, self._max_tokens = threads, max_tokens
        self._opened: dict[int, list[TextEmbeddingPipeline]] = {}

    def run(self, texts: list[str], _what: str, batch_size: int, side_by_side: int = 1) -> Vectors:
        """Return the vectors in text order."""
        vectors: Vectors = [None] * len(texts)
        pipelines, own = iter(self._open(side_by_side)), threading.local()

        def take_pipeline() -> None:
            own.pipeline = next(pipelines)

        def work(batch: list[int]) -> None:
            batch_vectors = own.pipeline.embed_documents([texts[index] for index in batch])
            for index, vector in zip(batch, batch_vectors, strict=True):
                vectors[index] = vector

        batches = sorted_batches([len(text) for text in texts], batch_size)
        run_in_threads(work, batches, side_by_side, take_pipeline)
        return vectors

    def _open(self, side_by_side: int) -> list[TextEmbeddingPipeline]:
        if side_by_side not in self._opened:
            self._opened[side_by_side] = [
                self._pipeline(max(1, self._threads // side_by_side)) for _ in range(side_by_side)
            ]
        return self._opened[side_by_side]

    def _pipeline(self, threads: int) -> TextEmbeddingPipeline:
        config = TextEmbeddingPipeline.Config()
        config.pooling_type = TextEmbeddingPipeline.PoolingType.MEAN
        config.normalize = True
        config.max_length = self._max_tokens
        return TextEmbeddingPipeline(
            self._directory,
            "CPU",
            config,
            INFERENCE_PRECISION_HINT=self._precision,
            INFERENCE_NUM_THREADS=threads,
            ENABLE_CPU_PINNING=False,  # pinned pipelines would share cores
        )


if __name__ == "__main__":
    directory, precision, threads, max_tokens = sys.argv[1:]
    pipelines = Pipelines(directory, precision, int(threads), int(max_tokens))
    serve_texts(pipelines.run, ["openvino-genai", "openvino"])
