"""What the command line's tests share."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from scripted import ScriptedServer

Run = Callable[..., subprocess.CompletedProcess[str]]


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
