"""Reads and writes `modules.json`, the module list of a sentence-transformers checkpoint."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlens_export.errors import SourceError
from attnlens_export.json_files import read_json, read_object, write_json

MODULES_FILE = "modules.json"
# Releases differ: models.Dense, models.Dense.Dense, and base.modules.dense.Dense.
_LIBRARY_CLASS = re.compile(r"sentence_transformers\.(?:\w+\.)?(?:models|modules)\.(?:\w+\.)?(\w+)")
_AFTER_POOLING = ("Dense", "Dropout", "Normalize")
# Key of the pooled vector in a module's inputs and outputs. Other keys are not supported.
_VECTOR = "sentence_embedding"


@dataclass(frozen=True)
class Module:
    """An entry of `modules.json`.

    Attributes:
        kind: Class name, qualified if the class is not part of sentence-transformers.
        path: Module directory, relative to the checkpoint.
    """

    kind: str
    path: str


def read_modules(directory: Path | None, skipped: Collection[str] = ()) -> list[Module]:
    """Return the modules after the encoder: Pooling, then any sequence of Dense and Normalize.

    Args:
        directory: Checkpoint directory. If None, or if `modules.json` is missing, the result is empty.
        skipped: Module kinds to omit.

    Raises:
        SourceError: The file is invalid, lists an unsupported module, or does not list a module in `skipped`.
    """
    listed = read_list(directory)
    kinds = [module.kind for module in listed if module.kind != "Transformer"]
    for kind in skipped:
        if kind not in set(kinds) - {"Pooling"}:
            names = ", ".join(kinds) or "none"
            raise SourceError(
                f"--skip-module {kind}: the checkpoint lists {names}. Skip one of these, but not the pooling"
            )
    modules = [module for module in listed if module.kind not in skipped]
    if modules and modules[0].kind == "Transformer":
        del modules[0]
    for index, module in enumerate(modules):
        if module.kind not in (_AFTER_POOLING if index else ("Pooling",)):
            raise SourceError(
                _describe_unsupported(module.kind, has_pooling="Pooling" in {m.kind for m in modules})
            )
    for module in modules:
        _check_names(directory, module)
    return [module for module in modules if module.kind != "Dropout"]


def listed_kinds(directory: Path) -> list[str]:
    """Return the kinds of all modules of a checkpoint, including the encoder.

    Raises:
        SourceError: The file is invalid.
    """
    return [module.kind for module in read_list(directory)]


def write_modules(directory: Path, modules: Sequence[Module]) -> None:
    """Write `modules.json` with the encoder as the first module."""
    entries = [
        {
            "idx": index,
            "name": str(index),
            "path": module.path,
            "type": f"sentence_transformers.models.{module.kind}",
        }
        for index, module in enumerate([Module("Transformer", ""), *modules])
    ]
    write_json(directory / MODULES_FILE, entries)


def read_list(directory: Path | None) -> list[Module]:
    """Return all modules of a checkpoint, including the encoder.

    Raises:
        SourceError: The file is invalid.
    """
    if directory is None or not (directory / MODULES_FILE).exists():
        return []
    entries: Any = read_json(directory / MODULES_FILE)
    try:
        types = [(str(entry["type"]), str(entry["path"])) for entry in entries]
    except (TypeError, KeyError) as error:
        raise SourceError(f"{directory / MODULES_FILE} is not a list of modules: {error!r}") from error
    classes = [(_LIBRARY_CLASS.fullmatch(name), name, path) for name, path in types]
    return [Module(found[1] if found else name, path) for found, name, path in classes]


def _describe_unsupported(kind: str, *, has_pooling: bool) -> str:
    if kind in _AFTER_POOLING or kind == "Pooling":
        problem = f"this checkpoint has the module {kind} " + (
            "where bundles do not support it (they support one Pooling, then Dense and Normalize)"
            if has_pooling
            else "for token vectors, without pooling, but bundles apply it only to pooled vectors"
        )
    else:
        problem = f"this checkpoint has the module {kind}, which bundles do not support"
    return f"{problem}. --skip-module {kind} omits it, which changes the embeddings"


def _check_names(directory: Path | None, module: Module) -> None:
    if directory is None or module.kind not in ("Dense", "Normalize"):
        return
    settings = read_object(directory / module.path / "config.json")
    for key in ("module_input_name", "module_output_name"):
        name = settings.get(key) or _VECTOR
        if name != _VECTOR:
            raise SourceError(
                f"{directory / module.path / 'config.json'}: {key} is {name!r}, but bundles apply "
                f"{module.kind} only to {_VECTOR}: omit it with --skip-module {module.kind}"
            )
