"""The bundle directory as a contract: reading, writing and verifying `manifest.json`.

Used by the exporter, which writes it, and by the server, which trusts nothing that it does not verify.
The schema is the message `attnlens.v1.Manifest`; docs/bundle.md explains the directory.
"""

import hashlib
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from google.protobuf import json_format

from attnlens.v1.manifest_pb2 import BundleFile, Graph, GraphPurpose, Manifest, Precision

FORMAT_VERSION = 2
KNOWN_FEATURES: frozenset[str] = frozenset()
"""Entries of `Manifest.required_features` that this version can read."""
MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 16 << 20  # one of 24 layers has 60 kB


class BundleError(Exception):
    """A bundle is missing, incomplete, altered or of another format. The message names the file."""


class FileState(NamedTuple):
    """What the system knows of a file. Whoever writes to a file or replaces it changes this, too."""

    device: int
    inode: int
    size_bytes: int
    modified_ns: int
    changed_ns: int


def state_of(path: Path) -> FileState:
    """Return the state of a file."""
    found = path.stat()
    return FileState(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def read_manifest(directory: Path, name: str = MANIFEST_NAME) -> Manifest:
    """Parse `directory/manifest.json`, or the manifest that has another name there.

    Raises:
        BundleError: the file is missing, is not a manifest, has another format version, or requires an
            unknown feature.
    """
    path = directory / name
    if path.exists() and not path.is_file():
        raise BundleError(f"{directory} is not a bundle: {name} is no regular file")
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise BundleError(f"{path} is not a manifest: it has more than {MAX_MANIFEST_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BundleError(f"{directory} is not a bundle: {name} can't be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise BundleError(f"{path} is not UTF-8: {error}") from error
    try:
        manifest = json_format.Parse(text, Manifest(), ignore_unknown_fields=True)
    except (json_format.ParseError, RecursionError) as error:
        raise BundleError(f"{path} is not a manifest: {error}") from error
    if manifest.format_version != FORMAT_VERSION:
        raise BundleError(
            f"{path} has format version {manifest.format_version}, this version of attnlens reads "
            f"{FORMAT_VERSION}: export the bundle again, or install the version of attnlens that wrote it"
        )
    unknown = sorted(set(manifest.required_features) - KNOWN_FEATURES)
    if unknown:
        raise BundleError(
            f"{path} requires {', '.join(unknown)}, which this version of attnlens does not know: install "
            "the version of attnlens that wrote it"
        )
    return manifest


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write `directory/manifest.json`, the field names as in the .proto file.

    Fields that are 0, false or empty are written too: what is absent, the version that wrote it did not know.
    """
    text = json_format.MessageToJson(
        manifest, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
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


def verify_files(
    directory: Path, manifest: Manifest, paths: frozenset[str] | None = None
) -> dict[str, FileState]:
    """Check that every file of the manifest is there, unaltered.

    Args:
        directory: of the bundle.
        manifest: what it says of itself.
        paths: check these files only, those of them that the manifest lists; None: all.

    Returns:
        The state of each file that was checked, by its path in the manifest, from before it was read.

    Raises:
        BundleError: a file is listed twice, is missing, has another size or SHA-256, or lies outside the
            bundle.
    """
    listed = {file.path for file in manifest.files}
    if len(listed) < len(manifest.files):
        [(path, count)] = Counter(file.path for file in manifest.files).most_common(1)
        raise BundleError(f"{directory / MANIFEST_NAME} lists {path} {count} times: export the bundle again")
    for graph in manifest.graphs:
        if graph.path not in listed:
            raise BundleError(f"{directory / MANIFEST_NAME} has no hash for its graph {graph.path}")
    return {
        file.path: _verify_file(directory, file)
        for file in manifest.files
        if paths is None or file.path in paths
    }


def _verify_file(directory: Path, expected: BundleFile) -> FileState:
    relative = PurePosixPath(expected.path)
    if relative.is_absolute() or ".." in relative.parts:
        raise BundleError(f"{directory / MANIFEST_NAME} names a file outside the bundle: {expected.path}")
    path = directory / relative
    if not path.is_file():
        raise BundleError(f"{path} is missing: copy the whole bundle, or export it again")
    state = state_of(path)
    if state.size_bytes != expected.size_bytes:
        raise BundleError(
            f"{path} was altered: it has {state.size_bytes} bytes, the manifest says {expected.size_bytes}"
        )
    actual = describe_file(directory, path)
    if actual.sha256 != expected.sha256:
        raise BundleError(
            f"{path} was altered: its SHA-256 is {actual.sha256}, the manifest says {expected.sha256}"
        )
    return state


def find_graph(
    manifest: Manifest,
    purpose: GraphPurpose.ValueType,
    precision: Precision.ValueType = Precision.PRECISION_FP32,
) -> Graph:
    """Return the graph that is there for `purpose` and computes in `precision`.

    Raises:
        BundleError: the bundle has no such graph, or several.
    """
    found = [graph for graph in manifest.graphs if (graph.purpose, graph.precision) == (purpose, precision)]
    if len(found) != 1:
        names = f"{GraphPurpose.Name(purpose)} graph in {Precision.Name(precision)}"
        number = "no" if not found else f"more than one ({', '.join(graph.path for graph in found)})"
        raise BundleError(f"the bundle of {manifest.model_name!r} has {number} {names}")
    return found[0]


def embedding_size(manifest: Manifest) -> int:
    """Return the width of an embedding, where a request does not say how many components to keep."""
    return manifest.pooling.truncate_dim or max_dimensions(manifest)


def max_dimensions(manifest: Manifest) -> int:
    """Return how many components an embedding may have: a token vector's, or the last dense layer's."""
    dense = manifest.pooling.dense
    return dense[-1].out_features if dense else manifest.architecture.hidden_size
