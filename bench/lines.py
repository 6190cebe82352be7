"""JSON-lines subprocesses. Each measured program runs in its own process.

A process first writes a line that describes itself, then responses each request line on stdin with a response
line on stdout. Other output goes to stderr and into a log.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 300.0

Response = dict[str, Any]


class ProcessError(Exception):
    """A process could not be installed or started, or a request failed."""


class LineProcess:
    """Context manager for a process that serves requests as JSON lines."""

    def __init__(self, command: Sequence[object], environment: Mapping[str, str], log: Path) -> None:
        self._command = [str(word) for word in command]
        self._environment = {**os.environ, **environment}
        self._log = log
        self._process: subprocess.Popen[str] | None = None
        self._stderr: IO[str] | None = None
        self.hello: Response = {}

    def __enter__(self) -> Self:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._stderr = self._log.open("w", encoding="utf-8")
        self._process = subprocess.Popen(
            self._command,
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            encoding="utf-8",
        )
        try:
            self.hello = self._read()
        except ProcessError:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def request(self, **arguments: object) -> Response:
        """Send a request and return the response.

        Raises:
            ProcessError: If the request fails, the process exits or TIMEOUT_S passes.
        """
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(arguments) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise ProcessError(self._failure_reason()) from error
        return self._read()

    def _read(self) -> Response:
        assert self._process is not None
        assert self._process.stdout is not None
        watch = threading.Timer(TIMEOUT_S, self._process.kill)
        watch.start()
        line = "\n"
        while line and not line.startswith("{"):  # skip output printed during imports
            line = self._process.stdout.readline()
        watch.cancel()
        if not line:
            raise ProcessError(self._failure_reason())
        response: Response = json.loads(line)
        if "failure" in response:
            raise ProcessError(response["failure"])
        return response

    def _failure_reason(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        reason = lines[-1].strip() if lines else "no message"
        return f"process exited or timed out after {TIMEOUT_S:g} s: {reason}"

    def _stop(self) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._stderr):
            if pipe is not None:
                close_quietly(pipe)


def close_quietly(pipe: IO[str]) -> None:
    """Close a pipe and ignore a broken pipe."""
    try:
        pipe.close()
    except BrokenPipeError:
        return


def serve_lines(handle: Callable[..., Response], **hello: object) -> None:
    """Pass each request on stdin to `handle` and write its result, or the error, to stdout."""
    responses = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    print(json.dumps(hello), file=responses, flush=True)
    for line in sys.stdin:
        try:
            response = handle(**json.loads(line))
        except Exception as error:  # noqa: BLE001 - reported to the parent process
            response = {"failure": f"{type(error).__name__}: {error}".splitlines()[0]}
        print(json.dumps(response), file=responses, flush=True)
