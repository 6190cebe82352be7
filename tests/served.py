"""A real server process for tests: `attnlens serve` on a free port."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self


class ServerProcess:
    """Process of `attnlens serve BUNDLE --port 0 ARGS`. The port is omitted if ARGS contain an address.

    As a context manager, it waits until the server is ready and stops it on exit.
    """

    def __init__(self, bundle: Path, *args: str) -> None:
        where = [] if "--address" in args else ["--port", "0"]
        self.command = [sys.executable, "-m", "attnlens_cli.main", "serve", str(bundle), *where, *args]
        self.address = ""
        self.ready_line = ""

    def __enter__(self) -> Self:
        self._stderr = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            self.command, stdout=subprocess.PIPE, stderr=self._stderr, text=True, encoding="utf-8"
        )
        assert self.process.stdout is not None
        self.ready_line = self.process.stdout.readline()  # empty if the process has exited
        match = re.search(r" is ready at (\S+): ", self.ready_line)
        if match is None:
            self.process.kill()
            self.process.wait()
            told = f"the server did not start: {self.ready_line}{self.log()}"
            self._close()
            raise RuntimeError(told)
        self.address = match[1]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.stop()
        self._close()

    def http_url(self) -> str:
        """Return the URL of the HTTP port from the line after the ready line. Call once."""
        assert self.process.stdout is not None
        match = re.fullmatch(r"HTTP and the viewer are at (\S+)\n", self.process.stdout.readline())
        assert match is not None
        return match[1]

    def stop(self) -> int:
        """Send SIGTERM, wait and return the exit code. Raises TimeoutExpired if it had to be killed."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise

    def _close(self) -> None:
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._stderr.close()

    def log(self) -> str:
        """Return stderr. The server may still be writing, because both share the file offset."""
        number = self._stderr.fileno()
        return os.pread(number, os.fstat(number).st_size, 0).decode()
