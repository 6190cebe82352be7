"""Exchanges two paths of a file system atomically, with renameat2(2) on Linux."""

import ctypes
import errno
import os
import sys
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# The kernel, the C library or the file system does not support it.
_NOT_POSSIBLE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EXDEV)


def exchange(first: Path, second: Path) -> bool:
    """Exchange two existing paths. At every moment, both exist.

    Returns:
        Whether the system supports it. If not, nothing has changed.

    Raises:
        OSError: A path does not exist, or must not be moved.
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
