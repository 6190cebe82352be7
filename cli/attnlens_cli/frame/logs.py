"""Log output: readable lines on a terminal, otherwise one JSON object per line."""

import json
import logging
import re
from datetime import UTC, datetime
from typing import Any, TextIO

from attnlens_cli.printable import bounded, printable

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

# Characters that json does not escape: some programs treat them as line ends, and unpaired surrogates cannot
# be encoded as UTF-8.
_UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def _quoted(value: object) -> str:
    """Return a value, quoted if it could be mistaken for several fields or lines."""
    text = printable(bounded(str(value)))
    return json.dumps(text, ensure_ascii=False) if re.search(r'[\s="]', text) or not text else text


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields of `extra`, without private ones: Ray adds `_ray_timestamp_ns` to every record."""
    return {
        key: bounded(value) if isinstance(value, str) else value
        for key, value in vars(record).items()
        if key not in _STANDARD_FIELDS and not key.startswith("_")
    }


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """Return the traceback of a record, which may have been formatted already. Empty if there is none."""
    text = formatter.formatException(record.exc_info) if record.exc_info else record.exc_text or ""
    return bounded(text)


class HumanFormatter(logging.Formatter):
    """`12:34:56 INFO  message key=value`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, followed by the traceback if there is one."""
        time = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        pairs = "".join(f" {key}={_quoted(value)}" for key, value in _extras(record).items())
        line = f"{time} {record.levelname:<7} {printable(bounded(record.getMessage()))}{pairs}"
        traceback = _traceback(self, record)
        return f"{line}\n{traceback}" if traceback else line


class JsonFormatter(logging.Formatter):
    """One JSON object: time (UTC), level, logger, message, then the fields of `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line. A traceback becomes the field `exception`."""
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": bounded(record.getMessage()),
            **_extras(record),
        }
        if traceback := _traceback(self, record):
            entry["exception"] = traceback
        return _UNSAFE.sub(
            lambda match: f"\\u{ord(match[0]):04x}", json.dumps(entry, ensure_ascii=False, default=str)
        )


def configure(level: str, stream: TextIO) -> None:
    """Write attnlens messages of `level` and above to `stream`, and warnings of other libraries."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(HumanFormatter() if stream.isatty() else JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for package in ("cli", "client", "export", "model", "server"):
        logging.getLogger(f"attnlens_{package}").setLevel(level.upper())
