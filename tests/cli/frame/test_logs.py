"""Format of log records."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from attnlens_cli.frame import logs
from attnlens_cli.printable import MAX_LINE, printable


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _loggers_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def _written(stream: io.StringIO, level: str) -> str:
    logs.configure(level, stream)
    logger = logging.getLogger("attnlens_server.engine")
    logger.debug("too fine")
    logger.info("opened %s", "it", extra={"model": "m", "batch": 3, "_private": 1})
    logging.getLogger("somebody.else").info("not ours")
    try:
        int("no")
    except ValueError:
        logger.exception("failed")
    return stream.getvalue()


def test_without_a_terminal_each_record_is_one_json_object() -> None:
    opened, failed = [json.loads(line) for line in _written(io.StringIO(), "info").splitlines()]
    assert (opened["level"], opened["logger"], opened["message"]) == (
        "info",
        "attnlens_server.engine",
        "opened it",
    )
    assert (opened["model"], opened["batch"]) == ("m", 3)
    assert "_private" not in opened
    assert opened["time"].endswith("+00:00")
    assert failed["exception"].endswith("ValueError: invalid literal for int() with base 10: 'no'")


def test_terminal_gets_human_readable_lines() -> None:
    lines = _written(_Terminal(), "info").splitlines()
    assert lines[0].endswith(" INFO    opened it model=m batch=3")
    assert lines[-1].startswith("ValueError: ")


def test_log_level_is_applied() -> None:
    assert "opened" not in _written(io.StringIO(), "warning")
    assert "too fine" in _written(io.StringIO(), "debug")
    assert "not ours" not in _written(io.StringIO(), "debug")


HOSTILE = 'a" level=error\n{"level": "error"}\x1b[2J\x85\u2028\ud800'


def _hostile(stream: io.StringIO) -> str:
    logs.configure("info", stream)
    extra = {"value": HOSTILE, "plain": "Embed", "path": "GET /", "count": 3, "empty": ""}
    logging.getLogger("attnlens_server").info("from %s", HOSTILE, extra=extra)
    return stream.getvalue()


def test_untrusted_values_are_escaped_in_terminal_lines() -> None:
    [line] = _hostile(_Terminal()).splitlines()
    assert line.isprintable()
    value = json.dumps(printable(HOSTILE), ensure_ascii=False)
    assert line.endswith(f' value={value} plain=Embed path="GET /" count=3 empty=""')


def test_untrusted_values_are_escaped_in_json_lines() -> None:
    written = _hostile(io.StringIO())
    [line] = written.splitlines()
    assert written.encode() == f"{line}\n".encode()
    assert json.loads(line)["value"] == HOSTILE
    assert json.loads(line)["level"] == "info"


LONG = "start" + "x" * 13_000_000 + "end"


@pytest.mark.parametrize("stream", [io.StringIO(), _Terminal()], ids=["JSON", "terminal"])
def test_long_values_are_cut_in_the_middle(stream: io.StringIO) -> None:
    logs.configure("info", stream)
    logger = logging.getLogger("attnlens_server")
    logger.info("from %s", LONG, extra={"value": LONG})
    logger.error("failed", exc_info=ValueError(LONG))
    content = stream.getvalue()
    assert len(content) < 5 * MAX_LINE
    assert content.count("start") == content.count("end") == 3
    assert "more characters" in content
