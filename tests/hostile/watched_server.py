"""A server process that reports slow event-loop callbacks and the largest reservation of memory."""

import sys
from pathlib import Path
from typing import Self

from served import ServerProcess


class WatchedServer(ServerProcess):
    """Process of `attnlens serve` that reports into a file."""

    def __init__(self, bundle: Path, report: Path, *args: str) -> None:
        super().__init__(bundle, *args)
        self._report = report
        report.touch()
        self.command = [
            sys.executable,
            str(Path(__file__).with_name("watch.py")),
            str(report),
            *self.command[3:],
        ]

    def __enter__(self) -> Self:
        super().__enter__()
        self.forget()
        return self

    def forget(self) -> None:
        """Forget what was reported."""
        self._seen = len(self._lines())

    @property
    def slow_callbacks(self) -> list[str]:
        """Callbacks that took more than 50 ms of CPU time, since `forget`."""
        return [line for line in self._lines()[self._seen :] if line.startswith("callback")]

    @property
    def peak_reserved_bytes(self) -> int:
        """Largest memory that all calls had reserved, since `forget`."""
        lines = self._lines()[self._seen :]
        return max((int(line.split()[1]) for line in lines if line.startswith("reserved")), default=0)

    _seen = 0

    def _lines(self) -> list[str]:
        return self._report.read_text().splitlines()
