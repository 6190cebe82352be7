"""Fixtures of the command line tests."""

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner

from attnlens_cli.main import main
from commands_here import process_as_before
from scripted import ScriptedServer

Run = Callable[..., subprocess.CompletedProcess[str]]
RunHere = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session")
def run_process() -> Run:
    """Run `attnlens ARGS` in a subprocess, without a terminal."""

    def run_attnlens(*args: object, **options: Any) -> subprocess.CompletedProcess[str]:
        command = options.pop("command", [sys.executable, "-m", "attnlens_cli.main"])
        return subprocess.run(
            [*command, *(arg if isinstance(arg, bytes) else str(arg) for arg in args)],
            capture_output=True,
            check=False,
            encoding="utf-8",
            timeout=120,
            env=_environment(options.pop("env", {})),
            **{"stdin": subprocess.DEVNULL, **options} if "input" not in options else options,
        )

    return run_attnlens


@pytest.fixture(scope="session")
def run(run_process: Run) -> Run:
    """Run `attnlens ARGS` in this process, or as a separate process if options for its start are given.

    A subprocess takes a second to import gRPC and NumPy.
    """

    def run_attnlens(*args: object, **options: Any) -> subprocess.CompletedProcess[str]:
        env = options.get("env", {})
        if (
            options.keys() - {"env", "cwd", "input"}
            or any(name != "COLUMNS" and not name.startswith("ATTNLENS_") for name in env)
            or any(isinstance(arg, bytes) for arg in args)
        ):
            return run_process(*args, **options)
        with contextlib.chdir(options.get("cwd", ".")):
            return _run_here([str(arg) for arg in args], _environment(env), options.get("input", ""))

    return run_attnlens


@pytest.fixture(autouse=True)
def quick_retries() -> Iterator[None]:
    """Make commands in this process give up on a missing server within 0.1 seconds."""
    with mock.patch("attnlens_client.connection._INITIAL_BACKOFF", "0.01s"):
        yield


def _environment(changes: dict[str, str]) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("ATTNLENS_")}
    return kept | {"COLUMNS": "100"} | changes


@contextlib.contextmanager
def _standard_input(text: str) -> Iterator[None]:
    """Replace file descriptor 0, which `attnlens embed` reads, by a pipe with a short text."""
    content = text.encode()
    assert len(content) <= select.PIPE_BUF  # fits into the pipe buffer
    before = os.dup(0)
    reading, writing = os.pipe()
    try:
        os.dup2(reading, 0)
        os.write(writing, content)
        os.close(writing)
        yield
    finally:
        os.dup2(before, 0)
        os.close(before)
        os.close(reading)


def _run_here(
    args: list[str], environment: dict[str, str], text: str = ""
) -> subprocess.CompletedProcess[str]:
    with (
        _standard_input(text),
        mock.patch.dict(os.environ, environment, clear=True),
        mock.patch.object(sys, "argv", ["attnlens", *args]),
        process_as_before(),
        CliRunner().isolation() as (stdout, stderr, _),
    ):
        with pytest.raises(SystemExit) as ended:
            main()
        sys.stdout.flush()
        sys.stderr.flush()
        printed, told = stdout.getvalue().decode(), stderr.getvalue().decode()
    assert isinstance(ended.value.code, int)
    return subprocess.CompletedProcess(args, ended.value.code, printed, told)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(max_text_bytes=1000) as server:
        yield server


@pytest.fixture(scope="session")
def run_here() -> RunHere:
    """Run `attnlens ARGS` in this process and return its exit code, standard output and standard error."""

    def run_attnlens(*args: object, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
        result = _run_here([str(arg) for arg in args], _environment(dict(env or {})))
        return result.returncode, result.stdout, result.stderr

    return run_attnlens
