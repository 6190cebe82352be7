"""Quantized embeddings equal those of `quantize_embeddings` in sentence-transformers."""

from typing import Any

import numpy as np
import pytest
from sentence_transformers.util.quantization import quantize_embeddings

from attnlens.embedding_types import EmbeddingType, quantize

NAMES: dict[EmbeddingType, Any] = {
    EmbeddingType.INT8: "int8",
    EmbeddingType.UINT8: "uint8",
    EmbeddingType.BINARY: "binary",
    EmbeddingType.UBINARY: "ubinary",
}


@pytest.mark.parametrize("embedding_type", NAMES)
@pytest.mark.parametrize(("num_texts", "size"), [(1, 384), (50, 384), (7, 13)])
def test_all_bytes_are_equal(embedding_type: EmbeddingType, num_texts: int, size: int) -> None:
    generator = np.random.default_rng(size)
    vectors = generator.standard_normal((num_texts, size)).astype(np.float32)
    vectors[0, :3] = 0
    ranges = np.sort(generator.standard_normal((2, size)), axis=0).astype(np.float32)
    ranges[1, 5] = ranges[0, 5]  # no width
    expected = quantize_embeddings(vectors, NAMES[embedding_type], ranges=ranges)
    assert isinstance(expected, np.ndarray)
    found = quantize(vectors, embedding_type, ranges)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)
