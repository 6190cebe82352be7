"""Reading, writing and re-signing small files of checkpoints and bundles."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from attnlens.bundle import describe_file, read_manifest, write_manifest
from attnlens_export import GraphError
from attnlens_export.contents import bundle_files
from attnlens_export.graph.read import external_files


def write(path: Path, content: object) -> None:
    """Write JSON and create the directory if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write_pooling_files(directory: Path, width: int, mode: str = "mean") -> None:
    """Write the sentence-transformers files that configure pooling."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(kinds.items())
    ]
    write(directory / "modules.json", modules)
    write(directory / "1_Pooling" / "config.json", {"word_embedding_dimension": width, "pooling_mode": mode})


def sign(directory: Path) -> None:
    """Update the manifest to match the files, as an attacker who alters a bundle would."""
    manifest = read_manifest(directory)
    for graph in manifest.graphs:
        with suppress(GraphError):  # the file is not a valid graph anymore
            others = external_files(directory / graph.path)
            graph.data_files[:] = [path.relative_to(directory).as_posix() for path in others]
    del manifest.files[:]
    manifest.files.extend(describe_file(directory, path) for path in bundle_files(directory))
    write_manifest(directory, manifest)
