"""Files that are loaded again when they change."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from attnlens_server.errors import StartupError

logger = logging.getLogger(__name__)

Content = TypeVar("Content")

INTERVAL_S = 3.0


class WatchedFiles(Generic[Content]):
    """Files with one content, such as a certificate and its key.

    Args:
        paths: Files. A change of the time, size or inode of one of them loads all of them again.
        load: Returns their content, in any thread.
        apply: Uses new content, on the event loop.

    Raises:
        StartupError: A file is missing or invalid.
    """

    def __init__(
        self, paths: Sequence[Path], load: Callable[[], Content], apply: Callable[[Content], None]
    ) -> None:
        self._paths = paths
        self._load = load
        self._apply = apply
        self._state = self._current_state()
        apply(load())

    async def update(self) -> None:
        """Use the files if they have changed. If they are unusable, log it and keep the previous content."""
        run = asyncio.get_running_loop().run_in_executor
        state = await run(None, self._current_state)
        if state == self._state:
            return
        self._state = state  # invalid content is reported once
        try:
            self._apply(await run(None, self._load))
        except StartupError as error:
            logger.error("a changed file is not used: %s", error)  # noqa: TRY400 - the message suffices
        except Exception:  # such as a RecursionError of a parser. Later changes must still be noticed
            names = ", ".join(map(str, self._paths))
            logger.exception("a changed file is not used, because of an internal error: %s", names)

    def _current_state(self) -> list[Any]:
        return [_state_of(path) for path in self._paths]


def _state_of(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


async def watch(
    files: Sequence[WatchedFiles[Any]],
    check: Callable[[], None] = lambda: None,
    interval_s: float = INTERVAL_S,
) -> None:
    """Update files until cancelled, and call `check` each time."""
    while True:
        await asyncio.sleep(interval_s)
        for each in files:
            await each.update()
        check()
