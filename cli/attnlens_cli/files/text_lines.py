"""Reads texts and pairs from plain lines or JSON lines, in bounded memory."""

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import click

from attnlens_cli.printable import is_utf8

# A JSON line may be longer than its text because of escapes such as \\u1234 and other keys.
_JSON_BYTES_PER_BYTE = 6
_JSON_OTHER_BYTES = 1 << 20
STDIO = "-"
BYTE_LIMIT_REMEDY = "--truncate cuts tokens, not bytes; `attnlens serve --max-text-bytes` raises the limit"
# How long an incomplete batch waits for more lines.
_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Line:
    """A text or a pair.

    Attributes:
        number: Line number, from 1. 0 if the text is not from a file.
        end_byte: Number of bytes read up to the end of the line.
        other_keys: JSON of the other keys of the object, such as `"id": 1, "lang": "en"`.
    """

    text: str | tuple[str, str]
    number: int
    end_byte: int
    other_keys: str = ""

    def as_json(self, index: int | None) -> str:
        """Return a JSON object with index, text and other keys, without the closing brace."""
        first, *second = (self.text,) if isinstance(self.text, str) else self.text
        number = {} if index is None else {"index": index}
        texts = {"text": first, **({"text_pair": second[0]} if second else {})}
        content = json.dumps(number | texts, ensure_ascii=False).removesuffix("}")
        return f"{content}, {self.other_keys}" if self.other_keys else content


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file of texts, or standard input."""

    path: str  # or STDIO
    is_jsonl: bool

    @property
    def name(self) -> str:
        """The name in messages."""
        return "standard input" if self.path == STDIO else self.path

    @property
    def size_bytes(self) -> int | None:
        """The size of a regular file, otherwise None."""
        return None if self.path == STDIO or not Path(self.path).is_file() else Path(self.path).stat().st_size

    def lines(self, max_text_bytes: int, own_keys: Collection[str] | None) -> Iterator[Line]:
        """Open the file and yield its lines. See `read_lines`."""
        try:
            # Not sys.stdin: at exit, the interpreter would wait for the lock of the reading thread.
            with open(0 if self.path == STDIO else self.path, "rb", closefd=self.path != STDIO) as file:
                yield from read_lines(
                    file,
                    self.name,
                    is_jsonl=self.is_jsonl,
                    max_text_bytes=max_text_bytes,
                    own_keys=own_keys,
                )
        except OSError as error:
            error.filename = self.name
            raise


def input_file(path: str, input_format: str) -> InputFile:
    """Return the input file for a value of `--input-format`: auto, lines or jsonl.

    Raises:
        click.UsageError: Standard input is closed.
    """
    if path == STDIO and sys.stdin is None:
        raise click.UsageError("standard input is closed: use FILE")
    has_jsonl_suffix = path.lower().endswith((".jsonl", ".ndjson", ".json"))
    is_jsonl = input_format == "jsonl" or (input_format == "auto" and has_jsonl_suffix)
    return InputFile(path, is_jsonl)


def read_lines(
    file: BinaryIO,
    name: str,
    *,
    is_jsonl: bool,
    max_text_bytes: int = 0,
    own_keys: Collection[str] | None = None,
) -> Iterator[Line]:
    """Yield the texts of `file`.

    Plain lines are one text each. An empty line is an empty text, so that row i of the result belongs to line
    i. JSON lines are objects with the text under `text` and the second text of a pair under `text_pair`;
    blank lines are skipped.

    Args:
        file: File or standard input.
        name: Name in messages.
        is_jsonl: Whether lines are JSON objects.
        max_text_bytes: Maximum size of a text. Longer lines are never read into memory. If 0, no limit.
        own_keys: Keys that the output adds, which must not occur in the input. If None, the output does not
            keep other keys.

    Raises:
        click.ClickException: A line is not UTF-8, too long, not such an object, or has one of `own_keys`. The
            message contains `name` and the line number.
    """
    limit = max_text_bytes
    if is_jsonl and limit:
        limit = limit * _JSON_BYTES_PER_BYTE + _JSON_OTHER_BYTES
    end_byte, number = 0, 0
    while raw := file.readline(limit + len(b"\xef\xbb\xbf\r\n") if limit else -1):
        end_byte, number = end_byte + len(raw), number + 1
        where = f"{name}, line {number}"
        if number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")  # the byte order mark of some editors
        line = raw.removesuffix(b"\n").removesuffix(b"\r")
        if limit and len(line) > limit:
            raise click.ClickException(
                f"{where} has more than {limit} bytes, but the limit is {max_text_bytes}: split the text "
                f"({BYTE_LIMIT_REMEDY})"
            )
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise click.ClickException(f"{where}: not UTF-8 (byte {error.start + 1} of the line)") from error
        if not is_jsonl:
            yield Line(text, number, end_byte)
        elif text.strip():
            content = _parse_object(text, where)
            others = "" if own_keys is None else _other_keys(content, where, own_keys)
            yield Line(_text_of(content, where), number, end_byte, others)


def _parse_object(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise click.ClickException(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # too many digits or nested lists
        raise click.ClickException(f"{where}: cannot be read as JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _other_keys(content: dict[str, Any], where: str, own_keys: Collection[str]) -> str:
    others = {key: value for key, value in content.items() if key not in {"text", "text_pair"}}
    taken = next((key for key in others if key in own_keys), None)
    if taken is not None:
        raise click.ClickException(
            f'{where}: the output uses the key "{taken}" itself: rename it in the input'
        )
    try:
        encoded = json.dumps(others, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError) as error:  # NaN and Infinity, which Python accepts
        raise click.ClickException(f"{where}: the value of another key is not JSON: {error}") from error
    if not is_utf8(encoded):  # an unpaired surrogate, which JSON can contain as an escape
        encoded = json.dumps(others)
    return encoded[1:-1]


def _text_of(content: dict[str, Any], where: str) -> str | tuple[str, str]:
    text, second = content.get("text"), content.get("text_pair")
    if not isinstance(text, str):
        raise click.ClickException(f'{where}: not an object with a string "text", as in {{"text": "..."}}')
    if second is not None and not isinstance(second, str):
        raise click.ClickException(f'{where}: "text_pair" is not a string: use a string, or omit the key')
    if not is_utf8(text + (second or "")):
        raise click.ClickException(f"{where}: the text contains an unpaired surrogate, not a character")
    return text if second is None else (text, second)


class Batches:
    """Reads lines ahead in a thread, so that requests do not wait for the input.

    The thread owns the iterator. It is a daemon thread, so that a blocked standard input does not delay exit.
    """

    def __init__(self, lines: Callable[[], Iterator[Line]], size: int) -> None:
        """Start to read `lines()`, up to two batches of `size` ahead. Requires a running loop."""
        self._lines = lines
        self._size = size
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Line | Exception | None] = (
            asyncio.Queue()
        )  # used only by the loop's thread
        self._free_slots = threading.Semaphore(2 * size)
        self._ended = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        last: Exception | None = None
        try:
            for line in self._lines():
                self._free_slots.acquire()
                self._put(line)
        except Exception as error:  # noqa: BLE001 - raised by `next`
            last = error
        self._put(last)

    def _put(self, item: Line | Exception | None) -> None:
        with suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    async def next(self) -> list[Line]:
        """Return the next lines: `size`, fewer if the input pauses, none at the end.

        Raises:
            Exception: Reading the input failed.
        """
        batch: list[Line] = []
        while len(batch) < self._size and not self._ended:
            try:
                item = self._queue.get_nowait()
            except asyncio.QueueEmpty:
                try:
                    item = await asyncio.wait_for(self._queue.get(), _PAUSE_S if batch else None)
                except TimeoutError:
                    break
            if isinstance(item, Exception):
                raise item
            if item is None:
                self._ended = True
            else:
                batch.append(item)
                self._free_slots.release()
        return batch
