"""Two paths of one file system exchanged in one step, where the system can: Linux, by renameat2(2)."""

import ctypes
import errno
import os
import sys
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# A kernel, a C library or a file system that can't.
_NOT_POSSIBLE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EXDEV)


def exchange(first: Path, second: Path) -> bool:
    """Let two existing paths change places. At every moment there is something at each.

    Returns:
        Whether that is possible here; if not, nothing has happened.

    Raises:
        OSError: a path does not exist, or may not be moved.
    """
    if sys.platform != "linux":
        return False
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NOT_POSSIBLE:
        return False
    raise OSError(number, os.strerror(number), os.fspath(first), None, os.fspath(second))
