"""Reads texts and pairs from lines or JSON lines, one at a time, each with the number of its line."""

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

# A line of JSON may hold more than its text: the characters as \\u1234, and other fields.
_JSON_BYTES_A_BYTE = 6
_JSON_OTHER_BYTES = 1 << 20
STDIO = "-"
LIMIT_OF_BYTES = "--truncate cuts tokens, not bytes; `attnlens serve --max-text-bytes` raises the limit"
"""What to say of a text of too many bytes."""
# How long an incomplete batch waits for more lines.
_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Line:
    """A text or pair, the number of its line from 1, and the bytes read up to its end.

    `other_keys` is JSON: the other keys of its object with their values, as in `"id": 1, "lang": "en"`.
    """

    text: str | tuple[str, str]
    number: int
    end_byte: int
    other_keys: str = ""

    def as_json(self, index: int | None) -> str:
        """Return a JSON object with the row's number, the text and the other keys, without its last brace."""
        first, *second = (self.text,) if isinstance(self.text, str) else self.text
        number = {} if index is None else {"index": index}
        texts = {"text": first, **({"text_pair": second[0]} if second else {})}
        told = json.dumps(number | texts, ensure_ascii=False).removesuffix("}")
        return f"{told}, {self.other_keys}" if self.other_keys else told


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file of texts, or standard input."""

    path: str  # STDIO: standard input
    is_jsonl: bool

    @property
    def name(self) -> str:
        """What messages call it."""
        return "standard input" if self.path == STDIO else self.path

    @property
    def size_bytes(self) -> int | None:
        """How large it is. None: that is not known."""
        return None if self.path == STDIO or not Path(self.path).is_file() else Path(self.path).stat().st_size

    def lines(self, max_text_bytes: int, own_keys: Collection[str] | None) -> Iterator[Line]:
        """Open it, yield its lines as `read_lines` does, and close it."""
        try:
            # Not sys.stdin: at exit the interpreter would wait for the lock of a thread that reads.
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
    """Return the file for the value of `--input-format`: auto, lines or jsonl.

    Raises:
        click.UsageError: it is standard input, which is closed.
    """
    if path == STDIO and sys.stdin is None:
        raise click.UsageError("standard input is closed: give FILE")
    is_jsonl = input_format == "jsonl" or (input_format == "auto" and path.lower().endswith(".jsonl"))
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

    Plain lines: each is a text without its line end. An empty line is an empty text, so that row i of the
    result belongs to line i. JSON lines: each is an object with the text under `text`, for a pair with the
    second text under `text_pair`; blank lines are skipped. With a limit `max_text_bytes`, a longer line is
    never in memory as a whole. Other keys of an object are kept where the output has a place for them:
    `own_keys` are those that the output has itself. None: they are dropped.

    Raises:
        click.ClickException: a line is not UTF-8, too long, not such an object, or has one of `own_keys`. The
            message has `name` and the number of the line.
    """
    limit = max_text_bytes
    if is_jsonl and limit:
        limit = limit * _JSON_BYTES_A_BYTE + _JSON_OTHER_BYTES
    end_byte, number = 0, 0
    while raw := file.readline(limit + len(b"\xef\xbb\xbf\r\n") if limit else -1):
        end_byte, number = end_byte + len(raw), number + 1
        where = f"{name}, line {number}"
        if number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")  # the byte order mark of some editors
        line = raw.removesuffix(b"\n").removesuffix(b"\r")
        if limit and len(line) > limit:
            raise click.ClickException(
                f"{where} has more than {limit} bytes, a text may have {max_text_bytes}: send it in pieces "
                f"({LIMIT_OF_BYTES})"
            )
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise click.ClickException(f"{where}: not UTF-8 (byte {error.start + 1} of the line)") from error
        if not is_jsonl:
            yield Line(text, number, end_byte)
        elif text.strip():
            given = _object_of(text, where)
            found = _text_of(given, where)
            others = "" if own_keys is None else _other_keys(given, where, own_keys)
            yield Line(found, number, end_byte, others)


def _object_of(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise click.ClickException(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists in lists
        raise click.ClickException(f"{where}: can't be read as JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _other_keys(given: dict[str, Any], where: str, own_keys: Collection[str]) -> str:
    others = {key: value for key, value in given.items() if key not in {"text", "text_pair"}}
    taken = next((key for key in others if key in own_keys), None)
    if taken is not None:
        raise click.ClickException(
            f'{where}: the output has a key "{taken}" of its own: rename that of the line'
        )
    try:
        told = json.dumps(others, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError) as error:  # NaN and Infinity, which Python reads
        raise click.ClickException(f"{where}: an other key holds what is not JSON: {error}") from error
    if not is_sendable(told):  # half of a surrogate pair, which JSON can hold as an escape
        told = json.dumps(others)
    return told[1:-1]


def _text_of(given: dict[str, Any], where: str) -> str | tuple[str, str]:
    text, second = given.get("text"), given.get("text_pair")
    if not isinstance(text, str):
        raise click.ClickException(f'{where}: want an object with a string "text", as in {{"text": "..."}}')
    if second is not None and not isinstance(second, str):
        raise click.ClickException(f'{where}: want a string under "text_pair", or leave it out')
    if not is_sendable(text + (second or "")):
        raise click.ClickException(f"{where}: the text has half of a surrogate pair, not a character")
    return text if second is None else (text, second)


def is_sendable(text: str) -> bool:
    """Tell whether `text` can be written as UTF-8, as gRPC does."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Batches:
    """Reads lines ahead in a thread of its own, so that nothing else waits for the input.

    The thread owns the iterator. It is a daemon thread: waiting for standard input does not delay the exit.
    """

    def __init__(self, lines: Callable[[], Iterator[Line]], size: int) -> None:
        """Start to read what `lines` returns, two batches of `size` ahead. Needs a running loop."""
        self._lines = lines
        self._size = size
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Line | Exception | None] = asyncio.Queue()  # used by the loop only
        self._room = threading.Semaphore(2 * size)
        self._ended = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        last: Exception | None = None
        try:
            for line in self._lines():
                self._room.acquire()
                self._hand_over(line)
        except Exception as error:  # noqa: BLE001 - raised where the batch is awaited
            last = error
        self._hand_over(last)

    def _hand_over(self, item: Line | Exception | None) -> None:
        with suppress(RuntimeError):  # the loop has ended: nobody waits any more
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    async def next(self) -> list[Line]:
        """Return the next lines: `size`, or fewer where no more come for a moment; none at the end.

        Raises:
            Exception: what reading raised.
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
                self._room.release()
        return batch
