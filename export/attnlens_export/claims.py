"""Does the manifest of a bundle say what its files say?

A field that a manifest does not state is skipped: a bundle of an older version of attnlens lacks the fields
that were added since. What is stated is compared, also where it is 0, false or empty.
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

_LEFT_BY_OTHERS = (".DS_Store", "._*", ".git*", ".cache", "Thumbs.db", "desktop.ini")


# The fields that follow from the files.
_DERIVED = (
    "architecture",
    "graphs",
    "pooling",
    "max_tokens",
    "prompts",
    "default_prompt_name",
    "supports_text_pairs",
    "adapter_task",
)
# How the first value of an enum ends, which says nothing.
_UNSPECIFIED = "_UNSPECIFIED"
# Those whose keys are names, not fields.
_MAPS = frozenset({"prompts"})


def check_claims(directory: Path, manifest: Manifest, config: EncoderConfig) -> tuple[str, ...]:
    """Compare what the manifest states with what follows from the files.

    Returns:
        The fields that follow from the files and are not stated, such as `pooling.truncate_dim`.

    Raises:
        BundleError: they differ, or a file is not listed.
    """
    _check_listed(directory, manifest)
    path = directory / MANIFEST_NAME
    stated = json.loads(path.read_text(encoding="utf-8"))
    try:
        facts = _as_dict(describe_facts(directory, config))
        return tuple(_compare(stated, _as_dict(manifest), {name: facts[name] for name in _DERIVED}))
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
                    f"{directory / graph.path} has weights in {path}, which has no hash in the manifest: "
                    "export the bundle again"
                )


def _is_harmless(path: Path) -> bool:
    """Whether a file that nobody listed is one that file managers, git and hubs leave, and no tool loads."""
    return path == Path("README.md") or any(
        fnmatchcase(part, pattern) for part in path.parts for pattern in _LEFT_BY_OTHERS
    )


class _ContradictionError(Exception):
    """The manifest says one thing, the files another."""


def _compare(stated: Any, claim: Any, fact: Any, name: str = "") -> Iterator[str]:  # noqa: ANN401 - JSON values
    """Compare a value and what is below it; yield the names of the fields that are not stated.

    Args:
        stated: as it was written: it tells an absent field from an empty one.
        claim: the same with every absent field at its default.
        fact: what the files say; fields that do not follow from the files are absent.
        name: of the field, such as `graphs.1.opset`.

    Raises:
        _ContradictionError: a field that is stated differs.
    """
    if name in _MAPS:
        for key in claim | fact:
            yield from _compare(None, claim.get(key), fact.get(key), f"{name}.{key}")
    elif isinstance(fact, dict):
        yield from _compare_fields(stated, claim, fact, name)
    elif isinstance(fact, list):
        if len(claim) != len(fact):
            raise _ContradictionError(f"{name} has {len(claim)} entries, the files say {len(fact)}")
        for number, values in enumerate(zip(stated, claim, fact, strict=True)):
            yield from _compare(*values, f"{name}.{number}")
    elif claim != fact:
        raise _ContradictionError(f"{name} is {claim!r}, the files say {fact!r}")


def _compare_fields(
    stated: dict[str, Any], claim: dict[str, Any], fact: dict[str, Any], name: str
) -> Iterator[str]:
    for key, value in fact.items():
        field = f"{name}.{key}".lstrip(".")
        if stated.get(key) is not None:  # null means absent
            yield from _compare(stated[key], claim[key], value, field)
        elif value and not str(value).endswith(_UNSPECIFIED):
            yield field


def _as_dict(message: Manifest) -> dict[str, Any]:
    return json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
