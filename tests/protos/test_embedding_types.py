"""Quantization of embeddings: bits and levels by their definition, for any values."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from attnlens.embedding_types import EmbeddingType, quantize, ranges_problem

Array = npt.NDArray[Any]

FINITE = st.floats(-(2.0**100), 2.0**100, width=32)
VECTORS = hnp.arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 19)), elements=FINITE)


@st.composite
def vectors_and_ranges(draw: st.DrawFn) -> tuple[Array, Array]:
    vectors = draw(VECTORS)
    limits = draw(hnp.arrays(np.float32, (2, vectors.shape[1]), elements=FINITE))
    return vectors, np.sort(limits, axis=0)


@given(VECTORS)
def test_bits_are_the_signs_from_the_most_significant_bit(vectors: Array) -> None:
    packed = quantize(vectors, EmbeddingType.UBINARY)
    width = vectors.shape[1]
    assert packed.dtype == np.uint8
    assert packed.shape == (len(vectors), -(-width // 8))
    for row, vector in zip(packed, vectors, strict=True):
        bits = "".join(f"{byte:08b}" for byte in row)
        assert bits == "".join("1" if x > 0 else "0" for x in vector).ljust(len(bits), "0")
    signed = quantize(vectors, EmbeddingType.BINARY)
    assert signed.dtype == np.int8
    np.testing.assert_array_equal(signed.astype(int), packed.astype(int) - 128)


@given(vectors_and_ranges())
def test_levels_do_not_depend_on_the_batch_and_keep_the_order(given_values: tuple[Array, Array]) -> None:
    vectors, ranges = given_values
    levels = quantize(vectors, EmbeddingType.UINT8, ranges)
    assert levels.dtype == np.uint8
    assert levels.shape == vectors.shape
    for row, vector in zip(levels, vectors, strict=True):
        np.testing.assert_array_equal(quantize(vector[None], EmbeddingType.UINT8, ranges)[0], row)
    ordered = np.sort(vectors, axis=0)
    assert (np.diff(quantize(ordered, EmbeddingType.UINT8, ranges).astype(int), axis=0) >= 0).all()
    signed = quantize(vectors, EmbeddingType.INT8, ranges)
    assert signed.dtype == np.int8
    np.testing.assert_array_equal(signed.astype(int), levels.astype(int) - 128)


@given(
    hnp.arrays(np.float32, (3, 8), elements=st.floats(-1, 1, width=32)),
    hnp.arrays(np.float32, 8, elements=st.floats(0.5, 4, width=32)),
)
def test_decoded_levels_are_within_one_step(vectors: Array, widths: Array) -> None:
    ranges = np.stack([-widths, widths])
    levels = quantize(vectors, EmbeddingType.UINT8, ranges).astype(np.float64)
    steps = 2 * widths / 255
    distance = np.abs(-widths + (levels + 0.5) * steps - np.clip(vectors, -widths, widths))
    assert (distance <= 0.5 * steps * 1.001 + 1e-6).all()


def test_values_outside_the_range_are_clipped() -> None:
    ranges = np.array([[-1, 2, 5], [1, 2, 5]], np.float32)
    vectors = np.array([[-9, -3e38, 5], [9, 3e38, 6.5], [0, 2, -5]], np.float32)
    assert quantize(vectors, EmbeddingType.UINT8, ranges).tolist() == [[0, 0, 0], [255, 255, 1], [127, 0, 0]]
    assert quantize(vectors[:1], EmbeddingType.INT8, ranges).tolist() == [[-128, -128, -128]]


def test_types_without_quantization_or_ranges() -> None:
    vectors = np.ones((2, 3), np.float32)
    assert quantize(vectors, EmbeddingType.FLOAT) is vectors
    with pytest.raises(ValueError, match="INT8 and UINT8 need ranges"):
        quantize(vectors, EmbeddingType.INT8)


@pytest.mark.parametrize(
    ("ranges", "problem"),
    [
        ([[0, 1], [1, 1]], None),
        ([[0, 1]], r"has the shape [1, 2], expected [2, 2]"),
        ([[0, 1], [np.nan, 1]], "contains NaN, infinity, or a difference beyond the range of float32"),
        ([[-3e38, 1], [3e38, 1]], "contains NaN, infinity, or a difference beyond the range of float32"),
        ([[0, 1], [1, 0.5]], "has a minimum above the maximum in component 1"),
    ],
)
def test_defective_ranges_are_described(ranges: list[list[float]], problem: str | None) -> None:
    assert ranges_problem(np.array(ranges, np.float32), 2) == problem


def test_ranges_of_another_type_are_described() -> None:
    assert ranges_problem(np.zeros((2, 2)), 2) == "has the type float64, expected float32"
