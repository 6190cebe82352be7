"""Text, JSON and counts for output.

Control characters are escaped, because a terminal would execute them.
"""

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # importing NumPy would slow down every command
    import numpy.typing as npt

MAX_LINE, _END = 8192, 1024
"""Maximum number of characters of a logged text, and of these at its end."""
_CONTROLS = re.compile(r"[\x7f-\x9f]")  # json escapes the characters below
# Enough digits to restore each number exactly.
_FORMATS = {"float16": "%.5g", "float32": "%.9g", "int8": "%d", "uint8": "%d"}


def is_utf8(text: str) -> bool:
    """Return whether `text` can be encoded as UTF-8, which gRPC requires."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def printable(text: str) -> str:
    r"""Return `text` with escapes such as `\x1b` in place of unprintable characters."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def bounded(text: str) -> str:
    """Return `text` for a log or an error, without its middle if it is long."""
    if len(text) <= MAX_LINE:
        return text
    return f"{text[: MAX_LINE - _END]} ... {len(text) - MAX_LINE} more characters ... {text[-_END:]}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 text" or "1,200 texts"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def source_text(source: str, commit: str) -> str:
    """Return the origin of a checkpoint: a hub id with its commit, or the name of a local directory."""
    if commit:
        return f"{source} at {commit}"
    return source if "/" in source else f"directory {source}"


def printable_json(value: object, indent: int | None = None) -> bytes:
    """Return `value` as JSON in UTF-8."""
    return _without_controls(json.dumps(value, ensure_ascii=False, indent=indent)).encode()


def json_of(array: "npt.NDArray[Any]") -> str:
    """Return an array of one of `_FORMATS` as nested JSON lists that restore each number exactly."""
    if array.ndim > 1:
        return f"[{', '.join(map(json_of, array))}]"
    number = _FORMATS[array.dtype.name]
    return f"[{', '.join([number % value for value in array.tolist()])}]"


def json_line(start: str, rest: dict[str, Any]) -> str:
    """Return one JSON object.

    Args:
        start: JSON of the first keys, without the closing brace.
        rest: The other keys.
    """
    return _without_controls(f"{start}, {json.dumps(rest, ensure_ascii=False)[1:]}")


def _without_controls(text: str) -> str:
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
