"""Progress of a method: a callback, a tqdm bar if tqdm is installed, or a line on stderr."""

import importlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

# True shows a bar. A function is called with the number of completed texts and the total, None if unknown.
Progress: TypeAlias = bool | Callable[[int, int | None], object]
Report: TypeAlias = Callable[[int, int | None], object]

_INTERVAL_S = 0.1


def checked_progress(progress: Progress) -> Progress:
    """Validate and return `progress`.

    Raises:
        TypeError: `progress` is neither a bool nor a function.
    """
    if not isinstance(progress, bool) and not callable(progress):
        raise TypeError(f"progress is {progress!r}: use True, False or a function of (done, total)")
    return progress


@contextmanager
def reporting(progress: Progress) -> Iterator[Report]:
    """Yield a function that reports progress. Closes the bar at the end."""
    if callable(progress):
        yield progress
    elif not progress:
        yield _ignore
    else:
        bar = _bar()
        try:
            yield bar.show
        finally:
            bar.close()


def _ignore(_done: int, _total: int | None) -> None:
    pass


def _bar() -> "_TqdmBar | _Line":
    try:
        with warnings.catch_warnings():  # tqdm warns in notebooks without ipywidgets
            warnings.simplefilter("ignore")
            return _TqdmBar(importlib.import_module("tqdm.auto").tqdm)
    except ImportError:
        return _Line()


class _TqdmBar:
    """Bar of tqdm, which also works in notebooks."""

    def __init__(self, tqdm: Any) -> None:  # noqa: ANN401 - tqdm is untyped
        self._tqdm = tqdm
        self._bar: Any = None

    def show(self, done: int, total: int | None) -> None:
        if self._bar is None:
            self._bar = self._tqdm(total=total, unit="text")
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class _Line:
    """A line on stderr that is overwritten. Not shown if stderr is not a terminal."""

    def __init__(self) -> None:
        self._is_shown = sys.stderr is not None and sys.stderr.isatty()
        self._shown_at = -_INTERVAL_S
        self._text = ""

    def show(self, done: int, total: int | None) -> None:
        self._text = f"\r{done:,} texts" if total is None else f"\r{done:,} of {total:,} texts"
        now = time.monotonic()
        if now - self._shown_at >= _INTERVAL_S:
            self._shown_at = now
            self._write(self._text)

    def close(self) -> None:
        if self._text:
            self._write(f"{self._text}\n")

    def _write(self, text: str) -> None:
        if self._is_shown:
            sys.stderr.write(text)
            sys.stderr.flush()
