"""The cache: a directory of bundles exported from checkpoints.

NAME/         the bundle
.NAME.json    record of its origin, valid only for the manifest with the recorded hash
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
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click

from attnlens.bundle import MANIFEST_NAME, BundleError, read_manifest, verify_files
from attnlens_cli.files.output_file import replacing

# Suffixes of files that an export may read, in the directory and in its modules, such as 1_Pooling.
_READ_SUFFIXES = {".bin", ".json", ".md", ".model", ".safetensors", ".txt"}
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")
_MAX_NAME_CHARACTERS = 80
_PARTIAL = r"\.{name}\.[0-9a-f]{{8}}\.(partial|replaced)"


@dataclass(frozen=True, slots=True)
class ExportedFrom:
    """Identity of an export.

    Attributes:
        source: Hub id, or absolute path of a directory.
        revision: The requested branch, tag or commit.
        files_sha256: Hash of the files of a directory. Empty for a checkpoint on the hub.
        precision: The requested precision.
        attnlens: Version of the exporter.
    """

    source: str
    revision: str | None
    files_sha256: str
    precision: str
    attnlens: str = field(default_factory=lambda: importlib.metadata.version("attnlens"))


def default_directory() -> Path:
    """Return `$XDG_CACHE_HOME/attnlens`, or `~/.cache/attnlens`."""
    xdg_cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (xdg_cache if xdg_cache.is_absolute() else Path.home() / ".cache") / "attnlens"
    except RuntimeError as error:
        raise click.UsageError(f"no directory for the cache ({error}): use --cache-dir DIR") from error


def files_sha256(directory: Path) -> str:
    """Return the SHA-256 of names and contents of all files that an export may read.

    Raises:
        click.ClickException: A file is not a regular file.
    """
    folders = [folder for folder in (directory, *_modules(directory)) if folder.is_dir()]
    paths = [path for folder in folders for path in folder.iterdir()]
    total = hashlib.sha256()
    for path in sorted(set(paths)):
        is_read = path.suffix in _READ_SUFFIXES or path.name.startswith("LICENSE")
        if is_read and not path.name.startswith(".") and _is_regular(path):
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            total.update(f"{digest} {os.fsencode(path.relative_to(directory))!r}\n".encode())
    return total.hexdigest()


def _is_regular(path: Path) -> bool:
    """Return whether `path` is a regular file.

    Raises:
        click.ClickException: It is a pipe, socket or device. Reading a pipe would block forever.
    """
    if not path.exists() or path.is_dir():
        return False
    if not path.is_file():
        raise click.ClickException(f"{path} is not a regular file: replace it with a copy of the file")
    return True


def _modules(directory: Path) -> list[Path]:
    """Return the directories of modules inside the checkpoint. The export reports an invalid modules.json."""
    file = directory / "modules.json"
    try:
        modules = json.loads(file.read_bytes()) if _is_regular(file) else []
        paths = [Path(module["path"]) for module in modules]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return []
    return [directory / path for path in paths if not path.is_absolute() and ".." not in path.parts]


@dataclass(frozen=True, slots=True)
class Entry:
    """A bundle in the cache, which may not exist yet.

    Attributes:
        directory: Directory of the bundle.
        expected: The origin that the bundle must have.
    """

    directory: Path
    expected: ExportedFrom

    @property
    def _record(self) -> Path:
        return self.directory.with_name(f".{self.directory.name}.json")

    def reason_to_export(self) -> str:
        """Return why an export is needed, or "" if the bundle is up to date. Verifies all its hashes."""
        if not self.directory.exists():
            return "it is not in the cache yet"
        recorded = self._read_record()
        if recorded is None:
            return f"the origin of {self.directory} is unknown"
        exported_from, version = recorded
        return self._difference(exported_from) or self._damage(version)

    def _read_record(self) -> tuple[ExportedFrom, str] | None:
        """Return the origin of the bundle and the hash of its manifest, or None without a valid record."""
        if not self._record.is_file():
            return None
        try:
            record = json.loads(self._record.read_bytes())
            return ExportedFrom(**record["exported_from"]), record["manifest_sha256"]
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None

    def _difference(self, recorded: ExportedFrom) -> str:
        if recorded.files_sha256 != self.expected.files_sha256:
            return "the files of the checkpoint have changed since its export"
        if recorded.attnlens != self.expected.attnlens:
            return f"it was exported by attnlens {recorded.attnlens}, and this is {self.expected.attnlens}"
        return "" if recorded == self.expected else f"{self.directory} was exported from another checkpoint"

    def _damage(self, version: str) -> str:
        try:
            manifest = read_manifest(self.directory)
            if _hash_of_manifest(self.directory) != version:
                return f"{self.directory} was replaced after its export"
            verify_files(self.directory, manifest)
        except BundleError as error:
            return str(error)
        return "" if manifest.parity.passed else f"{self.directory} failed parity"

    def clear(self) -> Path | None:
        """Free the directory for an export, and return the new path of an existing directory if it was moved.

        Deletes only files that the cache wrote: leftovers of a killed export, and a recorded bundle that
        cannot be read anymore. A directory without a valid record is moved. Requires the lock.
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
        """Write the record of the bundle's origin."""
        version = _hash_of_manifest(self.directory)
        content = {"exported_from": asdict(self.expected), "manifest_sha256": version}
        with replacing(self._record) as file:
            file.write((json.dumps(content, indent=2) + "\n").encode())

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Lock the entry, waiting for other processes. Yields the file descriptor of the lock.

        Raises:
            click.ClickException: The cache is not writable.
        """
        try:
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            lock = self.directory.with_name(f".{self.directory.name}.lock").open("a")
        except OSError as error:
            raise click.ClickException(
                f"the cache {self.directory.parent} is not writable ({error.strerror}): use another "
                "--cache-dir DIR"
            ) from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                click.echo(f"waiting for another process that exports {self.directory}", err=True)
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield lock.fileno()


def entry_of(cache: Path, expected: ExportedFrom) -> Entry:
    """Return the entry of a bundle. Its name ends in a hash of source, revision and precision."""
    name = Path(expected.source).name if expected.files_sha256 else expected.source.replace("/", "--")
    parts = [_readable(name)]
    if expected.revision is not None:
        parts.append(_readable(expected.revision))
    if expected.precision != "fp32":
        parts.append(expected.precision)
    identity = repr((os.fsencode(expected.source), expected.revision, expected.precision))
    parts.append(hashlib.sha256(identity.encode()).hexdigest()[:8])
    return Entry(cache / "--".join(parts), expected)


def _readable(name: str) -> str:
    # Neither hidden nor too long for a file name with a prefix and a suffix.
    return _UNSAFE.sub("-", name).strip(".-")[:_MAX_NAME_CHARACTERS] or "model"


def _hash_of_manifest(directory: Path) -> str:
    return hashlib.sha256((directory / MANIFEST_NAME).read_bytes()).hexdigest()
