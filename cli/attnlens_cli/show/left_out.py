"""What of a checkpoint is not in a bundle, in words for somebody who does not know its tensors' names."""

import re
from collections.abc import Iterable

_MAX_NAMED = 3
_POOLER = re.compile(r"(^|\.)pooler\.")
# Not the last step of a masked language model's head, which is called decoder too.
_DECODER = re.compile(r"(^|\.)decoder\.\w+\.")
_HEAD = re.compile(r"(^|\.)(cls|decoder|qa_outputs|vocab_\w+|\w*(classifier|head|predictions|projection))\.")


def describe_left_out(names: Iterable[str]) -> str:
    """Return one line that groups the tensors of a checkpoint that its encoder does not use."""
    groups: dict[str, list[str]] = {"pooler": [], "decoder": [], "task head": [], "others": []}
    for name in names:
        groups[_group(name)].append(name)
    told = "; ".join(_told(group, members) for group, members in groups.items() if members)
    return f"left out, as the encoder's outputs do not need them: {told}"


def _group(name: str) -> str:
    for group, pattern in (("pooler", _POOLER), ("decoder", _DECODER), ("task head", _HEAD)):
        if pattern.search(name):
            return group
    return "others"


def _told(group: str, names: list[str]) -> str:
    count = f"{len(names)} tensor{'s' if len(names) > 1 else ''}"
    # Everybody's BERT has a pooler, and a decoder says it all: only what may be a surprise is named.
    if group in {"pooler", "decoder"}:
        return f"{group} ({count})"
    rest = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"{group} ({count}: {', '.join(names[:_MAX_NAMED])}{rest})"
