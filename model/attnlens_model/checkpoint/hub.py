"""Where a checkpoint lies: a directory that the user named, or one that the Hugging Face Hub provides."""

import re
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import snapshot_download

from attnlens_model.errors import CheckpointError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

# `*` also crosses slashes: "*.json" brings 1_Pooling/config.json.
_DESCRIPTION_FILES = ("*.json", "*.txt", "*.model", "README.md", "LICENSE*")
_SAFETENSORS_FILES = ("model.safetensors", "model-*.safetensors")
_PICKLE_FILES = ("pytorch_model.bin", "pytorch_model-*.bin")
# Where sentence-transformers keeps the layers that follow the pooling: "2_Dense" and the like.
_DENSE_DIRECTORIES = "[0-9]*_Dense"


_COMMIT = re.compile(r"[0-9a-f]{40}")


class Location(NamedTuple):
    """Where a checkpoint lies."""

    directory: Path
    name: str
    """How to call it in public: the hub id, or the last part of the directory's path."""
    commit: str
    """Of the hub's repository; empty where it is not known, as for a directory."""


def locate_checkpoint(source: str | Path, revision: str | None) -> Location:
    """Find a checkpoint, fetching it from the Hub if necessary.

    Raises:
        CheckpointError: neither a directory nor on the Hub, or a revision of a directory.
    """
    path = Path(source)
    if path.is_dir():
        if revision is not None:
            raise CheckpointError(f"{source} is a directory here: a revision is for a hub id, leave it out")
        return Location(path, path.resolve().name, "")
    if path.exists():
        raise CheckpointError(f"{source} is a file: give the directory that holds it")
    if isinstance(source, Path) or not _HUB_ID.fullmatch(source):
        raise CheckpointError(f"{source} does not exist: give a directory or a hub id such as 'org/name'")
    directory = _download(source, revision)
    return Location(directory, source, _commit(directory) or "")


def _commit(directory: Path) -> str | None:
    """Return the commit that a directory of the Hub's cache is named after."""
    return directory.name if _COMMIT.fullmatch(directory.name) else None


def _download(hub_id: str, revision: str | None) -> Path:
    try:
        # Pickles only where there is nothing better: many repositories hold the same weights in both formats.
        files = [*_DESCRIPTION_FILES, *_SAFETENSORS_FILES, f"{_DENSE_DIRECTORIES}/model.safetensors"]
        directory = Path(snapshot_download(hub_id, revision=revision, allow_patterns=files))
        pickles = [] if any(directory.glob("model*.safetensors")) else [*_PICKLE_FILES]
        pickles += [
            f"{dense.name}/pytorch_model.bin"
            for dense in directory.glob(_DENSE_DIRECTORIES)
            if not (dense / "model.safetensors").exists()
        ]
        if pickles:
            # Of the same commit, wherever the branch is by now.
            snapshot_download(hub_id, revision=_commit(directory) or revision, allow_patterns=pickles)
    # A foreign protocol: most failures are OSErrors, but a connection that breaks off or a proxy that answers
    # with a page of its own comes out as an exception of httpx or json.
    except Exception as error:
        where = "" if revision is None else f" at revision {revision!r}"
        raise CheckpointError(
            f"no directory {hub_id!r} here, and the Hugging Face Hub did not provide it{where}: {error}. "
            "Check the spelling, the network and HF_TOKEN, or give a directory"
        ) from error
    return directory
