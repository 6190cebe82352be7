"""The cache: a directory of bundles that were exported from checkpoints when a command needed them.

NAME/         the bundle, as any other
.NAME.json    what it was exported from; a record counts only for the bundle whose manifest it names
.NAME.lock    held by the process that exports it
"""

import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from attnlens.bundle import MANIFEST_NAME, BundleError, read_manifest, verify_files
from attnlens_cli.files.new_file import replacing
from attnlens_cli.sources.source import Checkpoint

# What an export may read of a directory: there, and in its modules, such as 1_Pooling.
_READ = {".bin", ".json", ".md", ".model", ".safetensors", ".txt"}
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")
_MOST_LETTERS = 80
_PARTIAL = r"\.{name}\.[0-9a-f]{{8}}\.(partial|replaced)"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a cached bundle must have been exported from.

    Attributes:
        source: the hub id, or the absolute path of the directory.
        revision: as it was asked for.
        files_sha256: of the files of a directory; empty for a checkpoint on the hub.
        precision: the one that was asked for.
        attnlens: the version that exports.
    """

    source: str
    revision: str | None
    files_sha256: str
    precision: str
    attnlens: str


def default_directory() -> Path:
    """Return `$XDG_CACHE_HOME/attnlens`, or `~/.cache/attnlens`."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (given if given.is_absolute() else Path.home() / ".cache") / "attnlens"
    except RuntimeError as error:
        raise click.UsageError(f"there is no place for a cache ({error}): give --cache-dir DIR") from error


def wanted(checkpoint: Checkpoint, precision: str) -> Wanted:
    """Return what the bundle of a checkpoint must have been exported from. Reads all files of a directory.

    Raises:
        click.ClickException: one of them is not a regular file.
    """
    directory = checkpoint.directory
    return Wanted(
        source=checkpoint.name if directory is None else str(directory.resolve()),
        revision=checkpoint.revision,
        files_sha256="" if directory is None else _hash_of_files(directory),
        precision=precision,
        attnlens=importlib.metadata.version("attnlens"),
    )


def _hash_of_files(directory: Path) -> str:
    """Return a SHA-256 of names and contents of what an export may read."""
    paths = [
        path for place in (directory, *_modules(directory)) if place.is_dir() for path in place.iterdir()
    ]
    total = hashlib.sha256()
    for path in sorted(set(paths)):
        is_read = path.suffix in _READ or path.name.startswith("LICENSE")
        if is_read and not path.name.startswith(".") and _is_regular(path):
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            total.update(f"{digest} {os.fsencode(path.relative_to(directory))!r}\n".encode())
    return total.hexdigest()


def _is_regular(path: Path) -> bool:
    """Return whether there is a regular file.

    Raises:
        click.ClickException: there is a pipe, socket or device. Reading a pipe would never end.
    """
    if not path.exists() or path.is_dir():
        return False
    if not path.is_file():
        raise click.ClickException(f"{path} is not a regular file: replace it with a copy of the file")
    return True


def _modules(directory: Path) -> list[Path]:
    """Return the directories of modules, those inside the checkpoint alone. The export refuses a bad file."""
    file = directory / "modules.json"
    try:
        modules = json.loads(file.read_bytes()) if _is_regular(file) else []
        paths = [Path(module["path"]) for module in modules]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return []
    return [directory / path for path in paths if not path.is_absolute() and ".." not in path.parts]


