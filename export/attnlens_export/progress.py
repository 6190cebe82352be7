"""Progress callbacks of exports and checks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

Progress = Callable[[str, str, int, int], None]
"""Called before each step with the stage, a detail such as an input shape (may be empty), the number of
completed steps of the stage, and the total."""

StageProgress = Callable[[str, int, int], None]
"""`Progress` within one stage: detail, number of completed steps, total."""

T = TypeVar("T")


def no_progress(_stage: str, _detail: str, _done: int, _total: int) -> None:
    """Report nothing."""


def no_stage_progress(_detail: str, _done: int, _total: int) -> None:
    """Report nothing."""


def report_each(
    items: Sequence[T] | Mapping[T, object], progress: StageProgress, detail: str | None = None
) -> Iterator[T]:
    """Yield the items and report each before it is processed.

    Args:
        items: Cases, paths or other steps of the stage.
        progress: Called before each item.
        detail: Constant detail. If None, the item itself.
    """
    for index, item in enumerate(items):
        progress(str(item) if detail is None else detail, index, len(items))
        yield item
