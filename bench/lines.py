"""Processes that answer JSON lines. Each measured program runs in one; only one computes at a time.

The first line of a process describes it; then each line of its stdin is a request and each line of its
stdout an answer. What libraries print goes to stderr, into a log.
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

Answer = dict[str, Any]


class ProcessError(Exception):
    """A process can't be installed, started or asked; the message is the reason in its rows."""


class LineProcess:
    """A process, ready once the block is entered, ended when it is left."""

    def __init__(self, command: Sequence[object], environment: Mapping[str, str], log: Path) -> None:
        self._command = [str(word) for word in command]
        self._environment = {**os.environ, **environment}
        self._log = log
        self._process: subprocess.Popen[str] | None = None
        self._stderr: IO[str] | None = None
        self.hello: Answer = {}

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
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def request(self, **arguments: object) -> Answer:
        """Send a request and return its answer.

        Raises:
            ProcessError: it failed, ended, or said nothing for TIMEOUT_S.
        """
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(arguments) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise ProcessError(self._last_words()) from error
        return self._read()

    def _read(self) -> Answer:
        assert self._process is not None
        assert self._process.stdout is not None
        watch = threading.Timer(TIMEOUT_S, self._process.kill)
        watch.start()
        line = "not yet"
        while line and not line.startswith("{"):  # what is imported may print before answer_lines is there
            line = self._process.stdout.readline()
        watch.cancel()
        if not line:
            raise ProcessError(self._last_words())
        answer: Answer = json.loads(line)
        if "failure" in answer:
            raise ProcessError(answer["failure"])
        return answer

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"ended, or silent for {TIMEOUT_S:g} s: {lines[-1].strip() if lines else 'no message'}"

    def _end(self) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._stderr):
            if pipe is not None:
                close_quietly(pipe)


def close_quietly(pipe: IO[str]) -> None:
    """Close a pipe whose other end may be gone."""
    try:
        pipe.close()
    except BrokenPipeError:
        return


def answer_lines(handle: Callable[..., Answer], **hello: object) -> None:
    """Answer each line of stdin with what `handle` returns for it; a failure becomes an answer, too."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    print(json.dumps(hello), file=answers, flush=True)
    for line in sys.stdin:
        try:
            answer = handle(**json.loads(line))
        except Exception as error:  # noqa: BLE001 - the other end shows it in the row
            answer = {"failure": f"{type(error).__name__}: {error}".splitlines()[0]}
        print(json.dumps(answer), file=answers, flush=True)
