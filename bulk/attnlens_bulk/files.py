"""Input files: search, formats, fingerprints, and the function that opens local files."""

import errno
import hashlib
import json
import os
import posixpath
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
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
MAX_JSON_BYTES = 256 << 20
"""Maximum size of a JSON file that is read as a whole: `run.json`, and those of `datasets`."""

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
        return open_file(self.fs, self.path)

    def arrow_file(self) -> Any:  # noqa: ANN401 - pyarrow has no types
        """Open the file for pyarrow, which maps local files into memory."""
        if self.is_local:
            open_file(self.fs, self.path).close()  # pyarrow would wait for a named pipe
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
                digest.update(file.read(FULL_HASH_BYTES + 1))
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
        InputError: An input has no files, is not a regular file, or is given twice.
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


def open_file(fs: Any, path: str, *, follow_links: bool = True) -> IO[bytes]:  # noqa: ANN401 - no types
    """Open a file for reading. All files of inputs and outputs are opened here.

    Args:
        fs: File system of fsspec.
        path: Path in the file system.
        follow_links: Whether a local path may be a symbolic link.

    Raises:
        OSError: The file cannot be opened, or is not a regular file. Opening a named pipe does not wait.
    """
    if not isinstance(fs, LocalFileSystem):
        return fs.open(path, "rb")  # type: ignore[no-any-return]
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    check_regular(Path(path).stat().st_mode)  # opening a device may have effects
    descriptor = os.open(path, flags)
    try:
        check_regular(os.fstat(descriptor).st_mode)
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def check_regular(mode: int) -> None:
    """Raise OSError unless a file with this mode is regular."""
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "directory", stat.S_IFIFO: "named pipe", stat.S_IFSOCK: "socket"}
        kind = kinds.get(stat.S_IFMT(mode), "device")
        raise OSError(errno.EINVAL, f"a {kind} is not a regular file")


def read_whole(fs: Any, path: str, max_bytes: int) -> bytes:  # noqa: ANN401 - fsspec has no types
    """Return the content of a file.

    Raises:
        OSError: The file cannot be opened, is not a regular file, or has more than `max_bytes` bytes.
    """
    if isinstance(fs, LocalFileSystem):
        with open_file(fs, path) as file:
            content = file.read(max_bytes + 1)
        size_bytes = len(content)
    elif (size_bytes := fs.info(path).get("size") or 0) <= max_bytes:
        content = fs.cat_file(path)
    if size_bytes > max_bytes:
        raise OSError(errno.EOVERFLOW, f"it has more than {max_bytes} bytes")
    return content


def join_below(root: str, name: str) -> str:
    """Return the path of a file in a directory, whose name comes from a file.

    Raises:
        ValueError: The path is not below the directory.
    """
    parts = name.split("/")
    if not name or ".." in parts or posixpath.isabs(name) or "\0" in name or "\\" in name:
        raise ValueError(f"{name!r} is not a path below {root}")
    return f"{root}/{name}"


@contextmanager
def _failures_explained(fs: Any, name: str) -> Iterator[None]:  # noqa: ANN401 - fsspec has no types
    try:
        yield
    except Exception as error:
        if not isinstance(error, ValueError) and not is_storage_failure(fs, error):
            raise
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise InputError(f"{name} cannot be read: {reason}") from error


def is_storage_failure(fs: Any, error: BaseException | None) -> bool:  # noqa: ANN401 - fsspec has no types
    """Return whether a file system caused an error. Object stores raise exceptions of their own classes."""
    if isinstance(error, BulkError) or not isinstance(error, Exception):
        return False
    return isinstance(error, OSError) or not isinstance(fs, LocalFileSystem)


def format_of(path: str) -> InputFormat:
    """Return the format of a file according to its suffix.

    Files that end in `.json` are JSON lines. In directories they are omitted, since they often describe data.
    """
    suffix = suffix_of(path)
    return "jsonl" if suffix == ".json" else SUFFIXES.get(suffix, "lines")


def is_compressed(path: str) -> bool:
    """Return whether the suffix is that of a compressed file."""
    return path.lower().endswith(_COMPRESSED)


def suffix_of(path: str) -> str:
    """Return the suffix of a file in lowercase, without that of its compression."""
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
        paths = [path for path in sorted(fs.glob(root)) if not fs.isdir(path)]
        if not paths:
            raise InputError(f"no file matches {given}: correct the pattern")
    elif isinstance(fs, LocalFileSystem) and os.path.exists(root):  # noqa: PTH110 - as returned by fsspec
        paths = [root]  # not a regular file
    else:
        raise InputError(f"there is no file or directory {given}: correct the name")
    yield from paths


def _is_data(path: str, root: str) -> bool:
    inner = path.removeprefix(root).strip("/").split("/")
    return not any(part.startswith((".", "_")) for part in inner) and suffix_of(path) in SUFFIXES


def _dataset_paths(fs: Any, root: str) -> list[str]:  # noqa: ANN401 - fsspec has no types
    """Return the files of a directory that `datasets.Dataset.save_to_disk` has written, else none."""
    if fs.exists(f"{root}/dataset_dict.json"):
        splits = _json_member(fs, f"{root}/dataset_dict.json", "splits", str)
        raise InputError(f"{root} contains several splits: give one or more of {root}/{{{','.join(splits)}}}")
    if not fs.exists(f"{root}/state.json"):
        return []
    if _json_member(fs, f"{root}/state.json", "_indices_data_files", dict):
        raise InputError(
            f"{root} has an index of selected rows: call flatten_indices() before save_to_disk()"
        )
    entries = _json_member(fs, f"{root}/state.json", "_data_files", dict)
    names = [entry.get("filename") for entry in entries]
    if not all(isinstance(name, str) for name in names):
        raise InputError(f"{root}/state.json is damaged: a file has no name. Save the data set again")
    return [join_below(root, name) for name in names]


def _json_member(fs: Any, path: str, name: str, kind: type) -> list[Any]:  # noqa: ANN401 - no types
    """Return a member of a JSON object, which is a list of elements of this type, or null or absent."""
    try:
        content = json.loads(read_whole(fs, path, MAX_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}. Save the data set again") from error
    members = content.get(name) if isinstance(content, dict) else ()
    if members is None:
        return []
    if not isinstance(members, list) or not all(isinstance(member, kind) for member in members):
        raise InputError(f"{path} is damaged: {name!r} is not a list as in a data set. Save it again")
    return members


def _input_file(fs: Any, path: str, input_format: InputFormat) -> InputFile:  # noqa: ANN401 - no types
    if input_format not in get_args(InputFormat):
        raise ValueError(f"input format {input_format!r}: use one of {', '.join(get_args(InputFormat))}")
    info = fs.info(path)
    size_bytes = info.get("size")
    if isinstance(fs, LocalFileSystem):
        try:
            check_regular(Path(path).stat().st_mode)
        except OSError as error:
            raise InputError(
                f"{path} cannot be read: {error.strerror}. Use a file, since a run reads its inputs again"
            ) from error
    elif not isinstance(size_bytes, int):
        raise InputError(
            f"{fs.unstrip_protocol(path)} has no known size, since the server sends none: download the file "
            "and use the copy"
        )
    return InputFile(fs=fs, path=path, format=input_format, size_bytes=size_bytes, modified=_modified(info))


def _modified(info: dict[str, Any]) -> str:
    for key in ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "created"):
        value = info.get(key)
        if isinstance(value, datetime):
            return value.isoformat()
        if value:
            return str(value)
    return ""
