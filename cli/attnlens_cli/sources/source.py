"""What SOURCE is: a bundle's directory, a checkpoint's directory, or a checkpoint on the hub."""

import re
from dataclasses import dataclass
from pathlib import Path

import click

from attnlens.bundle import MANIFEST_NAME
from attnlens_cli.show.printable import printable

_HUB_ID = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
# One of these makes a directory a checkpoint, or something that the exporter says more about.
_SIGNS_OF_A_CHECKPOINT = ("config.json", "modules.json", "adapter_config.json")
# Where a checkpoint has its weights; old ones of sentence-transformers have them in a module's directory.
_WEIGHTS = ("*.safetensors", "*.bin", "0_*/*.safetensors", "0_*/*.bin")
_MOST_NAMES = 5


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint to export.

    Attributes:
        name: the hub id, or the directory as it was given.
        directory: None on the hub.
        revision: branch, tag or commit on the hub. None: the default branch.
    """

    name: str
    directory: Path | None = None
    revision: str | None = None


def find_source(given: Path) -> Path | Checkpoint:
    """Return the directory of a bundle, or a checkpoint. Nothing is fetched, and no file is opened.

    Raises:
        click.ClickException: it is neither.
    """
    if (given / MANIFEST_NAME).exists():
        return given
    if given.is_dir():
        if _lacks_its_manifest(given):
            raise click.ClickException(
                f"{given} looks like a bundle whose {MANIFEST_NAME} is missing (it has onnx/ and no "
                "weights of a checkpoint): copy the whole directory of the bundle"
            )
        if any((given / name).is_file() for name in _SIGNS_OF_A_CHECKPOINT):
            return Checkpoint(str(given), given)
        raise click.ClickException(
            f"{given} is not a bundle (it has no {MANIFEST_NAME}) and not a checkpoint (it has no "
            f"config.json): {_holdings(given)}"
        )
    if given.exists():
        raise click.ClickException(f"{given} is a file: give the directory of a bundle or of a checkpoint")
    # "bundles/minilm" looks like a hub id, but where there is a directory bundles, it is a wrong path.
    hub_id = None if given.parent.exists() and given.parent != Path() else _HUB_ID.fullmatch(str(given))
    if hub_id is None:
        parent = "in the current directory" if given.parent == Path() else given.parent
        where = f"; {parent}: {_holdings(given.parent)}" if given.parent.is_dir() else ""
        raise click.ClickException(
            f"{given} does not exist: give the directory of a bundle or of a checkpoint, or a hub id such as "
            f"org/name or org/name@revision{where}"
        )
    return Checkpoint(hub_id["name"], revision=hub_id["revision"])


def _lacks_its_manifest(directory: Path) -> bool:
    """Tell whether a directory has graphs alone. Many checkpoints have some, too, beside their weights."""
    if not any(directory.glob("onnx/*.onnx")):
        return False
    return not any(any(directory.glob(pattern)) for pattern in _WEIGHTS)


def _holdings(directory: Path) -> str:
    """Say what is in a directory, bundles before all."""
    paths = sorted(path for path in directory.iterdir() if not path.name.startswith("."))
    bundles = [path for path in paths if (path / MANIFEST_NAME).is_file()]
    if bundles:
        return f"the bundles there are {_listed([str(path) for path in bundles])}"
    names = [f"{path.name}/" if path.is_dir() else path.name for path in paths]
    return f"it contains {_listed(names)}" if names else "it is empty"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return printable(", ".join(names[:_MOST_NAMES])) + more
