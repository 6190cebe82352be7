"""The small files of checkpoints and bundles: written, read, and signed again after a change."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from attnlens.bundle import describe_file, read_manifest, write_manifest
from attnlens_export import GraphError
from attnlens_export.contents import bundle_files
from attnlens_export.graph.read import external_files


def write(path: Path, content: object) -> None:
    """Write JSON, making the directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def sign(directory: Path) -> None:
    """Make the manifest list the files that are there, as whoever alters a bundle on purpose would."""
    manifest = read_manifest(directory)
    for graph in manifest.graphs:
        with suppress(GraphError):  # the file is no graph any more
            others = external_files(directory / graph.path)
            graph.data_files[:] = [path.relative_to(directory).as_posix() for path in others]
    del manifest.files[:]
    manifest.files.extend(describe_file(directory, path) for path in bundle_files(directory))
    write_manifest(directory, manifest)
