"""The bundle directory as a contract: reading, writing and verifying `manifest.json`.

Used by the exporter, which writes it, and by the server, which trusts nothing that it does not verify.
The schema is the message `attnlens.v1.Manifest`; docs/bundle.md explains the directory.
"""

import hashlib
from pathlib import Path, PurePosixPath

from google.protobuf import json_format

from attnlens.v1.manifest_pb2 import BundleFile, Graph, GraphKind, Manifest
from attnlens.v1.tensor_pb2 import DataType

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"


class BundleError(Exception):
    """A bundle is missing, incomplete, altered or of another format. The message names the file."""


def read_manifest(directory: Path, name: str = MANIFEST_NAME) -> Manifest:
    """Parse `directory/manifest.json`, or the manifest that has another name there.

    Raises:
        BundleError: the file is missing, is not a manifest, or has another format version.
    """
    path = directory / name
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BundleError(f"{directory} is not a bundle: {name} can't be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise BundleError(f"{path} is not UTF-8: {error}") from error
    try:
        manifest = json_format.Parse(text, Manifest(), ignore_unknown_fields=True)
    except json_format.ParseError as error:
        raise BundleError(f"{path} is not a manifest: {error}") from error
    if manifest.format_version != FORMAT_VERSION:
        raise BundleError(
            f"{path} has format version {manifest.format_version}, this version of attnlens reads "
            f"{FORMAT_VERSION}: export the bundle again, or install the version of attnlens that wrote it"
        )
    return manifest


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write `directory/manifest.json`, the field names as in the .proto file."""
    text = json_format.MessageToJson(manifest, preserving_proto_field_name=True)
    (directory / MANIFEST_NAME).write_text(text + "\n", encoding="utf-8")


def describe_file(directory: Path, path: Path) -> BundleFile:
    """Return the manifest's entry for `path`, a file below `directory`."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return BundleFile(
        path=path.relative_to(directory).as_posix(),
        size_bytes=path.stat().st_size,
        sha256=digest.hexdigest(),
    )


def verify_files(directory: Path, manifest: Manifest) -> None:
    """Check that every file of the manifest is there, unaltered.

    Raises:
        BundleError: a file is missing, has another size or another SHA-256, or lies outside the bundle.
    """
    listed = {file.path for file in manifest.files}
    for graph in manifest.graphs:
        if graph.path not in listed:
            raise BundleError(f"{directory / MANIFEST_NAME} has no hash for its graph {graph.path}")
    for expected in manifest.files:
        relative = PurePosixPath(expected.path)
        if relative.is_absolute() or ".." in relative.parts:
            raise BundleError(f"{directory / MANIFEST_NAME} names a file outside the bundle: {expected.path}")
        path = directory / relative
        if not path.is_file():
            raise BundleError(f"{path} is missing: copy the whole bundle, or export it again")
        actual_size = path.stat().st_size
        if actual_size != expected.size_bytes:
            raise BundleError(
                f"{path} was altered: it has {actual_size} bytes, the manifest says {expected.size_bytes}"
            )
        actual = describe_file(directory, path)
        if actual.sha256 != expected.sha256:
            raise BundleError(
                f"{path} was altered: its SHA-256 is {actual.sha256}, the manifest says {expected.sha256}"
            )


def find_graph(
    manifest: Manifest,
    kind: GraphKind.ValueType,
    data_type: DataType.ValueType = DataType.DATA_TYPE_FLOAT32,
) -> Graph:
    """Return the graph of `kind` that computes in `data_type`.

    Raises:
        BundleError: the bundle has no such graph.
    """
    for graph in manifest.graphs:
        if (graph.kind, graph.data_type) == (kind, data_type):
            return graph
    names = f"{GraphKind.Name(kind)} graph of {DataType.Name(data_type)}"
    raise BundleError(f"the bundle of {manifest.model_name!r} has no {names}")


def embedding_size(manifest: Manifest) -> int:
    """Return the width of an embedding, where a request does not ask for less."""
    dense = manifest.pooling.dense
    width = dense[-1].out_features if dense else manifest.architecture.hidden_size
    return min(manifest.pooling.truncate_dim or width, width)
