"""A progress bar on stderr, where that is a terminal."""
# ruff: noqa: PLC0415 - rich is loaded only where there is something to draw

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class Progress(Protocol):
    """Takes what has been done."""

    def advance(self, texts: int, end_byte: int) -> None:
        """Show that `texts` texts are done, the last of which ends at `end_byte` of the input."""


class _Nothing:
    def advance(self, texts: int, end_byte: int) -> None:
        """Show nothing."""


@contextmanager
def shown_progress(total_bytes: int | None) -> Iterator[Progress]:
    """Show a bar until the block ends; without `total_bytes`, one that only moves."""
    if not sys.stderr.isatty():
        yield _Nothing()
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    columns = (
        BarColumn(),
        TextColumn("{task.fields[texts]:,} texts"),
        TextColumn("{task.fields[rate]:,.0f} texts/s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total_bytes, texts=0, rate=0.0)

        class _Bar:
            def advance(self, texts: int, end_byte: int) -> None:
                """Move the bar."""
                rate = texts / (bar.tasks[0].elapsed or 1.0)
                bar.update(task, completed=end_byte, texts=texts, rate=rate)

        yield _Bar()


@contextmanager
def shown_stages() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a callback that gets the stage, what of it is done and all of it, and draws a bar."""
    if not sys.stderr.isatty():
        yield lambda _stage, _done, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    columns = (TextColumn("{task.description:<24}"), BarColumn(), TimeElapsedColumn())
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        yield lambda stage, done, total: bar.update(task, description=stage, completed=done, total=total)
