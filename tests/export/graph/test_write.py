"""ONNX files written by hand: aligned, shared, and the same to every reader."""

import tempfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from attnlens_export import GraphError
from attnlens_export.graph.write import (
    ALIGNMENT,
    SHARED_FROM_BYTES,
    verify_places,
    write_data,
    write_embedded,
    write_referring,
)

Weights = dict[str, np.ndarray]


def small_model() -> onnx.ModelProto:
    node = helper.make_node("Identity", ["x"], ["y"])
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n"]) for name in "xy"]
    return helper.make_model(helper.make_graph([node], "small", values[:1], values[1:]))


def make_weights(sizes: list[int]) -> Weights:
    generator = np.random.default_rng(0)
    return {
        f"w{'x' * (size % 70)}.{index}": generator.random(size, np.float32)
        for index, size in enumerate(sizes)
    }


def read(path: Path) -> Weights:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


def assert_same(found: Weights, wanted: Weights) -> None:
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name], array)


# 16384 and 2097152 are where a length needs a byte more.
@given(st.lists(st.integers(0, 5000), max_size=6))
@example([4090, 4091, 4092, 4093, 4094, 4095, 4096, 4097])
@example([524_250, 524_280, 524_288, 3, 256, 255])
@example([])
def test_weights_are_aligned_shared_and_unchanged(sizes: list[int]) -> None:
    weights = make_weights(sizes)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        places = write_embedded(directory / "model.onnx", small_model(), weights)
        write_referring(directory / "other.onnx", small_model(), weights, places)
        verify_places(directory, weights, places)
        assert places.keys() == {name for name, array in weights.items() if array.nbytes >= SHARED_FROM_BYTES}
        content = (directory / "model.onnx").read_bytes()
        for key, place in places.items():
            assert place.location == "model.onnx"
            assert place.offset % ALIGNMENT == 0
            assert content[place.offset : place.offset + place.length] == weights[key].tobytes()
        assert_same(read(directory / "model.onnx"), weights)
        assert_same(read(directory / "other.onnx"), weights)
        onnx.checker.check_model(directory / "model.onnx")
        onnx.checker.check_model(directory / "other.onnx")


def test_data_file_contains_large_weights_and_the_graph_small_ones(tmp_path: Path) -> None:
    weights = make_weights([1000, 10, 333, 255, 256])
    places = write_data(tmp_path / "model.onnx_data", weights)
    write_referring(tmp_path / "model.onnx", small_model(), weights, places)
    assert [place.offset % ALIGNMENT for place in places.values()] == [0, 0, 0]
    assert (tmp_path / "model.onnx").stat().st_size < 3000
    assert_same(read(tmp_path / "model.onnx"), weights)


@pytest.mark.parametrize("block_bytes", [1, 250, 2**24])
def test_transposed_view_is_written_in_its_own_order(
    block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnlens_export.graph.write._BLOCK_BYTES", block_bytes)
    matrix = np.arange(20 * 30, dtype=np.float32).reshape(20, 30)
    weights: Weights = {"w.T": matrix.T, "w": matrix, "scalar": matrix[3, 4]}
    places = write_embedded(tmp_path / "model.onnx", small_model(), weights)
    verify_places(tmp_path, weights, places)
    assert_same(read(tmp_path / "model.onnx"), weights)


def test_changed_byte_is_noticed(tmp_path: Path) -> None:
    weights = make_weights([1000])
    places = write_embedded(tmp_path / "model.onnx", small_model(), weights)
    ((name, place),) = places.items()
    content = bytearray((tmp_path / "model.onnx").read_bytes())
    content[place.offset + 17] ^= 1
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(GraphError, match=name):
        verify_places(tmp_path, weights, places)
