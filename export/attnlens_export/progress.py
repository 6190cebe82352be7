"""What an export or a check says of its progress."""

from collections.abc import Callable

Progress = Callable[[str, str, int, int], None]
"""Called before each step with the stage, the detail (such as an input shape; may be empty), the number of
steps of the stage that are done, and that of all its steps."""

StageProgress = Callable[[str, int, int], None]
"""The same within one stage: detail, done, total."""


def no_progress(_stage: str, _detail: str, _done: int, _total: int) -> None:
    """Report nothing."""


def no_stage_progress(_detail: str, _done: int, _total: int) -> None:
    """Report nothing."""
