"""Input files: search, formats and fingerprints."""

import hashlib
import json
import posixpath
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import IO, Any, Literal, TypeAlias, get_args

import fsspec
import pyarrow.fs as pa_fs
from fsspec.implementations.local import LocalFileSystem

from attnlens_bulk.errors import BulkError, InputError

InputFormat: TypeAlias = Literal["lines", "jsonl", "csv", "tsv", "parquet", "arrow"]

SUFFIXES: dict[str, InputFormat] = {
    ".txt": "lines",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".arrows": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
FULL_HASH_BYTES = 4 << 20
"""Files up to this size are hashed completely."""
END_HASH_BYTES = 1 << 20
"""Size of the head and of the tail of a larger file that are hashed."""

_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_GLOB = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """An input file.

    Attributes:
        fs: File system of fsspec.
        path: Path in the file system. Absolute for local files.
        format: Format.
        size_bytes: Size, compressed if the file is.
        modified: Time of the last change or its equivalent on the file system, such as an ETag.
    """

    fs: Any
    path: str
    format: InputFormat
    size_bytes: int
    modified: str

    @property
    def name(self) -> str:
        """Path or URL."""
        return self.path if self.is_local else str(self.fs.unstrip_protocol(self.path))

    @property
    def is_local(self) -> bool:
        """Whether the file is on a local disk or a mounted file system."""
        return isinstance(self.fs, LocalFileSystem)

    def open(self) -> IO[bytes]:
        """Open the file. Its content may be compressed."""
        return self.fs.open(self.path, "rb")  # type: ignore[no-any-return]

    def arrow_file(self) -> Any:  # noqa: ANN401 - pyarrow has no types
        """Open the file for pyarrow, which maps local files into memory."""
        if self.is_local:
            return pa_fs.LocalFileSystem(use_mmap=True).open_input_file(self.path)
        return self.open()

    def fingerprint(self) -> dict[str, Any]:
        """Return the entry in `run.json`: size, time of the last change, and a hash of the content.

        A file of more than FULL_HASH_BYTES is hashed in part: its head and its tail.
        """
        is_complete = self.size_bytes <= FULL_HASH_BYTES
        digest = hashlib.sha256()
        with _failures_explained(self.fs, self.name), self.open() as file:
            if is_complete:
                digest.update(file.read())
            else:
                digest.update(file.read(END_HASH_BYTES))
                file.seek(self.size_bytes - END_HASH_BYTES)
                digest.update(file.read(END_HASH_BYTES))
        return {
            "file": self.name,
            "format": self.format,
            "size_bytes": self.size_bytes,
            "modified": self.modified,
            "sha256": digest.hexdigest(),
            "sha256_of": "content" if is_complete else f"first and last {END_HASH_BYTES} bytes",
        }

    def check_unchanged(self) -> None:
        """Raise InputError if the file was changed since the run has started."""
        with _failures_explained(self.fs, self.name):
            now = _input_file(self.fs, self.path, self.format)
        if (now.size_bytes, now.modified) != (self.size_bytes, self.modified):
            raise InputError(f"{self.name} was changed while it was read: start a new run")


def find_files(inputs: Sequence[str], input_format: InputFormat | None = None) -> list[InputFile]:
    """Return the files of all inputs: paths or URLs of files, directories and patterns.

    The files of a directory or pattern are in the order of their names. Hidden files, and files whose names
    begin with `_` or have an unknown suffix, are omitted from directories. A directory that `datasets` has
    written consists of the files in its `state.json`.

    Args:
        inputs: Paths, URLs of fsspec, or patterns such as `data/*.parquet`.
        input_format: Format of all files. If None, it follows from the suffix, and is "lines" if unknown.

    Raises:
        InputError: An input has no files, or a file is given twice.
    """
    files: dict[str, InputFile] = {}
    for given in inputs:
        try:
            fs, root = fsspec.core.url_to_fs(given)
        except (OSError, ImportError, ValueError) as error:
            raise InputError(f"{given} cannot be read: {error}") from error
        with _failures_explained(fs, given):
            found = [
                _input_file(fs, path, input_format or format_of(path)) for path in _paths(fs, root, given)
            ]
        for file in found:
            if file.name in files:
                raise InputError(f"{file.name} is given twice: omit one")
            files[file.name] = file
    return list(files.values())


@contextmanager
def _failures_explained(fs: Any, name: str) -> Iterator[None]:  # noqa: ANN401 - fsspec has no types
    try:
        yield
    except Exception as error:
        if not isinstance(error, ValueError) and not is_storage_failure(fs, error):
            raise
        raise InputError(f"{name} cannot be read: {error}") from error


def is_storage_failure(fs: Any, error: BaseException | None) -> bool:  # noqa: ANN401 - fsspec has no types
    """Return whether a file system caused an error. Object stores raise exceptions of their own classes."""
    if isinstance(error, BulkError) or not isinstance(error, Exception):
        return False
    return isinstance(error, OSError) or not isinstance(fs, LocalFileSystem)


def format_of(path: str) -> InputFormat:
    """Return the format of a file according to its suffix."""
    return SUFFIXES.get(_suffix(path), "lines")


def is_compressed(path: str) -> bool:
    """Return whether the suffix is that of a compressed file."""
    return path.lower().endswith(_COMPRESSED)


def _suffix(path: str) -> str:
    name = posixpath.basename(path).lower()
    for suffix in _COMPRESSED:
        name = name.removesuffix(suffix)
    return posixpath.splitext(name)[1]


def _paths(fs: Any, root: str, given: str) -> Iterator[str]:  # noqa: ANN401 - fsspec has no types
    if fs.isfile(root):
        yield root
        return
    if fs.isdir(root):
        paths = _dataset_paths(fs, root) or [path for path in sorted(fs.find(root)) if _is_data(path, root)]
        if not paths:
            known = ", ".join(SUFFIXES)
            raise InputError(f"{given} contains no files that end in {known}: give files or a pattern")
    elif _GLOB.search(root):
        paths = [path for path in sorted(fs.glob(root)) if fs.isfile(path)]
        if not paths:
            raise InputError(f"no file matches {given}: correct the pattern")
    else:
        raise InputError(f"there is no file or directory {given}: correct the name")
    yield from paths


def _is_data(path: str, root: str) -> bool:
    inner = path.removeprefix(root).strip("/").split("/")
    return not any(part.startswith((".", "_")) for part in inner) and _suffix(path) in SUFFIXES


def _dataset_paths(fs: Any, root: str) -> list[str]:  # noqa: ANN401 - fsspec has no types
    """Return the files of a directory that `datasets.Dataset.save_to_disk` has written, else none."""
    if fs.exists(f"{root}/dataset_dict.json"):
        splits = json.loads(fs.cat_file(f"{root}/dataset_dict.json"))["splits"]
        raise InputError(f"{root} contains several splits: give one or more of {root}/{{{','.join(splits)}}}")
    if not fs.exists(f"{root}/state.json"):
        return []
    state = json.loads(fs.cat_file(f"{root}/state.json"))
    if state.get("_indices_data_files"):
        raise InputError(
            f"{root} has an index of selected rows: call flatten_indices() before save_to_disk()"
        )
    return [f"{root}/{entry['filename']}" for entry in state["_data_files"]]


def _input_file(fs: Any, path: str, input_format: InputFormat) -> InputFile:  # noqa: ANN401 - no types
    if input_format not in get_args(InputFormat):
        raise ValueError(f"input format {input_format!r}: use one of {', '.join(get_args(InputFormat))}")
    info = fs.info(path)
    return InputFile(fs=fs, path=path, format=input_format, size_bytes=info["size"], modified=_modified(info))


def _modified(info: dict[str, Any]) -> str:
    for key in ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "created"):
        value = info.get(key)
        if isinstance(value, datetime):
            return value.isoformat()
        if value:
            return str(value)
    return ""
