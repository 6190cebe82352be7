"""Opening of bundles. Altered bundles, and bundles that failed parity, are rejected."""

import dataclasses
import hashlib
import logging
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from attnlens.bundle import (
    MANIFEST_NAME,
    BundleError,
    FileState,
    read_manifest,
    read_state,
    verify_files,
)
from attnlens.dense import DenseLayer, open_dense
from attnlens.v1.manifest_pb2 import Manifest
from attnlens_server.bundle.check import check_manifest
from attnlens_server.bundle.files import MappedFiles, graph_files
from attnlens_server.bundle.manifest import PRECISIONS, main_graph, read_model
from attnlens_server.bundle.model import ContributionsGraph, Graph, Kind, Model
from attnlens_server.config import Precision, graph_precision
from attnlens_server.errors import StartupError, UnusableGraphError

logger = logging.getLogger(__name__)

TOKENIZER_NAME = "tokenizer.json"
CONFIG_NAME = "config.json"  # every checkpoint has this file


@dataclass(frozen=True, slots=True)
class Bundle:
    """A verified bundle directory.

    Attributes:
        directory: Path of the bundle.
        manifest: Manifest.
        model: Model description.
        dense: Dense layers after the pooling.
        precision: Precision of embeddings, or of the logits of a classifier. Other results are in fp32.
        states: State of each listed file by path, read before its hash was verified.
        graph_files: Paths of all files of each graph, by the path of its ONNX file.
    """

    directory: Path
    manifest: Manifest
    model: Model
    dense: tuple[DenseLayer, ...]
    precision: Precision = "fp32"
    states: Mapping[str, FileState] = field(default_factory=dict)
    graph_files: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def graph_path(self, kind: Kind) -> Path:
        """Return the ONNX file of a graph."""
        return self.directory / self.graph(kind).path

    def graph(self, kind: Kind) -> Graph | ContributionsGraph:
        """Return the graph of a kind.

        Raises:
            KeyError: The bundle has no such graph.
        """
        if kind == "contributions" and self.model.contributions is not None:
            return self.model.contributions
        return self.model.graphs[kind]

    @property
    def tokenizer_path(self) -> Path | None:
        """Path of `tokenizer.json`, or None if the bundle has none."""
        return self.directory / TOKENIZER_NAME if TOKENIZER_NAME in self.states else None

    def verify_graph(self, graph: Graph | ContributionsGraph) -> MappedFiles:
        """Check that the files of a graph have not changed since the bundle was opened.

        Only files whose state has changed are hashed again.

        Returns:
            The files of the graph, which runtimes map, to be checked while the graph is in use.

        Raises:
            UnusableGraphError: A file is missing or was altered.
        """
        try:
            paths = self.graph_files[graph.path]
            touched = frozenset(
                path for path in paths if read_state(self.directory / path) != self.states[path]
            )
            states = {path: self.states[path] for path in paths}
            states |= verify_files(self.directory, self.manifest, touched)
        except BundleError as error:
            raise UnusableGraphError(str(error)) from error
        except OSError as error:
            raise UnusableGraphError(f"cannot read {error.filename}: {error.strerror}") from error
        return MappedFiles({self.directory / path: state for path, state in states.items()})


def open_bundle(directory: Path, precision: Precision = "fp32") -> Bundle:
    """Read the manifest of a bundle and verify all files.

    Raises:
        StartupError: There is no bundle, it has no graph in `precision`, a file is missing, altered or has no
            hash, the manifest is invalid, or the bundle failed parity.
    """
    try:
        manifest = read_manifest(directory)
        # Before the files are verified, so that a bundle that replaces this one in the meantime is detected.
        version = hashlib.sha256((directory / MANIFEST_NAME).read_bytes()).hexdigest()
        check_manifest(directory, manifest)
        states = verify_files(directory, manifest)
    except BundleError as error:
        raise StartupError(f"{error}{_hint(directory)}") from error
    _, purpose = main_graph(manifest)
    precisions = [graph.precision for graph in manifest.graphs if graph.purpose == purpose]
    if PRECISIONS[graph_precision(precision)] not in precisions:
        raise StartupError(
            f"{directory} has no graph in {precision}: export it again with --precision {precision}, "
            "or serve it with --precision fp32"
        )
    if not manifest.parity.passed:
        raise StartupError(
            f"{directory / 'manifest.json'}: the graphs differ from the checkpoint (parity failed, see "
            f"{directory / 'parity' / 'report.md'}): export the bundle again"
        )
    if TOKENIZER_NAME not in states and (directory / TOKENIZER_NAME).exists():
        raise StartupError(
            f"{directory / TOKENIZER_NAME} is not in the manifest, so it may belong to another model: remove "
            "it, or export the bundle again with --tokenizer"
        )
    try:
        dense = open_dense(directory, manifest)
    except BundleError as error:
        raise StartupError(str(error)) from error
    model = read_model(manifest, version, precision)
    if model.contributions is not None and _races(directory / model.contributions.path):
        logger.warning(
            "%s: %s is not used, because an earlier version exported it with an operator (ScatterND) "
            "whose results vary between runs with several threads. Export the bundle again to explain "
            "embeddings by contributions",
            directory,
            model.contributions.path,
        )
        model = dataclasses.replace(model, contributions=None)
    graphs: list[Graph | ContributionsGraph] = [*model.graphs.values()]
    if model.contributions is not None:
        graphs.append(model.contributions)
    return Bundle(
        directory=directory,
        manifest=manifest,
        model=model,
        dense=dense,
        precision=precision,
        states=states,
        graph_files={graph.path: graph_files(directory, graph.path, states) for graph in graphs},
    )


def _races(graph: Path) -> bool:
    """Return whether a contributions graph uses ScatterND, whose updates ONNX Runtime loses.

    The graph file has no weights, so a search for the operator's name is enough.
    """
    return b"ScatterND" in graph.read_bytes()


def _hint(directory: Path) -> str:
    """Return how to export the directory if it is a checkpoint, else ""."""
    if (directory / MANIFEST_NAME).exists() or not (directory / CONFIG_NAME).is_file():
        return ""
    return (
        f"; it has a {CONFIG_NAME} and looks like a checkpoint: export it first with "
        f"`attnlens export {shlex.quote(str(directory))} --output DIR`"
    )
