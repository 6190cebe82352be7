"""Locates checkpoints: a local directory, or a download from the Hugging Face Hub."""

import re
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from attnlens_model.errors import CheckpointError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

# `*` also matches slashes: "*.json" includes 1_Pooling/config.json.
_DESCRIPTION_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "README.md", "LICENSE*")
_SAFETENSORS_FILES = ("model.safetensors", "model-*.safetensors")
_PICKLE_FILES = ("pytorch_model.bin", "pytorch_model-*.bin")
# Directories of the layers after pooling in sentence-transformers, such as "2_Dense".
_DENSE_DIRECTORIES = "[0-9]*_Dense"


_COMMIT = re.compile(r"[0-9a-f]{40}")


class Location(NamedTuple):
    """Location of a checkpoint."""

    directory: Path
    name: str
    """Public name: the hub id, or the last component of the directory's path."""
    commit: str
    """Commit of the hub repository. Empty if unknown, as for a local directory."""


def locate_checkpoint(source: str | Path, revision: str | None) -> Location:
    """Locate a checkpoint, downloading it from the Hub if necessary.

    Raises:
        CheckpointError: `source` is neither a directory nor on the Hub, or a revision is given for a
            directory.
    """
    path = Path(source)
    if path.is_dir():
        if revision is not None:
            raise CheckpointError(f"{source} is a local directory, which has no revisions: omit the revision")
        return Location(path, path.resolve().name, "")
    if path.exists():
        raise CheckpointError(f"{source} is a file: specify the directory that contains it")
    if isinstance(source, Path) or not _HUB_ID.fullmatch(source):
        raise CheckpointError(f"{source} does not exist: specify a directory or a hub id such as 'org/name'")
    directory = _download(source, revision)
    return Location(directory, source, _commit(directory) or "")


def _commit(directory: Path) -> str | None:
    """Return the commit after which a directory of the hub cache is named, or None."""
    return directory.name if _COMMIT.fullmatch(directory.name) else None


def _download(hub_id: str, revision: str | None) -> Path:
    try:
        # Pickles are a fallback, since many repositories have the same weights in both formats.
        files = [*_DESCRIPTION_FILES, *_SAFETENSORS_FILES, f"{_DENSE_DIRECTORIES}/model.safetensors"]
        directory = Path(snapshot_download(hub_id, revision=revision, allow_patterns=files))
        pickles = [] if any(directory.glob("model*.safetensors")) else [*_PICKLE_FILES]
        pickles += [
            f"{dense.name}/pytorch_model.bin"
            for dense in directory.glob(_DENSE_DIRECTORIES)
            if not (dense / "model.safetensors").exists()
        ]
        if pickles:
            # Use the same commit, in case the branch has moved.
            snapshot_download(hub_id, revision=_commit(directory) or revision, allow_patterns=pickles)
    # Most failures are OSErrors, but interrupted connections and proxy error pages raise exceptions of httpx
    # or json.
    except Exception as error:
        raise CheckpointError(_describe_failure(error, hub_id, revision)) from error
    return directory


def _describe_failure(error: Exception, hub_id: str, revision: str | None) -> str:
    """Return an error message with one remedy, instead of the library's message."""
    where = "" if revision is None else f" at revision {revision!r}"
    if isinstance(error, GatedRepoError):
        problem, remedy = (
            f"access to {hub_id} is restricted",
            "accept the terms on its model page, and set HF_TOKEN",
        )
    elif isinstance(error, RepositoryNotFoundError):
        problem = f"the Hugging Face Hub has no public model {hub_id}, and there is no such directory"
        remedy = "check the spelling, or set HF_TOKEN for a private model"
    elif isinstance(error, RevisionNotFoundError):
        problem, remedy = (
            f"{hub_id} has no revision {revision!r}",
            "specify an existing branch, tag or commit",
        )
    elif isinstance(error, HFValidationError):
        problem, remedy = f"{hub_id!r} is neither a directory nor a valid hub id", "check the spelling"
    elif isinstance(error, (LocalEntryNotFoundError, OfflineModeIsEnabled, OSError)):
        problem = (
            f"there is no directory {hub_id}, and the model {hub_id}{where} is neither in the cache of the "
            f"Hugging Face Hub nor could it be downloaded ({_cause(error)})"
        )
        remedy = "check the network connection"
    else:
        problem = f"the Hugging Face Hub did not provide {hub_id}{where} ({_cause(error)})"
        remedy = "try again later, or specify a directory"
    return f"{problem}: {remedy}"


def _cause(error: BaseException) -> str:
    """Return the type name of the root cause."""
    while error.__cause__ is not None or error.__context__ is not None:
        error = error.__cause__ or error.__context__ or error
    return type(error).__name__
