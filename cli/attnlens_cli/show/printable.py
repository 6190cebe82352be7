"""Text from elsewhere, made safe to print: a terminal would obey its control characters."""

import json
import re

_CONTROLS_IN_JSON = re.compile(r"[\x7f-\x9f]")  # json itself escapes those below


def printable(text: str) -> str:
    r"""Return `text` with escapes such as `\x1b` in place of characters that can't be shown."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def printable_json(value: object, indent: int | None = None) -> bytes:
    """Return `value` as JSON in UTF-8, without control characters."""
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    return _CONTROLS_IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode()


def counted(number: int, noun: str) -> str:
    """Return for instance "1 text" or "1,200 texts"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
