"""What a server loads: one graph under a name of its own, with its weights beside it under fixed names."""

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import onnx

from attnlens.v1.manifest_pb2 import Graph, GraphPurpose, Manifest
from attnlens_export.errors import SourceError

GRAPH_NAME = "model.onnx"
DATA_NAME = "model.onnx_data"

Content = Path | bytes
"""A file of the bundle, or the bytes of a new file."""

Tree = dict[str, Content]
"""Every file of a directory by its path within it, with forward slashes."""


@dataclass(frozen=True)
class ServedModel:
    """One graph of a bundle, as a server sees it.

    Attributes:
        name: what clients call it.
        graph: its inputs and outputs.
        files: `model.onnx`; and `model.onnx_data` where the weights are not inside it.
    """

    name: str
    graph: Graph
    files: Tree


def served_models(directory: Path, manifest: Manifest) -> list[ServedModel]:
    """Return the graphs of a bundle as models, in the manifest's order.

    That of contributions is left out: its inputs are those of a server that pools.

    Raises:
        SourceError: the bundle's name can't name a model, or a graph's weights are not in one listed file.
    """
    name = model_name(manifest)
    listed = {file.path for file in manifest.files}
    models = []
    for graph in manifest.graphs:
        if graph.purpose == GraphPurpose.GRAPH_PURPOSE_CONTRIBUTIONS:
            continue
        # onnx/model.onnx has the bundle's name, onnx/model_attentions.onnx that name and _attentions.
        suffix = PurePosixPath(graph.path).stem.removeprefix("model")
        models.append(ServedModel(name + suffix, graph, _model_files(directory, graph.path, listed)))
    return models


def model_name(manifest: Manifest) -> str:
    """Return the bundle's name in letters, digits, dots, hyphens and underscores.

    It becomes a directory and a part of URLs: both servers' patterns take anything but a slash there.

    Raises:
        SourceError: nothing is left of it.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", manifest.model_name).strip("._")
    if not name:
        raise SourceError(
            f"the bundle's name {manifest.model_name!r} has no ASCII letter or digit for a model's name: "
            "export it again with another --name"
        )
    return name


def _model_files(directory: Path, path: str, listed: set[str]) -> Tree:
    model = onnx.load(directory / path, load_external_data=False)
    entries = [
        entry
        for tensor in model.graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    ]
    locations = {entry.value for entry in entries}
    if not locations:
        return {GRAPH_NAME: directory / path}
    data = str(PurePosixPath(path).with_name(min(locations)))
    if len(locations) > 1 or data not in listed:
        raise SourceError(f"{directory / path}: its weights are not in one file of the manifest: {locations}")
    if locations == {DATA_NAME}:
        return {GRAPH_NAME: directory / path, DATA_NAME: directory / data}
    # model_attentions.onnx refers to bytes inside model.onnx. The servers find a graph by that name or by
    # its ending, so the other file gets a name that can't be taken for a graph.
    for entry in entries:
        entry.value = DATA_NAME
    return {GRAPH_NAME: model.SerializeToString(), DATA_NAME: directory / data}
