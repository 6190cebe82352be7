"""The console that commands print results to."""

import re
import sys
from typing import TextIO, cast

from rich.console import Console


def make_console(*, markup: bool = False) -> Console:
    """Return a console on stdout. Lines have no trailing spaces if stdout is not a terminal."""
    stdout = sys.stdout if sys.stdout.isatty() else cast("TextIO", _Trimmed(sys.stdout))
    return Console(file=stdout, highlight=False, markup=markup, emoji=False)


class _Trimmed:
    """A text stream without the spaces that rich pads lines with."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(re.sub(r" +(?=\n)", "", text))

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)
