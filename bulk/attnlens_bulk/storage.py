"""Output directories on local file systems and in object stores. A file appears only when it is complete."""

import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from attnlens_bulk.errors import OutputError
from attnlens_bulk.files import MAX_JSON_BYTES, check_regular, is_storage_failure, open_file, read_whole

_BLOCK_BYTES = 1 << 20
# Files of this package in an output are never links, so a link is the work of someone else.
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK_FILE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Storage:
    """A directory for the files of a run."""

    def __init__(self, url: str, *, is_inner: bool = False) -> None:
        """Open a directory. It is created by the first file.

        Args:
            url: Path, or URL of fsspec.
            is_inner: Whether the directory is part of an output, so that it must not be a link.

        Raises:
            OutputError: The file system is unknown, or its package is not installed.
        """
        try:
            fs, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise OutputError(f"{url} cannot be opened: {error}") from error
        self._fs: Any = fs
        self._root = root.rstrip("/")
        self._is_inner = is_inner
        self.name = url.rstrip("/")

    @property
    def is_local(self) -> bool:
        """Whether the directory is on a local disk or a mounted file system."""
        return isinstance(self._fs, LocalFileSystem)

    def contains(self, fs: Any, path: str) -> bool:  # noqa: ANN401 - fsspec has no types
        """Return whether a file is inside the directory."""
        return type(fs) is type(self._fs) and path.startswith(f"{self._root}/")

    def names(self) -> set[str]:
        """Return the names of the files. Temporary files are hidden."""
        with self._failures_explained("listed"):
            self._fs.invalidate_cache()
            if not self._fs.isdir(self._root):
                return set()
            paths = self._fs.ls(self._root, detail=False)
            names = {path.rpartition("/")[2] for path in paths}
            return {name for name in names if not name.startswith(".")}

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, or None if it does not exist."""
        with self._failures_explained("read"):
            try:
                return read_whole(self._fs, f"{self._root}/{name}", MAX_JSON_BYTES)
            except FileNotFoundError:
                return None

    def digest(self, name: str) -> tuple[int, str]:
        """Return size and SHA-256 of a file."""
        digest, size_bytes = hashlib.sha256(), 0
        with self._failures_explained("read"), open_file(self._fs, f"{self._root}/{name}") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
                size_bytes += len(block)
        return size_bytes, digest.hexdigest()

    def commit(self, name: str, content: bytes | memoryview) -> None:
        """Write a file so that it is durable and complete, or does not exist.

        A local file is written under a temporary name, synchronized and renamed. Links are replaced, never
        followed. An object is uploaded with one request, or with a multipart upload that is completed at its
        end.

        Raises:
            OutputError: The file cannot be written.
        """
        with self._failures_explained("written"):
            if not self.is_local:
                self._fs.pipe_file(f"{self._root}/{name}", bytes(content))
                return
            directory = self._directory()
            # A fixed name, so that a repeated run replaces the file of an interrupted run.
            temporary = directory / f".{name}.partial"
            temporary.unlink(missing_ok=True)
            try:
                with os.fdopen(os.open(temporary, _NEW_FILE, 0o666), "wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(directory / name)
            except OSError:
                with suppress(OSError):
                    temporary.unlink()
                raise
            _synchronize(directory)

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Prevent other processes from using the same `name`. In object stores, do nothing.

        Raises:
            OutputError: Another process has the lock.
        """
        if not self.is_local:
            yield
            return
        with self._failures_explained("written"):
            path = self._directory() / f".{name}.lock"
            if path.is_symlink():
                raise OSError(errno.ELOOP, f"{path} is a link")
            file = os.fdopen(os.open(path, _LOCK_FILE, 0o666), "rb")
        with file:
            with self._failures_explained("written"):
                check_regular(os.fstat(file.fileno()).st_mode)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise OutputError(
                    f"another process writes {self.name}: wait for it, or use another directory"
                ) from error
            yield  # the file stays, because another process may have opened it already

    def _directory(self) -> Path:
        """Create the local directory."""
        directory = Path(self._root)
        if self._is_inner and directory.is_symlink():
            raise OSError(errno.ELOOP, f"{directory} is a link")
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    @contextmanager
    def _failures_explained(self, verb: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not is_storage_failure(self._fs, error):
                raise
            remedy = "check the directory"
            if getattr(error, "errno", None) in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
                remedy = "free some space"
            elif isinstance(error, PermissionError):
                remedy = "check its permissions"
            reason = getattr(error, "strerror", None) or str(error)
            raise OutputError(
                f"{self.name} cannot be {verb}: {reason}. {remedy.capitalize()} and repeat the command, "
                "which continues after the finished parts"
            ) from error


def _synchronize(directory: Path) -> None:
    """Make renamed files durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
