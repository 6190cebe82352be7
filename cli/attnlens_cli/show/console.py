"""The rich console and tables of command output."""

import re
import sys
from collections.abc import Sequence
from typing import TextIO, cast

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table


def make_console(*, markup: bool = False) -> Console:
    """Return a console for stdout. Lines have no trailing spaces if stdout is not a terminal."""
    stdout = sys.stdout if sys.stdout.isatty() else cast("TextIO", _Trimmed(sys.stdout))
    return Console(file=stdout, highlight=False, markup=markup, emoji=False)


def make_table(title: str, text_columns: Sequence[str], number_columns: Sequence[str]) -> Table:
    """Return an empty table with left-aligned text columns, followed by right-aligned number columns."""
    table = Table(title=title or None, title_justify="left", box=SIMPLE, pad_edge=False, padding=(0, 0, 0, 1))
    for heading in text_columns:
        table.add_column(heading, no_wrap=True)
    for heading in number_columns:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


class _Trimmed:
    """A text stream that removes the trailing spaces added by rich."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(re.sub(r" +(?=\n)", "", text))

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)
