"""Calls in the confined process: results, limits, interruption."""

import os
import signal
import threading
import time
from typing import Any

import pytest

from attnlens_publisher.errors import FailedError, MissingError, PublisherError, RefusedError
from attnlens_publisher.process import call

GIGABYTE = 10**9
HERE = "tests.export.publisher.confined"


def ask(name: str, **arguments: Any) -> Any:
    return call(f"{HERE}:{name}", **{"max_bytes": 4 * GIGABYTE, "timeout_s": 60, **arguments})


def test_function_runs_in_copies_of_a_process_that_has_imported_transformers() -> None:
    reports: list[tuple[str, int, int]] = []
    first = ask("describe", text="hello", report=lambda *args: reports.append(args))
    second = ask("describe", text="hello")
    assert reports == [("hello", 1, 2)]
    assert first["offline"] == "1"
    assert first["loaded"] == {"transformers": True, "torch": True, "attnlens_export": False}
    assert len({first["pid"], second["pid"], os.getpid()}) == 3


@pytest.mark.parametrize(
    ("name", "arguments", "error", "message"),
    [
        ("refuse", {}, RefusedError, "the setting x is not served: remove it"),
        ("fill_memory", {"size": 6 * GIGABYTE}, FailedError, "it needs more than 4.0 GB of memory"),
        ("wait", {"timeout_s": 1}, FailedError, "it did not end within 1 s"),
        ("kill", {}, FailedError, "it was ended by SIGKILL, as by a lack of memory"),
        ("fail", {}, FailedError, "ValueError: no such file"),
        ("import_missing", {}, MissingError, "the package no-such-package is not installed"),
    ],
)
def test_failure_states_its_reason_and_the_next_call_works(
    name: str, arguments: dict[str, Any], error: type[PublisherError], message: str
) -> None:
    with pytest.raises(error, match=message):
        ask(name, **arguments)
    assert ask("fill_memory", size=10) == 10


def test_interruption_ends_the_work() -> None:
    main = threading.main_thread().ident
    threading.Timer(0.5, signal.pthread_kill, [main, signal.SIGINT]).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ask("wait")
    assert time.monotonic() - started < 10
    assert ask("fill_memory", size=10) == 10
