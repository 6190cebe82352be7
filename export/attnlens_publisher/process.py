"""Calls of functions that run in the process of `worker`."""

import atexit
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from threading import Lock
from typing import IO, Any

from attnlens_publisher.errors import FailedError, MissingError, RefusedError

LIBRARIES = ("transformers", "sentence_transformers")
TOKENIZER_IMPORTS = ("transformers.models.auto.tokenization_auto",)
TIMEOUT_S = 3600

Report = Callable[[str, int, int], object]
"""Called with a detail, the number of steps done and their total."""


class _Worker:
    """The process, which is started by the first call and ends with this process."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> subprocess.Popen[str]:
        """Return the running process."""
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "attnlens_publisher.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C is handled by this process
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            )
        return self._process

    def stop(self) -> None:
        """End the process and its copies."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()

    def ask(self, request: dict[str, Any], report: Report) -> dict[str, Any]:
        """Send a request and return all replies by kind, without those of progress."""
        with self._lock:
            process = self.start()
            try:
                _inbox(process).write(json.dumps(request) + "\n")
                _inbox(process).flush()
                replies: dict[str, Any] = {}
                for line in process.stdout or ():
                    reply = json.loads(line)
                    if "progress" in reply:
                        report(*reply["progress"])
                        continue
                    replies |= reply
                    if "ended" in reply:
                        return replies
            except BaseException:  # an interruption ends the work, too
                self.stop()
                raise
            self.stop()
            return {"ended": signal.SIGKILL}

    def prepare(self, imports: Sequence[str]) -> None:
        """Let the process import modules, without waiting for it."""
        with self._lock:
            inbox = _inbox(self.start())
            inbox.write(json.dumps({"imports": [*imports]}) + "\n")
            inbox.flush()


def _inbox(process: subprocess.Popen[str]) -> IO[str]:
    if process.stdin is None:
        raise TypeError("the process has no pipe")
    return process.stdin


_WORKER = _Worker()
atexit.register(_WORKER.stop)


def start(imports: Sequence[str] = LIBRARIES) -> None:
    """Start the process and its imports, which take seconds, so that the first `call` need not wait.

    Args:
        imports: Modules to import, if they are installed.
    """
    _WORKER.prepare(imports)


def call(
    function: str,
    *,
    max_bytes: int,
    timeout_s: int = TIMEOUT_S,
    imports: Sequence[str] = LIBRARIES,
    report: Report = lambda *_: None,
    **arguments: Any,  # noqa: ANN401 - any JSON values
) -> Any:  # noqa: ANN401 - any JSON value
    """Call a function in a process that has imported transformers.

    Args:
        function: `MODULE:NAME`. Its first parameter is a `Report`.
        max_bytes: Limit of anonymous memory, on Linux.
        timeout_s: Limit of the elapsed time.
        imports: Modules that the process imports first, if they are installed. They stay imported.
        report: Called for each report of the function.
        arguments: Further arguments of the function, JSON values.

    Returns:
        Its result, a JSON value. It writes arrays to files that the caller names.

    Raises:
        RefusedError: The function raised it. MissingError: A library is not installed.
        FailedError: The function raised another exception, or a limit was exceeded.
    """
    request = {"function": function, "arguments": arguments, "imports": [*imports]}
    replies = _WORKER.ask(request | {"max_bytes": max_bytes, "timeout_s": timeout_s}, report)
    if "result" in replies:
        return replies["result"]
    if "refused" in replies:
        raise RefusedError(replies["refused"])
    if "missing" in replies:
        raise MissingError(replies["missing"])
    if replies["ended"] == signal.SIGALRM:
        raise FailedError(f"it did not end within {timeout_s} s")
    if replies["ended"]:
        raise FailedError(f"it was ended by {signal.Signals(replies['ended']).name}, as by a lack of memory")
    raise FailedError(replies.get("error", "it ended without a result"))
