"""Stages a checkpoint: checks its files and collects them in a temporary directory, without its code.

A checkpoint is untrusted input. Only staged files are opened, by this package and by the libraries that own
their formats, so no file can block, exhaust the memory, or lead to another part of the file system.
"""

import itertools
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from attnlens_model.checkpoint.hub import locate_checkpoint
from attnlens_model.errors import CheckpointError

MIB = 2**20
MAX_ENTRIES = 10_000
MAX_COPIED_BYTES = 512 * MIB
# Files that are linked. They are mapped into memory, so their size is not limited.
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
# Files that are copied, with their maximum size. The first matching pattern applies. Python needs up to 24
# bytes of memory for a byte of JSON; the largest known tokenizers have 34 MB.
_COPIED = {
    "tokenizer.json": 64 * MIB,
    "vocab.json": 64 * MIB,
    "*.json": 16 * MIB,
    "*.txt": 64 * MIB,
    "*.model": 64 * MIB,
    "*.jinja": MIB,
    "*.codes": 16 * MIB,
    "*.tiktoken": 64 * MIB,
    "artifact.metadata": MIB,
    "README.md": 16 * MIB,
    "LICENSE*": MIB,
}
# Files without which the checkpoint means something else. Others that can't be staged are left out: logs and
# data next to a checkpoint may have any size.
_REQUIRED = (
    *("config.json", "adapter_config.json", "modules.json", "*sentence*config*.json", "*.index.json"),
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model"),
    *("chat_template.*", "README.md", "LICENSE*", "model*.safetensors", "pytorch_model*.bin"),
)
# Names of classes in JSON files, and packages whose classes are not the publisher's code.
_CLASS_KEYS = ("activation_function", "activation_fn", "sbert_ce_default_activation_function")
_LIBRARIES = ("sentence_transformers.", "torch.nn.")


class CodeHook(NamedTuple):
    """A setting that makes a library load the publisher's code, which is never staged."""

    file: str
    """Path of the JSON file, relative to the checkpoint."""
    key: str
    """Key in the file, such as "auto_map" or "type"."""
    value: str
    """Name of the class. Empty for `auto_map`."""


class StagedCheckpoint(NamedTuple):
    """A checkpoint whose files have been checked."""

    directory: Path
    """Directory with the checked files: copies, and links to weights."""
    origin: Path
    """Directory from which they were staged."""
    name: str
    """Public name: the hub id, or the last component of the directory's path."""
    commit: str
    """Commit of the hub repository. Empty if unknown, as for a local directory."""
    code: tuple[CodeHook, ...]
    """Settings that refer to the publisher's code."""


@contextmanager
def open_checkpoint(source: str | Path, revision: str | None = None) -> Iterator[StagedCheckpoint]:
    """Locate a checkpoint, download it if necessary, and stage it until the context ends.

    Args:
        source: A directory, or a hub id such as "sentence-transformers/all-MiniLM-L6-v2".
        revision: Branch, tag or commit on the Hub. Defaults to the default branch.

    Raises:
        CheckpointError: The checkpoint does not exist, or see `stage_checkpoint`. Exceptions of the body are
            propagated; paths in their messages refer to the original directory.
    """
    location = locate_checkpoint(source, revision)
    with tempfile.TemporaryDirectory(prefix="attnlens-") as temporary:
        staged = Path(temporary, "checkpoint")
        code = stage_checkpoint(location.directory, staged)
        try:
            yield StagedCheckpoint(staged, location.directory, location.name, location.commit, code)
        except Exception as error:
            error.args = tuple(
                text.replace(str(staged), str(location.directory)) if isinstance(text, str) else text
                for text in error.args
            )
            raise


def stage_checkpoint(directory: Path, target: Path) -> tuple[CodeHook, ...]:
    """Collect the files of a checkpoint that may be read in a new directory.

    These are the files of the root directory and of the directories in `modules.json`. Descriptions,
    tokenizers and licenses are copied, and weights are linked. Python files are left out.

    Args:
        directory: Checkpoint directory. In a snapshot of the Hugging Face cache, files may be links to the
            blobs of the same repository. Other links must not leave the directory.
        target: Directory to create.

    Returns:
        The settings that refer to the publisher's code.

    Raises:
        CheckpointError: A required file is not a regular file, is too large or is outside of `directory`; a
            JSON file names a path outside of its directory; or there are too many files.
    """
    stage = _Stage(directory)
    stage.add(directory, target)
    code = list(_find_code(target, ""))
    for path in dict.fromkeys(_module_paths(directory, target)):
        stage.add(directory / path, target / path)
        code += _find_code(target / path, f"{path}/")
    return tuple(code)


