"""Manipulated bundles with correct hashes, which only a check of the contents detects."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

from attnlens.bundle import MANIFEST_NAME, describe_file, read_manifest, write_manifest

EMBEDDINGS = "onnx/model.onnx"
ATTENTIONS = "onnx/model_attentions.onnx"

Json = dict[str, Any]


def copy_of(bundle: Path, directory: Path) -> Path:
    """Return a copy of a bundle to tamper with."""
    return Path(shutil.copytree(bundle, directory / "bundle"))


@contextmanager
def manifest_of(bundle: Path) -> Iterator[Json]:
    """Yield the manifest as JSON and write it back on exit."""
    path = bundle / MANIFEST_NAME
    manifest = json.loads(path.read_text())
    yield manifest
    path.write_text(json.dumps(manifest))


def put_hashes_right(bundle: Path) -> None:
    """Update the hashes and sizes of the listed files."""
    manifest = read_manifest(bundle)
    for file in manifest.files:
        file.CopyFrom(describe_file(bundle, bundle / file.path))
    write_manifest(bundle, manifest)


def change_graph(bundle: Path, path: str, change: Callable[[onnx.GraphProto], None]) -> None:
    """Change the graph of an ONNX file without moving its external weights."""
    model = onnx.load(bundle / path, load_external_data=False)
    change(model.graph)
    (bundle / path).write_bytes(model.SerializeToString())
    put_hashes_right(bundle)


def through(name: str, *nodes: onnx.NodeProto, **output: Any) -> Callable[[onnx.GraphProto], None]:
    """Return a change that sends the output `name`, as `inner`, through nodes that make a new `name`.

    `output` may give another `elem_type` and `shape`.
    """

    def change(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            for names in (node.input, node.output):
                for index, each in enumerate(names):
                    if each == name:
                        names[index] = "inner"
        graph.node.extend(nodes)
        [index] = [index for index, each in enumerate(graph.output) if each.name == name]
        if output:
            graph.output[index].CopyFrom(helper.make_tensor_value_info(name, **output))

    return change


def constant(name: str, value: Any, data_type: int = TensorProto.FLOAT) -> onnx.NodeProto:
    """Return a node with a constant output: a number, or a list of numbers."""
    values, shape = (value, [len(value)]) if isinstance(value, list) else ([value], [])
    return helper.make_node("Constant", [], [name], value=helper.make_tensor(name, data_type, shape, values))


def endless_loop(before: str, after: str) -> list[onnx.NodeProto]:
    """Return nodes with an infinite loop between `before` and `after`."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go_on"], ["go_on_out"]),
            helper.make_node("Identity", ["value"], ["value_out"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("iteration", TensorProto.INT64, []),
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("value", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("go_on_out", TensorProto.BOOL, []),
            helper.make_tensor_value_info("value_out", TensorProto.FLOAT, None),
        ],
    )
    return [
        constant("always", True, TensorProto.BOOL),  # noqa: FBT003 - a tensor's value
        helper.make_node("Loop", ["", "always", before], [after], body=body),
    ]
