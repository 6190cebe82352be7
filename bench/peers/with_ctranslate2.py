"""Runs CTranslate2 on a checkpoint, which it converts first.

    python -m bench.peers.with_ctranslate2 CHECKPOINT COMPUTE_TYPE THREADS MAX_TOKENS

COMPUTE_TYPE is a quantization of CTranslate2, such as `float32` or `int8_float32`. A batch is padded to its
longest text, so texts are sorted by length. With `side_by_side`, several batches run concurrently and share
the threads.
"""

import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import ctranslate2
import numpy as np
import numpy.typing as npt
from ctranslate2.converters import TransformersConverter
from tokenizers import Tokenizer

from bench.peers.timing import run_in_threads, serve_texts, sorted_batches

Vectors = list[Any]


class Encoders:
    """An encoder for each number of concurrent batches, opened on first use."""

    def __init__(self, directory: str, tokenizer: Tokenizer, compute_type: str, threads: int) -> None:
        self._directory, self._tokenizer = directory, tokenizer
        self._compute_type, self._threads = compute_type, threads
        self._opened: dict[int, ctranslate2.Encoder] = {}

    def run(self, texts: list[str], _what: str, batch_size: int, side_by_side: int = 1) -> Vectors:
        """Return the mean of the token vectors of each text, scaled to length 1, in text order."""
        encoder = self._open(side_by_side)
        ids = [encoding.ids for encoding in self._tokenizer.encode_batch(texts)]
        batches = sorted_batches([len(each) for each in ids], batch_size)
        vectors: Vectors = [None] * len(texts)

        def work(batch: list[int]) -> None:
            rows = [ids[index] for index in batch]
            output = encoder.forward_batch(rows)
            hidden = np.array(output.last_hidden_state)  # (B, T, D)
            for index, vector in zip(batch, pooled(hidden, [len(row) for row in rows]), strict=True):
                vectors[index] = vector

        run_in_threads(work, batches, side_by_side)
        return vectors

    def _open(self, side_by_side: int) -> ctranslate2.Encoder:
        if side_by_side not in self._opened:
            self._opened[side_by_side] = ctranslate2.Encoder(
                self._directory,
                device="cpu",
                compute_type=self._compute_type,
                inter_threads=side_by_side,
                intra_threads=max(1, self._threads // side_by_side),
            )
        return self._opened[side_by_side]


def pooled(hidden: npt.NDArray[np.float32], lengths: list[int]) -> Iterator[npt.NDArray[np.float32]]:
    """Yield the normalized mean of the token vectors of each text."""
    for row, length in zip(hidden, lengths, strict=True):
        mean = row[:length].mean(axis=0)
        yield mean / np.linalg.norm(mean)


def main() -> None:
    checkpoint, compute_type, threads, max_tokens = sys.argv[1:]
    tokenizer = Tokenizer.from_file(f"{checkpoint}/tokenizer.json")
    tokenizer.no_padding()
    tokenizer.enable_truncation(int(max_tokens))
    with tempfile.TemporaryDirectory() as directory:
        TransformersConverter(checkpoint).convert(directory, quantization=compute_type, force=True)
        encoders = Encoders(directory, tokenizer, compute_type, int(threads))
        serve_texts(encoders.run, ["ctranslate2"])


if __name__ == "__main__":
    main()
