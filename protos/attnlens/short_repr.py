"""Bounds the `repr` of results and options, so that a debugger or a log line does not show megabytes."""

import functools
from typing import TypeVar

_Class = TypeVar("_Class")

MAX_REPR_CHARS = 4000


def short_repr(cls: type[_Class]) -> type[_Class]:
    """Class decorator: limit the `repr` to `MAX_REPR_CHARS`. Put the decorator above `@dataclass`."""
    original = cls.__repr__

    @functools.wraps(original)
    def shortened(self: _Class) -> str:
        text = original(self)
        if len(text) <= MAX_REPR_CHARS:
            return text
        end = f"...{text[-1]}"
        return f"{text[: MAX_REPR_CHARS - len(end)]}{end}"

    cls.__repr__ = shortened  # type: ignore[assignment, method-assign]
    return cls
