"""Describes the tensors of a checkpoint that are not in a bundle, by what they are for."""

import re
from collections.abc import Iterable

_MAX_NAMED = 3
_POOLER = re.compile(r"(^|\.)pooler\.")
# Does not match the last step of a masked language model's head, which is called decoder too.
_DECODER = re.compile(r"(^|\.)decoder\.\w+\.")
_HEAD = re.compile(r"(^|\.)(cls|decoder|qa_outputs|vocab_\w+|\w*(classifier|head|predictions|projection))\.")


def describe_left_out(names: Iterable[str]) -> str:
    """Return one line that groups the tensors of a checkpoint that its encoder does not use."""
    groups: dict[str, list[str]] = {"pooler": [], "decoder": [], "task head": [], "others": []}
    for name in names:
        groups[_group(name)].append(name)
    described = "; ".join(_describe(group, members) for group, members in groups.items() if members)
    return f"left out, as the encoder's outputs do not need them: {described}"


def _group(name: str) -> str:
    for group, pattern in (("pooler", _POOLER), ("decoder", _DECODER), ("task head", _HEAD)):
        if pattern.search(name):
            return group
    return "others"


def _describe(group: str, names: list[str]) -> str:
    count = f"{len(names)} tensor{'s' if len(names) > 1 else ''}"
    # Every BERT has a pooler, and the word decoder says enough: only tensors that may surprise are named.
    if group in {"pooler", "decoder"}:
        return f"{group} ({count})"
    rest = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"{group} ({count}: {', '.join(names[:_MAX_NAMED])}{rest})"
