"""Which files hold the weights of a graph, and whether they have been modified."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from attnlens.bundle import read_state
from attnlens_server.bundle.files import MappedFiles, external_locations, graph_files
from attnlens_server.errors import StartupError, UnusableGraphError


def weights_in(location: str) -> onnx.TensorProto:
    tensor = onnx.TensorProto(name=location, dims=[1], data_type=TensorProto.FLOAT)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"offset": "0", "location": location, "length": "4"}.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def graph_of(*nodes: onnx.NodeProto, **fields: Any) -> onnx.GraphProto:
    return onnx.GraphProto(name="graph", node=nodes, **fields)


def sparse(location: str) -> onnx.SparseTensorProto:
    return onnx.SparseTensorProto(values=weights_in(f"{location}.values"), indices=weights_in(location))


def node(**attributes: Any) -> onnx.NodeProto:
    return helper.make_node("Anything", [], ["y"], **attributes)


MODELS_BY_LOCATION: dict[str, onnx.ModelProto] = {
    "initializer": onnx.ModelProto(graph=graph_of(initializer=[weights_in("here")])),
    "sparse": onnx.ModelProto(graph=graph_of(sparse_initializer=[sparse("here")])),
    "constant": onnx.ModelProto(graph=graph_of(node(value=weights_in("here")))),
    "list": onnx.ModelProto(graph=graph_of(node(values=[weights_in("here"), weights_in("there")]))),
    "sparse attribute": onnx.ModelProto(graph=graph_of(node(value=sparse("here")))),
    "sparse list": onnx.ModelProto(graph=graph_of(node(values=[sparse("here"), sparse("there")]))),
    "body": onnx.ModelProto(graph=graph_of(node(body=graph_of(node(value=weights_in("here")))))),
    "bodies": onnx.ModelProto(graph=graph_of(node(bodies=[graph_of(initializer=[weights_in("here")])]))),
    "function": onnx.ModelProto(functions=[onnx.FunctionProto(node=[node(value=weights_in("here"))])]),
    "default": onnx.ModelProto(
        functions=[onnx.FunctionProto(attribute_proto=[helper.make_attribute("value", weights_in("here"))])]
    ),
    "training": onnx.ModelProto(
        training_info=[onnx.TrainingInfoProto(algorithm=graph_of(initializer=[weights_in("here")]))]
    ),
}


def all_locations(message: Any) -> set[str]:
    """Test oracle: every value with the key `location`, at any depth."""
    if isinstance(message, onnx.StringStringEntryProto):
        return {message.value} if message.key == "location" else set()
    found: set[str] = set()
    for field, value in message.ListFields():
        if field.message_type is not None:
            for each in value if field.is_repeated else [value]:
                found |= all_locations(each)
    return found


@pytest.mark.parametrize("model", MODELS_BY_LOCATION.values(), ids=MODELS_BY_LOCATION)
def test_every_location_of_weights_is_searched(model: onnx.ModelProto, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    assert "here" in all_locations(model)
    assert {*external_locations(path)} == all_locations(model)


def test_search_covers_every_onnx_field_that_leads_to_a_tensor() -> None:
    """The search covers every path from a model to a tensor in the current onnx.proto."""
    leading: set[tuple[str, str]] = set()

    def leads(kind: Any, seen: tuple[str, ...]) -> bool:
        if kind.name == "TensorProto":
            return True
        if kind.name in seen:
            return False
        message_fields = [field for field in kind.fields if field.message_type is not None]
        found = [field for field in message_fields if leads(field.message_type, (*seen, kind.name))]
        leading.update((kind.name, field.name) for field in found)
        return bool(found)

    leads(onnx.ModelProto.DESCRIPTOR, ())
    visited: set[tuple[str, str]] = set()

    def visit(message: Any) -> None:
        for field, value in message.ListFields():
            if field.message_type is not None:
                visited.add((message.DESCRIPTOR.name, field.name))
                for each in value if field.is_repeated else [value]:
                    visit(each)

    for model in MODELS_BY_LOCATION.values():
        visit(model)
    missing = leading - visited - {("TrainingInfoProto", "initialization")}  # such as `algorithm`
    assert missing == set()


def test_exported_graph_lists_its_weight_files(small_bundle: Callable[[str], Path]) -> None:
    onnx_directory = small_bundle("wordpiece") / "onnx"
    assert external_locations(onnx_directory / "model.onnx") == {}
    [(location, end)] = external_locations(onnx_directory / "model_attentions.onnx").items()
    assert location == "model.onnx"
    assert 0 < end <= (onnx_directory / location).stat().st_size


@pytest.mark.parametrize(
    "content", [b"", b"not a graph", b"\x3a\xff\xff\xff\xff\x7f", b"\x08" + b"\xff" * 11], ids=repr
)
def test_invalid_model_is_rejected(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(StartupError, match=r"model\.onnx is not valid ONNX"):
        external_locations(path)


@pytest.mark.parametrize(
    ("location", "is_listed"),
    [("data", True), ("./data", True), ("../data", False), ("/onnx/data", False), ("other", False)],
)
def test_only_listed_files_are_used(location: str, is_listed: bool, tmp_path: Path) -> None:
    (tmp_path / "onnx").mkdir()
    model = onnx.ModelProto(graph=graph_of(initializer=[weights_in(location)]))
    (tmp_path / "onnx" / "model.onnx").write_bytes(model.SerializeToString())
    (tmp_path / "onnx" / "data").write_bytes(bytes(4))
    listed = ["onnx/model.onnx", "onnx/data", "data"]
    if is_listed:
        assert graph_files(tmp_path, "onnx/model.onnx", listed) == {"onnx/model.onnx", "onnx/data"}
    else:
        with pytest.raises(StartupError, match="which is not listed in the manifest"):
            graph_files(tmp_path, "onnx/model.onnx", listed)


def test_mapped_file_reports_writes_but_not_replacement(
    tmp_path: Path,
) -> None:
    path, new = tmp_path / "weights", tmp_path / "new"
    path.write_bytes(b"before")
    os.utime(path, ns=(1, 1))  # allow for a coarse file-system clock
    mapped = MappedFiles({path: read_state(path)})
    mapped.check()
    path.chmod(0o400)
    mapped.check()
    path.rename(tmp_path / "elsewhere")
    mapped.check()
    new.write_bytes(b"after")
    new.rename(path)
    mapped.check()
    (tmp_path / "elsewhere").replace(path)
    mapped.check()
    path.chmod(0o600)
    path.write_bytes(b"again!")
    with pytest.raises(UnusableGraphError, match=r"weights was altered while in use: .*rename it"):
        mapped.check()
