"""Opening a bundle for serving: nothing is loaded that was altered or whose parity failed."""

from dataclasses import dataclass
from pathlib import Path

from attnlens.bundle import MANIFEST_NAME, BundleError, find_graph, read_manifest, verify_files
from attnlens.v1.manifest_pb2 import GraphKind, Manifest
from attnlens.v1.tensor_pb2 import DataType
from attnlens_server.config import Precision
from attnlens_server.dense import DenseLayer, open_dense
from attnlens_server.errors import StartupError

DATA_TYPES: dict[Precision, DataType.ValueType] = {
    "fp32": DataType.DATA_TYPE_FLOAT32,
    "fp16": DataType.DATA_TYPE_FLOAT16,
    "int8": DataType.DATA_TYPE_INT8,
}


@dataclass(frozen=True, slots=True)
class Bundle:
    """A verified bundle directory.

    Attributes:
        directory: where it is.
        manifest: what it says of itself.
        dense: the layers that pooled vectors go through.
        precision: of the graph that computes embeddings; attention is always computed in fp32.
    """

    directory: Path
    manifest: Manifest
    dense: tuple[DenseLayer, ...]
    precision: Precision = "fp32"

    @property
    def embeddings_path(self) -> Path:
        """The ONNX file that returns `last_hidden_state` alone."""
        data_type = DATA_TYPES[self.precision]
        return self.directory / find_graph(self.manifest, GraphKind.GRAPH_KIND_EMBEDDINGS, data_type).path

    @property
    def attentions_path(self) -> Path:
        """The ONNX file that returns the attention weights, too."""
        return self.directory / find_graph(self.manifest, GraphKind.GRAPH_KIND_ATTENTIONS).path

    def verify(self) -> None:
        """Compare every file with the manifest that was read at the start.

        Raises:
            StartupError: a file is missing or was altered since.
        """
        try:
            verify_files(self.directory, self.manifest)
        except BundleError as error:
            raise StartupError(str(error)) from error

    @property
    def tokenizer_path(self) -> Path | None:
        """Return `tokenizer.json`, or None where the bundle has none."""
        path = self.directory / "tokenizer.json"
        return path if path.is_file() else None


def open_bundle(directory: Path, precision: Precision = "fp32") -> Bundle:
    """Read the manifest of `directory` and verify every file.

    Raises:
        StartupError: there is no bundle, or none with a graph in `precision`, a file is missing or altered,
            or the parity check failed.
    """
    try:
        manifest = read_manifest(directory)
        verify_files(directory, manifest)
        for kind in (GraphKind.GRAPH_KIND_EMBEDDINGS, GraphKind.GRAPH_KIND_ATTENTIONS):
            find_graph(manifest, kind)
    except BundleError as error:
        raise StartupError(str(error)) from error
    if all(graph.data_type != DATA_TYPES[precision] for graph in manifest.graphs):
        raise StartupError(
            f"{directory} has no graph in {precision}: export it again with --precision {precision}, "
            "or serve it with --precision fp32"
        )
    if not manifest.parity.passed:
        raise StartupError(
            f"{directory / 'manifest.json'}: the graphs are not the same model as the checkpoint "
            f"(parity failed, see {directory / 'parity' / 'report.md'}); export the bundle again"
        )
    _check_defaults(directory, manifest)
    return Bundle(
        directory=directory,
        manifest=manifest,
        dense=open_dense(directory, manifest),
        precision=precision,
    )


def _check_defaults(directory: Path, manifest: Manifest) -> None:
    path = directory / MANIFEST_NAME
    if not manifest.pooling.pooling:
        raise StartupError(
            f"{path} states no pooling that this version knows: install the version of attnlens that wrote it"
        )
    if manifest.default_prompt_name and manifest.default_prompt_name not in manifest.prompts:
        raise StartupError(
            f"{path} has no prompt {manifest.default_prompt_name!r}, its default: export the bundle again"
        )
