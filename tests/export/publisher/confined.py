"""Functions that a confined process runs in the tests."""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from attnlens_publisher.errors import RefusedError

Report = Callable[[str, int, int], object]


def describe(report: Report, text: str) -> dict[str, Any]:
    """Print, report and return what this process is."""
    print(text)  # noqa: T201 - must not reach the pipe of the replies
    report(text, 1, 2)
    is_loaded = {name: name in sys.modules for name in ("transformers", "torch", "attnlens_export")}
    return {"pid": os.getpid(), "offline": os.environ["HF_HUB_OFFLINE"], "loaded": is_loaded}


def refuse(_report: Report) -> None:
    """Refuse."""
    raise RefusedError("the setting x is not served: remove it")


def fill_memory(_report: Report, size: int) -> int:
    """Fill `size` bytes."""
    return len(bytearray(size))


def wait(_report: Report) -> None:
    """Wait for longer than any limit."""
    time.sleep(600)


def kill(_report: Report) -> None:
    """End this process as the kernel does without memory."""
    os.kill(os.getpid(), 9)


def fail(_report: Report) -> None:
    """Fail."""
    raise ValueError("no such\n file")


def import_missing(_report: Report) -> None:
    """Import a package that does not exist."""
    import no_such_package.part  # type: ignore[import-not-found]  # noqa: F401, PLC0415
