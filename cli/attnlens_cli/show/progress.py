"""Progress on stderr: a bar on a terminal, otherwise nothing or a few lines."""
# ruff: noqa: PLC0415 - rich is imported only for a terminal

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import click

from attnlens_cli.printable import counted

SECONDS_BEFORE_ESTIMATE = 5.0
"""Minimum duration of a stage before its remaining time is estimated."""

TextProgress: TypeAlias = Callable[[int, int], None]
"""Receives the number of finished texts and the number of finished input bytes."""
Stages: TypeAlias = Callable[[str, str, int, int], None]
"""Receives the name of a stage, a detail or "", the number of finished steps, and the number of all steps."""


@dataclass(slots=True)
class Counts:
    """Numbers of processed texts and tokens."""

    texts: int = 0
    tokens: int = 0
    truncated: int = 0
    started: float = field(default_factory=time.monotonic)

    def summary(self) -> str:
        """Return the line that commands print at the end."""
        seconds = time.monotonic() - self.started
        cut = f", {self.truncated:,} of them truncated" if self.truncated else ""
        per_s = self.texts / seconds if seconds else 0.0
        rate = f"{per_s:,.0f} texts/s" if per_s >= 10 or not per_s else f"{per_s:.2g} texts/s"  # noqa: PLR2004
        done = f"{counted(self.texts, 'text')}{cut}, {counted(self.tokens, 'token')}"
        return f"{done} in {seconds:.1f} s ({rate})"

    @contextmanager
    def added_to_failures(self) -> Iterator[None]:
        """Add the number of finished texts to a failure."""
        try:
            yield
        except Exception as error:
            if self.texts:
                error.add_note(f"{counted(self.texts, 'text')} {'was' if self.texts == 1 else 'were'} done")
            raise


@contextmanager
def shown_progress(total_bytes: int | None) -> Iterator[TextProgress]:
    """Show a progress bar until the block ends. Without `total_bytes`, it has no end."""
    if not sys.stderr.isatty():
        yield lambda _texts, _end_byte: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        BarColumn(),
        TextColumn("{task.fields[texts]}"),
        TextColumn("{task.fields[rate]:,.0f} texts/s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total_bytes, texts="", rate=0.0)

        def advance(texts: int, end_byte: int) -> None:
            rate = texts / (bar.tasks[0].elapsed or 1.0)
            bar.update(task, completed=end_byte, texts=counted(texts, "text"), rate=rate)

        yield advance


@contextmanager
def shown_stages(*, in_lines: bool = False) -> Iterator[Stages]:
    """Yield a callback that updates a progress bar until the block ends.

    If stderr is not a terminal, prints nothing, or one line per stage with `in_lines`.
    """
    if not sys.stderr.isatty():
        yield _StageLines() if in_lines else lambda _stage, _detail, _done, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:<42}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        last_stage = ""

        def update(stage: str, detail: str, done: int, total: int) -> None:
            nonlocal last_stage
            if stage != last_stage:  # the speed of the next stage differs
                bar.reset(task)
                last_stage = stage
            bar.update(task, description=f"{stage} {detail}", completed=done, total=total)

        yield update


class _StageLines:
    """Prints a line when a stage starts, and one with the remaining time of a long stage."""

    def __init__(self) -> None:
        self._last_stage = ""
        self._started = 0.0
        self._has_estimate = False

    def __call__(self, stage: str, detail: str, done: int, total: int) -> None:
        if stage != self._last_stage:
            self._last_stage, self._started, self._has_estimate = stage, time.monotonic(), False
            # The steps are input shapes, texts, graphs or prompts.
            click.echo(f"{stage}: {counted(total, 'step')}" if detail else stage, err=True)
        elapsed = time.monotonic() - self._started
        if not self._has_estimate and 0 < done < total and elapsed >= SECONDS_BEFORE_ESTIMATE:
            self._has_estimate = True
            remaining = elapsed * (total - done) / done
            click.echo(
                f"  {done} of {total} steps done, about {remaining:.0f} s left in this stage", err=True
            )
