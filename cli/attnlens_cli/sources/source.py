"""Resolves SOURCE to a bundle: an existing bundle, a cached one, or a new export of a checkpoint."""

import re
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import click

from attnlens.bundle import MANIFEST_NAME
from attnlens_cli import how_to_install
from attnlens_cli.frame.signals import stopped_by_signals
from attnlens_cli.printable import printable
from attnlens_cli.sources.cache import ExportedFrom, default_directory, entry_of, files_sha256
from attnlens_cli.sources.child import run_export

_HUB_ID = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
# A directory with one of these files is a checkpoint. If it is an invalid one, the export reports the reason.
_CHECKPOINT_FILES = ("config.json", "modules.json", "adapter_config.json")
# Weights of a checkpoint. Old checkpoints of sentence-transformers have them in the directory of a module.
_WEIGHTS = ("*.safetensors", "*.bin", "0_*/*.safetensors", "0_*/*.bin")
_EXPORT_MODULES = ("torch", "onnx", "onnxscript", "onnx_ir", "huggingface_hub", "safetensors", "tokenizers")
_MAX_NAMES = 5


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint to export.

    Attributes:
        name: Hub id, or the directory as given.
        directory: None for a checkpoint on the hub.
        revision: Branch, tag or commit on the hub. If None, the default branch.
    """

    name: str
    directory: Path | None = None
    revision: str | None = None

    def exported_from(self, precision: str) -> ExportedFrom:
        """Return the identity of an export. Hashes all files of a directory.

        Raises:
            click.ClickException: A file is not a regular file.
        """
        if self.directory is None:
            return ExportedFrom(self.name, self.revision, "", precision)
        sha256 = files_sha256(self.directory)
        return ExportedFrom(str(self.directory.resolve()), self.revision, sha256, precision)


def resolve(source: Path, cache: Path | None, precision: str) -> Path:
    """Return the directory of a bundle. A checkpoint is exported unless the cache has its bundle.

    Args:
        source: Bundle directory, checkpoint directory or hub id.
        cache: Cache directory. If None, the default one.
        precision: Precision of the export.

    Raises:
        click.ClickException: SOURCE is invalid, the extra `export` is missing, or the cache is not writable.
        click.exceptions.Exit: The export failed and printed the reason on stderr.
    """
    found = find_source(source)
    if isinstance(found, Path):
        return found
    entry = entry_of(cache or default_directory(), found.exported_from(precision))
    if not entry.reason_to_export():
        click.echo(f"{printable(found.name)} is in the cache: {printable(str(entry.directory))}", err=True)
        return entry.directory
    missing = [name for name in _EXPORT_MODULES if find_spec(name) is None]
    if missing:
        raise click.UsageError(
            f"{found.name} is a checkpoint, and its export needs {missing[0]}, which is not installed: "
            f"{how_to_install('export,server')}; or export it on another machine and use the bundle"
        )
    with stopped_by_signals(), entry.locked() as lock:
        reason = (
            entry.reason_to_export()
        )  # check again, since another process may have exported it in the meantime
        if reason:
            click.echo(
                f"exporting {printable(found.name)} to {printable(str(entry.directory))} because "
                f"{printable(reason)}; this is done once and takes about a minute for a small model",
                err=True,
            )
            if moved := entry.clear():
                click.echo(f"the previous directory was moved to {printable(str(moved))}", err=True)
            started = time.monotonic()
            options = ["--output", str(entry.directory), "--precision", precision, "--force"]
            if found.revision is not None:
                options += ["--revision", found.revision]
            run_export(found.name, options, lock)
            entry.record()
            click.echo(f"exported in {time.monotonic() - started:.0f} s", err=True)
    return entry.directory


def find_source(source: Path) -> Path | Checkpoint:
    """Return the directory of a bundle, or a checkpoint. Downloads and opens nothing.

    Raises:
        click.ClickException: SOURCE is neither.
    """
    if (source / MANIFEST_NAME).exists():
        return source
    if source.is_dir():
        if _lacks_manifest(source):
            raise click.ClickException(
                f"{source} looks like a bundle without {MANIFEST_NAME} (it has onnx/ and no checkpoint "
                "weights): copy the whole directory of the bundle"
            )
        if any((source / name).is_file() for name in _CHECKPOINT_FILES):
            return Checkpoint(str(source), source)
        raise click.ClickException(
            f"{source} is not a bundle (it has no {MANIFEST_NAME}) and not a checkpoint (it has no "
            f"config.json): {_contents(source)}"
        )
    if source.exists():
        raise click.ClickException(f"{source} is a file: use the directory of a bundle or of a checkpoint")
    # "bundles/minilm" looks like a hub id. If the directory bundles exists, it is a wrong path.
    hub_id = None if source.parent.exists() and source.parent != Path() else _HUB_ID.fullmatch(str(source))
    if hub_id is None:
        parent = "in the current directory" if source.parent == Path() else source.parent
        where = f"; {parent}: {_contents(source.parent)}" if source.parent.is_dir() else ""
        raise click.ClickException(
            f"{source} does not exist: use the directory of a bundle or of a checkpoint, or a hub id such "
            f"as org/name or org/name@revision{where}"
        )
    return Checkpoint(hub_id["name"], revision=hub_id["revision"])


def _lacks_manifest(directory: Path) -> bool:
    """Return whether a directory has graphs and no weights. Many checkpoints have graphs and weights."""
    if not any(directory.glob("onnx/*.onnx")):
        return False
    return not any(any(directory.glob(pattern)) for pattern in _WEIGHTS)


def _contents(directory: Path) -> str:
    """Describe the contents of a directory: its bundles, otherwise its files."""
    paths = sorted(path for path in directory.iterdir() if not path.name.startswith("."))
    bundles = [path for path in paths if (path / MANIFEST_NAME).is_file()]
    if bundles:
        return f"the bundles there are {_listed([str(path) for path in bundles])}"
    names = [f"{path.name}/" if path.is_dir() else path.name for path in paths]
    return f"it contains {_listed(names)}" if names else "it is empty"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return printable(", ".join(names[:_MAX_NAMES])) + more
