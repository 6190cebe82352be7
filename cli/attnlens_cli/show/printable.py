"""Text from elsewhere, made safe to print: a terminal would obey its control characters."""

import json

from attnlens_cli.files.json_text import without_controls


def printable(text: str) -> str:
    r"""Return `text` with escapes such as `\x1b` in place of characters that can't be shown."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def printable_json(value: object, indent: int | None = None) -> bytes:
    """Return `value` as JSON in UTF-8, without control characters."""
    return without_controls(json.dumps(value, ensure_ascii=False, indent=indent)).encode()


def counted(number: int, noun: str) -> str:
    """Return for instance "1 text" or "1,200 texts"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def source_text(source: str, commit: str) -> str:
    """Return where a checkpoint came from: a hub id with its commit, or the name of a local directory."""
    if commit:
        return f"{source} at {commit}"
    return source if "/" in source else f"directory {source}"
