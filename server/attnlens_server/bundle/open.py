"""Opening a bundle for serving: nothing is loaded that was altered or whose parity failed."""

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
from attnlens_server.bundle.manifest import PRECISIONS, read_model
from attnlens_server.bundle.model import ContributionsGraph, Graph, Kind, Model
from attnlens_server.config import Precision, graph_precision
from attnlens_server.errors import StartupError, UnusableGraphError

logger = logging.getLogger(__name__)

TOKENIZER_NAME = "tokenizer.json"
CONFIG_NAME = "config.json"  # of a checkpoint


@dataclass(frozen=True, slots=True)
class Bundle:
    """A verified bundle directory.

    Attributes:
        directory: where it is.
        manifest: what it says of itself.
        model: what the other rooms need of it.
        dense: the layers that pooled vectors go through.
        precision: what embeddings are computed in; attention is always computed in fp32.
        states: of each listed file by its path, from just before its hash was compared.
    """

    directory: Path
    manifest: Manifest
    model: Model
    dense: tuple[DenseLayer, ...]
    precision: Precision = "fp32"
    states: Mapping[str, FileState] = field(default_factory=dict)

    def graph_path(self, kind: Kind) -> Path:
        """Return the ONNX file of a graph."""
        return self.directory / self.graph(kind).path

    def graph(self, kind: Kind) -> Graph | ContributionsGraph:
        """Return a graph by what it is there for.

        Raises:
            KeyError: the bundle has none.
        """
        if kind == "contributions" and self.model.contributions is not None:
            return self.model.contributions
        return self.model.graphs[kind]

    @property
    def tokenizer_path(self) -> Path | None:
        """Return `tokenizer.json`, or None where the bundle has none."""
        return self.directory / TOKENIZER_NAME if TOKENIZER_NAME in self.states else None

    def verify_graph(self, graph: Graph | ContributionsGraph) -> MappedFiles:
        """Make sure that a graph and the files with its weights are what they were at the start.

        A file that nobody has touched since is not read again.

        Returns:
            The files that ONNX Runtime will map, to be asked for as long as the graph is open.

        Raises:
            UnusableGraphError: a file is missing or was altered since.
        """
        try:
            paths = graph_files(self.directory, graph.path, self.states)
            touched = frozenset(
                path for path in paths if read_state(self.directory / path) != self.states[path]
            )
            states = {path: self.states[path] for path in paths}
            states |= verify_files(self.directory, self.manifest, touched)
        except (BundleError, StartupError) as error:
            raise UnusableGraphError(str(error)) from error
        except OSError as error:
            raise UnusableGraphError(f"{error.filename} can't be read: {error.strerror}") from error
        return MappedFiles(
            {self.directory / path: state for path, state in states.items() if path != graph.path}
        )


def open_bundle(directory: Path, precision: Precision = "fp32") -> Bundle:
    """Read the manifest of `directory` and verify every file.

    Raises:
        StartupError: there is no bundle, or none with a graph in `precision`, a file is missing or altered,
            or would be used without a hash, the manifest contradicts itself, or the parity check failed.
    """
    try:
        manifest = read_manifest(directory)
        # Before the files are verified: where another bundle has taken the place of this one, they differ.
        version = hashlib.sha256((directory / MANIFEST_NAME).read_bytes()).hexdigest()
        check_manifest(directory, manifest)
        states = verify_files(directory, manifest)
    except BundleError as error:
        raise StartupError(f"{error}{_hint(directory)}") from error
    if all(graph.precision != PRECISIONS[graph_precision(precision)] for graph in manifest.graphs):
        raise StartupError(
            f"{directory} has no graph in {precision}: export it again with --precision {precision}, "
            "or serve it with --precision fp32"
        )
    if not manifest.parity.passed:
        raise StartupError(
            f"{directory / 'manifest.json'}: the graphs are not the same model as the checkpoint "
            f"(parity failed, see {directory / 'parity' / 'report.md'}); export the bundle again"
        )
    if TOKENIZER_NAME not in states and (directory / TOKENIZER_NAME).exists():
        raise StartupError(
            f"{directory / TOKENIZER_NAME} is not in the manifest, so nobody knows if it is the model's: "
            "remove it, or export the bundle again with --tokenizer"
        )
    try:
        dense = open_dense(directory, manifest)
    except BundleError as error:
        raise StartupError(str(error)) from error
    model = read_model(manifest, version, precision)
    if model.contributions is not None and _races(directory / model.contributions.path):
        logger.warning(
            "%s: %s is not used. An earlier version wrote it with an operator (ScatterND) whose results vary "
            "from run to run with several threads. Export the bundle again to explain embeddings by "
            "contributions",
            directory,
            model.contributions.path,
        )
        model = dataclasses.replace(model, contributions=None)
    bundle = Bundle(
        directory=directory,
        manifest=manifest,
        model=model,
        dense=dense,
        precision=precision,
        states=states,
    )
    graphs: list[Graph | ContributionsGraph] = [*bundle.model.graphs.values()]
    if bundle.model.contributions is not None:
        graphs.append(bundle.model.contributions)
    for graph in graphs:
        graph_files(directory, graph.path, states)
    return bundle


def _races(graph: Path) -> bool:
    """Return whether a graph of contributions adds with ScatterND, of which ONNX Runtime loses updates.

    Its weights are in another file, so the name of the operator is looked for without parsing.
    """
    return b"ScatterND" in graph.read_bytes()


def _hint(directory: Path) -> str:
    """Return what to do with a directory that is a checkpoint; "" for any other."""
    if (directory / MANIFEST_NAME).exists() or not (directory / CONFIG_NAME).is_file():
        return ""
    return (
        f"; it has a {CONFIG_NAME}, as a checkpoint has: make a bundle of it first, with "
        f"`attnlens export {shlex.quote(str(directory))} --output DIR`"
    )
