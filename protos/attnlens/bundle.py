"""Reads and writes the manifest of a bundle, and verifies the bundle's files against it.

The exporter writes `manifest.json`; the server verifies it before use. `attnlens.v1.Manifest` is the schema,
and docs/bundle.md describes the directory.
"""

import hashlib
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from google.protobuf import json_format

from attnlens.v1.manifest_pb2 import BundleFile, Graph, GraphPurpose, Manifest, Precision

FORMAT_VERSION = 2
KNOWN_FEATURES = frozenset({"chat_template", "classifier"})
"""Entries of `Manifest.required_features` that this version supports."""
MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 16 << 20  # for a model with 24 layers, it is about 60 kB


class BundleError(Exception):
    """A bundle is missing, incomplete, modified or in an unsupported format. The message names the file."""


class FileState(NamedTuple):
    """File system metadata of a file, which changes when the file is written or replaced."""

    device: int
    inode: int
    size_bytes: int
    modified_ns: int
    changed_ns: int


def read_state(path: Path) -> FileState:
    """Return the current metadata of a file."""
    stat = path.stat()
    return FileState(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


def read_manifest(directory: Path, name: str = MANIFEST_NAME) -> Manifest:
    """Parse the manifest `name` in `directory`.

    Raises:
        BundleError: The file is missing, is not a valid manifest, or has a format version or a required
            feature that this version does not support.
    """
    path = directory / name
    if path.exists() and not path.is_file():
        raise BundleError(f"{directory} is not a bundle: {name} is not a regular file")
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise BundleError(f"{path} is not a manifest: it is larger than {MAX_MANIFEST_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BundleError(f"{directory} is not a bundle: {name} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise BundleError(f"{path} is not UTF-8: {error}") from error
    try:
        manifest = json_format.Parse(text, Manifest(), ignore_unknown_fields=True)
    except (json_format.ParseError, RecursionError) as error:
        raise BundleError(f"{path} is not a manifest: {error}") from error
    if manifest.format_version != FORMAT_VERSION:
        raise BundleError(
            f"{path} has format version {manifest.format_version}, but this version of attnlens only reads "
            f"{FORMAT_VERSION}: export the bundle again, or install the version of attnlens that exported it"
        )
    unknown = sorted(set(manifest.required_features) - KNOWN_FEATURES)
    if unknown:
        raise BundleError(
            f"{path} requires {', '.join(unknown)}, which this version of attnlens does not support: "
            "install the version that exported it"
        )
    return manifest


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write `directory/manifest.json`, with the field names of the .proto file.

    Fields with default values are also written, so that a missing field means that the exporter did not know
    it.
    """
    text = json_format.MessageToJson(
        manifest, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    (directory / MANIFEST_NAME).write_text(text + "\n", encoding="utf-8")


def describe_file(directory: Path, path: Path) -> BundleFile:
    """Return the manifest entry of the file `path` in `directory`."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return BundleFile(
        path=path.relative_to(directory).as_posix(),
        size_bytes=path.stat().st_size,
        sha256=digest.hexdigest(),
    )


def verify_files(
    directory: Path, manifest: Manifest, paths: frozenset[str] | None = None, *, check_hashes: bool = True
) -> dict[str, FileState]:
    """Verify the size and SHA-256 hash of each file in the manifest.

    Args:
        directory: Bundle directory.
        manifest: Manifest of the bundle.
        paths: Files to verify; entries that the manifest does not list are ignored. If None, all files.
        check_hashes: Whether to verify hashes, which requires reading the files, in addition to sizes.

    Returns:
        Metadata of each verified file, read before its contents and keyed by its path in the manifest.

    Raises:
        BundleError: A file is listed twice, missing, modified or outside the bundle, or a graph has no hash.
    """
    listed = {file.path for file in manifest.files}
    if len(listed) < len(manifest.files):
        [(path, count)] = Counter(file.path for file in manifest.files).most_common(1)
        raise BundleError(f"{directory / MANIFEST_NAME} lists {path} {count} times: export the bundle again")
    for graph in manifest.graphs:
        if graph.path not in listed:
            raise BundleError(
                f"{directory / MANIFEST_NAME} has no hash for its graph {graph.path}: export the bundle again"
            )
    return {
        file.path: _verify_file(directory, file, check_hash=check_hashes)
        for file in manifest.files
        if paths is None or file.path in paths
    }


def _verify_file(directory: Path, expected: BundleFile, *, check_hash: bool) -> FileState:
    relative = PurePosixPath(expected.path)
    if relative.is_absolute() or ".." in relative.parts:
        raise BundleError(
            f"{directory / MANIFEST_NAME} names a file outside the bundle: {expected.path}. "
            "Export the bundle again"
        )
    path = directory / relative
    if not path.is_file():
        raise BundleError(f"{path} is missing: copy the whole bundle, or export it again")
    state = read_state(path)
    if state.size_bytes != expected.size_bytes:
        raise BundleError(
            f"{path} was altered: its size is {state.size_bytes} bytes, but the manifest states "
            f"{expected.size_bytes}: restore it, or export the bundle again"
        )
    if not check_hash:
        return state
    actual = describe_file(directory, path)
    if actual.sha256 != expected.sha256:
        raise BundleError(
            f"{path} was altered: its SHA-256 is {actual.sha256}, but the manifest states {expected.sha256}: "
            "restore it, or export the bundle again"
        )
    return state


def find_graph(
    manifest: Manifest,
    purpose: GraphPurpose.ValueType,
    precision: Precision.ValueType = Precision.PRECISION_FP32,
) -> Graph:
    """Return the graph with this purpose and precision.

    Raises:
        BundleError: The bundle has no such graph, or more than one.
    """
    graphs = [graph for graph in manifest.graphs if (graph.purpose, graph.precision) == (purpose, precision)]
    if len(graphs) != 1:
        description = f"{GraphPurpose.Name(purpose)} graph in {Precision.Name(precision)}"
        found = f"several: {', '.join(graph.path for graph in graphs)}" if graphs else "none"
        raise BundleError(
            f"the bundle of {manifest.model_name!r} must have one {description}, but has {found}. "
            "Export it again"
        )
    return graphs[0]


def embedding_size(manifest: Manifest) -> int:
    """Return the default embedding size, for requests without `dimensions`."""
    return manifest.pooling.truncate_dim or max_dimensions(manifest)


def max_dimensions(manifest: Manifest) -> int:
    """Return the maximum embedding size: that of the last dense layer, or the hidden size."""
    dense = manifest.pooling.dense
    return dense[-1].out_features if dense else manifest.architecture.hidden_size