class _Stage:
    """Adds files to a staged checkpoint, up to a total size.

    Args:
        directory: Checkpoint directory.
    """

    def __init__(self, directory: Path) -> None:
        root = directory.resolve()
        is_snapshot = root.parent.name == "snapshots"
        self._directory = directory
        self._roots = (root, root.parent.parent / "blobs") if is_snapshot else (root,)
        self._num_bytes = 0

    def add(self, source: Path, target: Path) -> None:
        """Add the files of a directory.

        Raises:
            CheckpointError: See `stage_checkpoint`.
        """
        if not source.is_dir():
            return
        target.mkdir(parents=True, exist_ok=True)
        with os.scandir(source) as entries:
            names = [entry.name for entry in itertools.islice(entries, MAX_ENTRIES + 1)]
        if len(names) > MAX_ENTRIES:
            raise CheckpointError(
                f"{source} contains more than {MAX_ENTRIES} files: specify the directory of one model"
            )
        required = {name for name in names if any(fnmatch(name, pattern) for pattern in _REQUIRED)}
        for name in sorted(names, key=lambda name: name not in required):
            try:
                self._add_file(source / name, target / name)
            except CheckpointError:
                if name in required:
                    raise

    def _add_file(self, path: Path, target: Path) -> None:
        is_weights = any(fnmatch(path.name, pattern) for pattern in _WEIGHTS)
        limit = next((size for pattern, size in _COPIED.items() if fnmatch(path.name, pattern)), None)
        if not is_weights and limit is None:
            return
        try:
            resolved = path.resolve(strict=True)
            mode = resolved.lstat().st_mode
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{path} is a broken link: replace it with a copy of the file") from error
        if stat.S_ISDIR(mode):
            return
        if not stat.S_ISREG(mode):
            raise CheckpointError(f"{path} is not a regular file: replace it with a copy of the file")
        if not any(resolved.is_relative_to(root) for root in self._roots):
            raise CheckpointError(
                f"{path} is a link to {resolved}, outside of the checkpoint: replace it with a copy of "
                "the file"
            )
        if limit is None:
            target.symlink_to(resolved)
        else:
            target.write_bytes(self._read(path, resolved, limit))

    def _read(self, path: Path, resolved: Path, limit: int) -> bytes:
        """Return the content of a file. Opening does not block if it was replaced by a pipe."""
        try:
            descriptor = os.open(resolved, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor
                content = file.read(limit + 1)
        except OSError as error:
            raise CheckpointError(f"{path} can't be read: {error.strerror}") from error
        if len(content) > limit:
            raise CheckpointError(
                f"{path} is larger than {limit // MIB} MiB, the limit of this kind of file: shorten it"
            )
        if self._num_bytes + len(content) > MAX_COPIED_BYTES:
            raise CheckpointError(
                f"the files in {self._directory}, without weights, are larger than "
                f"{MAX_COPIED_BYTES // MIB} MiB: remove files that do not belong to the model"
            )
        self._num_bytes += len(content)
        return content


def _module_paths(directory: Path, staged: Path) -> Iterator[str]:
    """Yield the directories of modules, and check all paths in the JSON files of the root.

    Raises:
        CheckpointError: A path leaves the checkpoint.
    """
    modules = _load(staged / "modules.json")
    for module in modules if isinstance(modules, list) else ():
        path = module.get("path") if isinstance(module, dict) else None
        if isinstance(path, str) and Path(path) != Path():
            if not _is_inside(directory, path):
                raise CheckpointError(
                    f"{directory / 'modules.json'} names the path {path!r}, which is not inside the "
                    "checkpoint: correct it"
                )
            yield Path(path).as_posix()
    for index in staged.glob("*.index.json"):
        content = _load(index)
        shards = content.get("weight_map") if isinstance(content, dict) else None
        for shard in set(map(str, shards.values())) if isinstance(shards, dict) else ():
            _check_plain(directory / index.name, "shard", shard)
    settings = _load(staged / "tokenizer_config.json")
    names = settings.get("fast_tokenizer_files") if isinstance(settings, dict) else None
    for name in names if isinstance(names, list) else ():
        _check_plain(directory / "tokenizer_config.json", "tokenizer", str(name))


def _is_inside(directory: Path, path: str) -> bool:
    try:
        (directory / path).lstat()
    except FileNotFoundError:
        pass  # its reader reports that
    except (OSError, ValueError):  # too long, or not a path
        return False
    return not Path(path).is_absolute() and ".." not in Path(path).parts


def _check_plain(file: Path, kind: str, name: str) -> None:
    # Paths could refer to files outside of the checkpoint.
    if Path(name).name != name:
        raise CheckpointError(f"{file} names the {kind} {name!r}: it must be a plain file name")


def _find_code(directory: Path, prefix: str) -> Iterator[CodeHook]:
    """Yield the settings in the staged JSON files of a directory that refer to the publisher's code."""
    for path in sorted(directory.glob("*.json")):
        if path.name in ("tokenizer.json", "vocab.json"):
            continue
        content = _load(path)
        if path.name == "modules.json" and isinstance(content, list):
            kinds = (module.get("type") for module in content if isinstance(module, dict))
            yield from (
                CodeHook(prefix + path.name, "type", kind) for kind in map(str, kinds) if _is_foreign(kind)
            )
        yield from (CodeHook(prefix + path.name, key, value) for key, value in _hooks(content))


def _hooks(content: Any) -> Iterator[tuple[str, str]]:  # noqa: ANN401 - any JSON value
    values = [content]
    while values:
        value = values.pop()
        if isinstance(value, list):
            values += value
        elif isinstance(value, dict):
            values += value.values()
            if value.get("auto_map"):
                yield "auto_map", ""
            for key in _CLASS_KEYS:
                name = value.get(key)
                if isinstance(name, str) and _is_foreign(name):
                    yield key, name


def _is_foreign(name: str) -> bool:
    """Return whether a class name is qualified, and by another package than those that are trusted."""
    return "." in name and not name.startswith(_LIBRARIES)


def _load(path: Path) -> Any:  # noqa: ANN401 - any JSON value
    """Return the content of a staged JSON file, or None if it is unreadable; its reader reports that."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
