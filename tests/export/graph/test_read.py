"""Reading an ONNX file without its weights."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from attnlens_export import GraphError
from attnlens_export.graph.read import check_valid, read_structure, read_weight
from attnlens_export.graph.trace import TracedGraph
from attnlens_export.graph.write import SHARED_FROM_BYTES, write_embedded, write_referring


@pytest.fixture(scope="module")
def directory(tiny_trace: TracedGraph, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("structure")
    places = write_embedded(directory / "model.onnx", tiny_trace.proto, tiny_trace.weights)
    write_referring(directory / "other.onnx", tiny_trace.proto, tiny_trace.weights, places)
    # As another writer orders the fields.
    (directory / "onnx.onnx").write_bytes(onnx.load(directory / "model.onnx").SerializeToString())
    return directory


@pytest.mark.parametrize("name", ["model.onnx", "other.onnx", "onnx.onnx"])
def test_structure_is_the_model_but_for_its_weights(name: str, directory: Path) -> None:
    structure, whole = read_structure(directory / name), onnx.load(directory / name)
    assert len(structure.SerializeToString()) < 40_000 < (directory / "model.onnx").stat().st_size / 3
    found = {tensor.name: read_weight(directory, tensor) for tensor in structure.graph.initializer}
    expected = {tensor.name: numpy_helper.to_array(tensor) for tensor in whole.graph.initializer}
    assert list(found) == list(expected)
    for key, array in expected.items():
        assert found[key].dtype == array.dtype
        assert np.array_equal(found[key], array)
        assert isinstance(found[key], np.memmap) == (array.nbytes >= SHARED_FROM_BYTES)
    del structure.graph.initializer[:], whole.graph.initializer[:]
    assert structure == whole
    check_valid(directory / name)


def test_file_that_ends_early_is_rejected(directory: Path, tmp_path: Path) -> None:
    content = (directory / "model.onnx").read_bytes()
    for end in (0, 1, 7, len(content) // 2, len(content) - 1):
        (tmp_path / "model.onnx").write_bytes(content[:end])
        with pytest.raises(GraphError, match=r"model\.onnx is not valid ONNX"):
            read_structure(tmp_path / "model.onnx")


def test_truncated_weight_is_rejected(directory: Path, tmp_path: Path) -> None:
    """Of a structure nobody else looks at the length of the bytes."""
    model = onnx.load(directory / "model.onnx")
    tensor = next(each for each in model.graph.initializer if len(each.raw_data) > 2 * SHARED_FROM_BYTES)
    tensor.raw_data = tensor.raw_data[:-4]
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(GraphError, match=rf"model\.onnx: {tensor.name} has \d+ bytes instead of \d+"):
        check_valid(tmp_path / "model.onnx")


def test_other_models_are_checked_by_the_onnx_checker(directory: Path, tmp_path: Path) -> None:
    model = onnx.load(directory / "model.onnx")
    model.graph.node[3].input[0] = "nowhere"
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(onnx.checker.ValidationError, match="nowhere"):
        check_valid(tmp_path / "model.onnx")
