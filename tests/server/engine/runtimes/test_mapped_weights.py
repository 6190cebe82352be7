"""Weights inside a graph file become external data of the same file, with the same values."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from attnlens_client import AttentionQuery
from attnlens_server import local
from attnlens_server.engine.runtimes.mapped_weights import (
    ALIGNMENT,
    MIN_BYTES,
    inline_weights,
    locate_weights,
)
from attnlens_server.engine.runtimes.onnx_session import open_graph
from attnlens_server.errors import StartupError


def weights_of(model: onnx.ModelProto, directory: Path) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor, str(directory)) for tensor in model.graph.initializer}


def test_rewritten_graph_differs_only_in_the_storage_of_large_weights(
    small_bundle: Callable[[str], Path],
) -> None:
    path = small_bundle("wordpiece") / "onnx" / "model.onnx"
    located = locate_weights(path, is_mapped=True)
    assert located is not None
    assert located.folder == path.parent.resolve()
    before, after = onnx.load(path), onnx.load_from_string(located.content)
    external = {tensor.name for tensor in after.graph.initializer if tensor.data_location}
    assert external == {
        tensor.name for tensor in before.graph.initializer if len(tensor.raw_data) >= MIN_BYTES
    }
    expected, found = weights_of(before, path.parent), weights_of(after, path.parent)
    assert expected.keys() == found.keys()
    for name, weights in expected.items():
        np.testing.assert_array_equal(found[name], weights)
    for model in (before, after):
        del model.graph.initializer[:]
    assert before == after


def test_graph_without_weights_of_its_own_is_not_rewritten(small_bundle: Callable[[str], Path]) -> None:
    path = small_bundle("wordpiece") / "onnx" / "model_attentions.onnx"
    assert locate_weights(path, is_mapped=True) is None
    assert inline_weights(path) is None


@pytest.mark.parametrize("has_own_directories", [False, True], ids=["hub cache", "DVC"])
def test_bundle_of_links_gives_the_same_results(
    small_bundle: Callable[[str], Path], tmp_path: Path, *, has_own_directories: bool
) -> None:
    original, linked = small_bundle("wordpiece"), tmp_path / "bundle"
    for number, file in enumerate(each for each in original.rglob("*") if each.is_file()):
        blob = tmp_path / "blobs" / (f"{number}/blob" if has_own_directories else str(number))
        link = linked / file.relative_to(original)
        for directory in (blob.parent, link.parent):
            directory.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, blob)
        link.symlink_to(blob)
    results = []
    for bundle in (original, linked):
        with local(bundle, threads=1, timeout_s=30) as model:
            [text] = model.encode(["a b c"], attention=AttentionQuery())
            [explanation] = model.explain(["a b c"])
            scores, weights = explanation.scores[0].values, text.attention[0].weights
            results.append([model.embed(["a b c"]), text.last_hidden_state, weights, scores])
    for expected, found in zip(*results, strict=True):
        np.testing.assert_array_equal(found, expected)
    inlined = inline_weights(linked / "onnx" / "model_attentions.onnx")
    assert inlined is not None
    path = original / "onnx" / "model_attentions.onnx"
    before, after = onnx.load(path), onnx.load_from_string(inlined)
    for name, weights in weights_of(after, tmp_path).items():
        np.testing.assert_array_equal(weights, weights_of(before, path.parent)[name])


@pytest.mark.parametrize("shift", [0, 4])
def test_unaligned_weights_remain_in_the_graph(shift: int, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    weights = np.arange(512, dtype=np.float32)
    tensor = numpy_helper.from_array(weights, "w")
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [512])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [512])],
        [tensor],
    )
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    for padding in range(2 * ALIGNMENT):
        model.producer_name = "p" * padding
        content = model.SerializeToString()
        if (content.index(weights.tobytes()) - shift) % ALIGNMENT == 0:
            break
    path.write_bytes(content)
    assert (locate_weights(path, is_mapped=True) is None) == (shift != 0)
    session = open_graph(path, "cpu", 1, 0)
    [sums] = session.run(None, {"x": np.ones(512, np.float32)})
    np.testing.assert_array_equal(sums, weights + 1)


def test_file_that_is_not_a_graph_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"not a graph")
    with pytest.raises(StartupError, match=r"not valid ONNX: .*byte"):
        locate_weights(path, is_mapped=True)
