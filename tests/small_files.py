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


def write_pooling_files(directory: Path, width: int, mode: str = "mean") -> None:
    """Write the files of sentence-transformers that say how a checkpoint is pooled."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(kinds.items())
    ]
    write(directory / "modules.json", modules)
    write(directory / "1_Pooling" / "config.json", {"word_embedding_dimension": width, "pooling_mode": mode})


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
