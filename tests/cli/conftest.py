"""What the command line's tests share."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from attnlens_cli import app
from scripted import ScriptedServer

Run = Callable[..., subprocess.CompletedProcess[str]]
RunHere = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session")
def run() -> Run:
    """Run `attnlens ARGS` as a process of its own, without a terminal."""

    def run_attnlens(*args: object, **options: Any) -> subprocess.CompletedProcess[str]:
        env = {key: value for key, value in os.environ.items() if not key.startswith("ATTNLENS_")}
        env |= {"COLUMNS": "100", **options.pop("env", {})}
        command = options.pop("command", [sys.executable, "-m", "attnlens_cli.main"])
        return subprocess.run(
            [*command, *(arg if isinstance(arg, bytes) else str(arg) for arg in args)],
            capture_output=True,
            check=False,
            encoding="utf-8",
            timeout=120,
            env=env,
            **{"stdin": subprocess.DEVNULL, **options} if "input" not in options else options,
        )

    return run_attnlens


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(max_text_bytes=1000) as server:
        yield server


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[RunHere]:
    """Run `attnlens ARGS` in this process: its exit code, standard output and standard error."""
    root, signals = logging.getLogger(), (signal.SIGTERM, signal.SIGHUP)
    handlers, level = list(root.handlers), root.level
    on_signals = [signal.getsignal(number) for number in signals]

    def run_attnlens(*args: object, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
        with monkeypatch.context() as patched:
            for name in [name for name in os.environ if name.startswith("ATTNLENS_")]:
                patched.delenv(name)
            for name, value in {"COLUMNS": "100", **(env or {})}.items():
                patched.setenv(name, value)
            code = app.run([str(arg) for arg in args])
        return code, *capfd.readouterr()

    yield run_attnlens
    root.handlers[:], root.level = handlers, level
    for number, handler in zip(signals, on_signals, strict=True):
        signal.signal(number, handler)
