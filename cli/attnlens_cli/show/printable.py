"""Text from elsewhere on its way to the terminal, which obeys control characters rather than show them."""

import json
import re

_CONTROLS_IN_JSON = re.compile(r"[\x7f-\x9f]")  # json itself escapes those below


def printable(text: str) -> str:
    r"""Return `text` with escapes such as `\x1b` for what can't be shown."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def printable_json(value: object, indent: int | None = None) -> bytes:
    """Return `value` as JSON in UTF-8, without control characters."""
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    return _CONTROLS_IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode()


def counted(number: int, noun: str) -> str:
    """Return for instance "1 text" or "1,200 texts"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
