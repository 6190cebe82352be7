"""Log output: readable lines on a terminal, one JSON object a line elsewhere. Configured only here."""

import json
import logging
import re
from datetime import UTC, datetime
from typing import Any, TextIO

from attnlens_cli.show.printable import printable

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

# Beyond what json escapes: some programs take these for the end of a line, and a half of a surrogate pair has
# no UTF-8.
_UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def _escaped(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


def _one_word(value: object) -> str:
    """Return a value that can't be taken for several fields, or for several lines."""
    text = printable(str(value))
    return json.dumps(text, ensure_ascii=False) if re.search(r'[\s="]', text) or not text else text


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


class HumanFormatter(logging.Formatter):
    """`12:34:56 INFO  message key=value`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, and the traceback below it where there is one."""
        time = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        pairs = "".join(f" {key}={_one_word(value)}" for key, value in _extras(record).items())
        line = f"{time} {record.levelname:<7} {printable(record.getMessage())}{pairs}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object: time (UTC), level, logger, message, then whatever `extra` held."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line; a traceback becomes the field `exception`."""
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extras(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return _UNSAFE.sub(_escaped, json.dumps(entry, ensure_ascii=False, default=str))


def configure(level: str, stream: TextIO) -> None:
    """Send our messages from `level` on to `stream`, and everybody else's from warning on."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(HumanFormatter() if stream.isatty() else JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for room in ("cli", "client", "export", "model", "server"):
        logging.getLogger(f"attnlens_{room}").setLevel(level.upper())
