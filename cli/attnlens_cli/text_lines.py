"""Reading texts one at a time from lines or JSON lines, each with its line number."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import BinaryIO

import click

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some editors put it at the start of a file


@dataclass(frozen=True, slots=True)
class Line:
    """A text, the number of its line from 1, and the bytes read up to its end."""

    text: str
    number: int
    end_byte: int


def read_lines(file: BinaryIO, name: str, *, is_jsonl: bool) -> Iterator[Line]:
    """Yield the texts of `file`.

    Plain lines: each is a text without its line end, and an empty line is an empty text, so that row i
    of the result belongs to line i. JSON lines: each is an object with the text under `text`; blank
    lines are skipped.

    Raises:
        click.ClickException: a line is not UTF-8, or not such an object. The message has `name` and the line.
    """
    end_byte = 0
    for number, raw in enumerate(file, start=1):
        end_byte += len(raw)
        where = f"{name}, line {number}"
        line = (
            raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
        )  # the byte order mark of some editors
        try:
            text = line.removesuffix(b"\n").removesuffix(b"\r").decode()
        except UnicodeDecodeError as error:
            raise click.ClickException(f"{where}: not UTF-8 (byte {error.start + 1} of the line)") from error
        if not is_jsonl:
            yield Line(text, number, end_byte)
        elif text.strip():
            yield Line(_text_of(text, where), number, end_byte)


def _text_of(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise click.ClickException(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
    text = value.get("text") if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise click.ClickException(f'{where}: want an object with a string "text", as in {{"text": "..."}}')
    if not is_sendable(text):
        raise click.ClickException(f"{where}: the text has half of a surrogate pair, which is no character")
    return text


def is_sendable(text: str) -> bool:
    """Tell whether `text` can be written as UTF-8, as gRPC does."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def batches(lines: Iterable[Line], size: int) -> Iterator[list[Line]]:
    """Yield `lines` in runs of `size`; the last may be shorter."""
    iterator = iter(lines)
    while batch := list(islice(iterator, size)):
        yield batch
