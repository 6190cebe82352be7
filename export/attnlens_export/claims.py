"""Comparison of a bundle's manifest with its files.

Fields that the manifest does not state are skipped, because bundles of older versions lack newer fields.
Stated fields are compared even if they are 0, false or empty.
"""

import json
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from attnlens.bundle import MANIFEST_NAME, BundleError
from attnlens.v1.manifest_pb2 import Manifest
from attnlens_export.contents import bundle_files, graphs_of
from attnlens_export.graph.read import external_files
from attnlens_export.manifest import describe_facts
from attnlens_model import EncoderConfig

# Files of file managers, git and hubs. No tool loads them with a bundle.
_HARMLESS_FILES = (".DS_Store", "._*", ".git*", ".cache", "Thumbs.db", "desktop.ini")

# Fields that can be derived from the files.
_DERIVED = (
    "architecture",
    "graphs",
    "pooling",
    "max_tokens",
    "prompts",
    "default_prompt_name",
    "supports_text_pairs",
    "adapter_task",
    "chat_template",
    "classifier",
    "required_features",
    "similarity",
    "tokenizer_choice",
)
# Suffix of the default value of an enum.
_UNSPECIFIED = "_UNSPECIFIED"
# Fields whose keys are data, not field names.
_MAPS = frozenset({"prompts"})


def check_claims(directory: Path, manifest: Manifest, config: EncoderConfig) -> tuple[str, ...]:
    """Compare the manifest with the fields that can be derived from the files.

    Returns:
        Derived fields that the manifest does not state, such as `pooling.truncate_dim`.

    Raises:
        BundleError: A field differs, or a file is not listed.
    """
    _check_listed(directory, manifest)
    path = directory / MANIFEST_NAME
    stated = json.loads(path.read_text(encoding="utf-8"))
    try:
        facts = _as_dict(describe_facts(directory, config))
        return tuple(_compare(stated, _as_dict(manifest), {name: facts.get(name) for name in _DERIVED}))
    except _ContradictionError as error:
        raise BundleError(f"{path}: {error}: export the bundle again") from error


def _check_listed(directory: Path, manifest: Manifest) -> None:
    listed = {directory / file.path for file in manifest.files}
    unlisted = [
        path
        for path in bundle_files(directory)
        if path not in listed and not _is_harmless(path.relative_to(directory))
    ]
    if unlisted:
        raise BundleError(f"{unlisted[0]} is not in the manifest: remove it, or export the bundle again")
    for graph in graphs_of(directory):
        for path in external_files(directory / graph.path):
            if path not in listed:
                raise BundleError(
                    f"{directory / graph.path} has weights in {path}, but the manifest has no hash of this "
                    "file: export the bundle again"
                )


def _is_harmless(path: Path) -> bool:
    """Return whether an unlisted file may be in a bundle."""
    return path == Path("README.md") or any(
        fnmatchcase(part, pattern) for part in path.parts for pattern in _HARMLESS_FILES
    )


class _ContradictionError(Exception):
    """A stated field differs from the files."""


def _compare(stated: Any, claim: Any, fact: Any, name: str = "") -> Iterator[str]:  # noqa: ANN401 - JSON values
    """Compare a value recursively, and yield the names of fields that are not stated.

    Args:
        stated: Value in the manifest file, in which missing and empty fields differ.
        claim: The same value with defaults for missing fields.
        fact: Value derived from the files. Contains only fields that can be derived.
        name: Name of the field, such as `graphs.1.opset`.

    Raises:
        _ContradictionError: A stated field differs.
    """
    if name in _MAPS:
        for key in claim | fact:
            yield from _compare(None, claim.get(key), fact.get(key), f"{name}.{key}")
    elif isinstance(fact, dict):
        yield from _compare_fields(stated, claim, fact, name)
    elif isinstance(fact, list):
        if len(claim) != len(fact):
            raise _ContradictionError(
                f"{name} has {len(claim)} entries, but {len(fact)} according to the files"
            )
        for index, values in enumerate(zip(stated, claim, fact, strict=True)):
            yield from _compare(*values, f"{name}.{index}")
    elif claim != fact:
        raise _ContradictionError(f"{name} is {claim!r}, but {fact!r} according to the files")


def _compare_fields(
    stated: dict[str, Any], claim: dict[str, Any], fact: dict[str, Any], name: str
) -> Iterator[str]:
    for key, value in fact.items():
        field = f"{name}.{key}".lstrip(".")
        if stated.get(key) is not None:  # null means missing
            yield from _compare(stated[key], claim[key], value, field)
        elif value and not str(value).endswith(_UNSPECIFIED):
            yield field


def _as_dict(message: Manifest) -> dict[str, Any]:
    return json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