@dataclass(frozen=True, slots=True)
class Entry:
    """A place in the cache.

    Attributes:
        directory: of the bundle.
        wanted: what that must have been exported from.
    """

    directory: Path
    wanted: Wanted

    @property
    def _record(self) -> Path:
        return self.directory.with_name(f".{self.directory.name}.json")

    def reason_to_export(self) -> str:
        """Return why the bundle that is there can't be used; empty: it can, all its hashes were compared."""
        if not self.directory.exists():
            return "it is not in the cache yet"
        recorded = self._read_record()
        if recorded is None:
            return f"nothing says what {self.directory} was exported from"
        stated, version = recorded
        return self._difference(stated) or self._damage(version)

    def _read_record(self) -> tuple[Wanted, str] | None:
        """Return what the bundle was exported from and the hash of its manifest. None: no valid record."""
        if not self._record.is_file():
            return None
        try:
            record = json.loads(self._record.read_bytes())
            stated, version = Wanted(**record["exported_from"]), record["manifest_sha256"]
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None
        return stated, version

    def _difference(self, stated: Wanted) -> str:
        if stated.files_sha256 != self.wanted.files_sha256:
            return "the files of the checkpoint have changed since it was exported"
        if stated.attnlens != self.wanted.attnlens:
            return f"attnlens {stated.attnlens} exported it, this is {self.wanted.attnlens}"
        return "" if stated == self.wanted else f"{self.directory} was exported from something else"

    def _damage(self, version: str) -> str:
        try:
            manifest = read_manifest(self.directory)
            if _hash_of_manifest(self.directory) != version:
                return f"{self.directory} was replaced since it was exported"
            verify_files(self.directory, manifest)
        except BundleError as error:
            return str(error)
        return "" if manifest.parity.passed else f"{self.directory} failed parity"

    def clear(self) -> Path | None:
        """Make way for an export: only what the cache wrote itself is deleted.

        Leftovers of an export that was killed are deleted, and so is a recorded bundle that can't be read any
        more. What has no valid record is moved aside, and its new path returned.

        Call while the entry is locked.
        """
        pattern = re.compile(_PARTIAL.format(name=re.escape(self.directory.name)))
        for path in self.directory.parent.iterdir():
            if pattern.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
        if not os.path.lexists(self.directory):
            return None
        if self._read_record() is None:
            return self.directory.rename(
                self.directory.with_name(f"{self.directory.name}.kept-{secrets.token_hex(4)}")
            )
        try:
            read_manifest(self.directory)
        except BundleError:
            shutil.rmtree(self.directory)
        return None

    def record(self) -> None:
        """Write down what the bundle was exported from."""
        version = _hash_of_manifest(self.directory)
        content = {"exported_from": asdict(self.wanted), "manifest_sha256": version}
        with replacing(self._record) as file:
            file.write((json.dumps(content, indent=2) + "\n").encode())

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Hold the entry against other processes, and say so where one has it. Yields the lock's descriptor.

        Raises:
            click.ClickException: the cache can't be written.
        """
        try:
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            lock = self.directory.with_name(f".{self.directory.name}.lock").open("a")
        except OSError as error:
            raise click.ClickException(
                f"the cache {self.directory.parent} can't be written ({error.strerror}): give another "
                "--cache-dir DIR"
            ) from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                click.echo(f"waiting: another process exports {self.directory}", err=True)
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield lock.fileno()


def entry_of(cache: Path, wanted: Wanted) -> Entry:
    """Return the place of a bundle: a readable name, and a hash of source, revision and precision."""
    name = Path(wanted.source).name if wanted.files_sha256 else wanted.source.replace("/", "--")
    parts = [_readable(name)]
    if wanted.revision is not None:
        parts.append(_readable(wanted.revision))
    if wanted.precision != "fp32":
        parts.append(wanted.precision)
    identity = repr((os.fsencode(wanted.source), wanted.revision, wanted.precision))
    parts.append(hashlib.sha256(identity.encode()).hexdigest()[:8])
    return Entry(cache / "--".join(parts), wanted)


def _readable(name: str) -> str:
    # No hidden name, and none that is too long together with what is put around it.
    return _UNSAFE.sub("-", name).strip(".-")[:_MOST_LETTERS] or "model"


def _hash_of_manifest(directory: Path) -> str:
    return hashlib.sha256((directory / MANIFEST_NAME).read_bytes()).hexdigest()
