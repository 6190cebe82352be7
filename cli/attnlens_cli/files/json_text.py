"""JSON that is put together from pieces: arrays with as many digits as they need, and lines."""

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # numpy takes a moment, and every command needs what is below
    import numpy.typing as npt

_CONTROLS = re.compile(r"[\x7f-\x9f]")  # json itself escapes those below
# Enough digits for a number to be read back from its text exactly.
_FORMATS = {"float16": "%.5g", "float32": "%.9g"}


def json_of(array: "npt.NDArray[Any]") -> str:
    """Return an array of float16 or float32 as JSON: lists in lists, with as many digits as it needs."""
    if array.ndim > 1:
        return f"[{', '.join(map(json_of, array))}]"
    number = _FORMATS[array.dtype.name]
    return f"[{', '.join([number % value for value in array.tolist()])}]"


def json_line(begun: str, rest: dict[str, Any]) -> str:
    """Return a JSON object without control characters: `begun`, which lacks its last brace, and `rest`."""
    return without_controls(f"{begun}, {json.dumps(rest, ensure_ascii=False)[1:]}")


def without_controls(text: str) -> str:
    """Return JSON with escapes in place of control characters, which a terminal would obey."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
