"""Models of a repository: one per graph, with fixed file names."""

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import onnx

from attnlens.v1.manifest_pb2 import Graph, GraphPurpose, Manifest
from attnlens_export.errors import SourceError

GRAPH_NAME = "model.onnx"
DATA_NAME = "model.onnx_data"

Content = Path | bytes
"""File of the bundle, or content of a new file."""

Tree = dict[str, Content]
"""Files by path relative to the directory, with forward slashes."""


@dataclass(frozen=True)
class ServedModel:
    """One graph of a bundle as a model of the server.

    Attributes:
        name: Name of the model.
        graph: Manifest entry of the graph.
        files: `model.onnx` and, if weights are external, `model.onnx_data`.
    """

    name: str
    graph: Graph
    files: Tree


def served_models(directory: Path, manifest: Manifest) -> list[ServedModel]:
    """Return the graphs of a bundle as models, in the order of the manifest.

    The contributions graph is omitted, because its inputs depend on pooling by the server.

    Raises:
        SourceError: The name of the bundle is not a valid model name, or the weights of a graph are not in
            exactly one file of the manifest.
    """
    name = model_name(manifest)
    listed = {file.path for file in manifest.files}
    models = []
    for graph in manifest.graphs:
        if graph.purpose == GraphPurpose.GRAPH_PURPOSE_CONTRIBUTIONS:
            continue
        # onnx/model.onnx becomes NAME, and onnx/model_attentions.onnx becomes NAME_attentions.
        suffix = PurePosixPath(graph.path).stem.removeprefix("model")
        models.append(ServedModel(name + suffix, graph, _model_files(directory, graph.path, listed)))
    return models


def model_name(manifest: Manifest) -> str:
    """Return the name of the bundle, reduced to letters, digits, dots, hyphens and underscores.

    It becomes a directory name and part of URLs.

    Raises:
        SourceError: The name contains none of these characters.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", manifest.model_name).strip("._")
    if not name:
        raise SourceError(
            f"the bundle's name {manifest.model_name!r} has no ASCII letter or digit, which a model name "
            "needs: export it again with another --name"
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
    # model_attentions.onnx refers to model.onnx. The servers find graphs by this name or suffix, so the file
    # with the weights needs a different name.
    for entry in entries:
        entry.value = DATA_NAME
    return {GRAPH_NAME: model.SerializeToString(), DATA_NAME: directory / data}
