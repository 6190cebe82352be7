"""Opening a bundle for serving: nothing is loaded that was altered or whose parity failed."""

from dataclasses import dataclass
from pathlib import Path

from attnlens.bundle import MANIFEST_NAME, BundleError, find_graph, read_manifest, verify_files
from attnlens.v1.manifest_pb2 import GraphKind, Manifest
from attnlens_server.dense import DenseLayer, open_dense
from attnlens_server.errors import StartupError


@dataclass(frozen=True, slots=True)
class Bundle:
    """A verified bundle directory."""

    directory: Path
    manifest: Manifest
    dense: tuple[DenseLayer, ...]

    def graph_path(self, kind: GraphKind.ValueType) -> Path:
        """Return the ONNX file of `kind`."""
        return self.directory / find_graph(self.manifest, kind).path

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


def open_bundle(directory: Path) -> Bundle:
    """Read the manifest of `directory` and verify every file.

    Raises:
        StartupError: there is no bundle, a file is missing or altered, or the parity check failed.
    """
    try:
        manifest = read_manifest(directory)
        verify_files(directory, manifest)
        for kind in (GraphKind.GRAPH_KIND_EMBEDDINGS, GraphKind.GRAPH_KIND_ATTENTIONS):
            find_graph(manifest, kind)
    except BundleError as error:
        raise StartupError(str(error)) from error
    if not manifest.parity.passed:
        raise StartupError(
            f"{directory / 'manifest.json'}: the graphs are not the same model as the checkpoint "
            f"(parity failed, see {directory / 'parity' / 'report.md'}); export the bundle again"
        )
    _check_defaults(directory, manifest)
    return Bundle(directory=directory, manifest=manifest, dense=open_dense(directory, manifest))


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
