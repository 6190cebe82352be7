"""Unix socket file of a server: created with its permissions, never replacing another server's socket.

gRPC removes an existing socket at the path that it binds, even one in use, and creates the file with the
permissions of the umask. gRPC therefore binds a temporary name in the same directory. Once the permissions
are set, the file is hard-linked to its final name, which fails if that name exists.
"""

import errno
import os
import secrets
import socket
import stat
from contextlib import suppress
from pathlib import Path

from attnlens_server.errors import StartupError
from attnlens_server.listening.address import MAX_PATH_BYTES, UnixAddress

_CONNECT_TIMEOUT_S = 1.0
_NAME_BYTES = 3  # random bytes of the temporary name


class UnixSocket:
    """Socket file of one server. Call `prepare`, bind `bound`, call `publish` and, at the end, `remove`.

    Attributes:
        bound: Temporary address to bind.
    """

    def __init__(self, address: UnixAddress, mode: int) -> None:
        """Initialize without accessing the file system.

        Args:
            address: Address that clients use.
            mode: Permissions of the file, for example 0o660. Users with write permission can connect.
        """
        self._address = address
        self._path = address.path
        self._mode = mode
        self.bound = UnixAddress(self._temporary_name())
        self._identity: tuple[int, int] | None = None

    def prepare(self) -> None:
        """Check that the path is available, and remove a stale socket.

        Raises:
            StartupError: The path is in use, or no file can be created there.
        """
        directory = self._path.parent
        if not directory.is_dir():
            raise self._refused(f"the directory {directory} does not exist: create it first")
        if not os.access(directory, os.W_OK | os.X_OK):
            raise self._refused(
                f"this process has no permission to create files in {directory}. Change the permissions, or "
                "choose another directory"
            )
        if len(os.fsencode(self.bound.path)) > MAX_PATH_BYTES:
            raise self._refused(
                f"{directory} is too long: with a file name of {2 * _NAME_BYTES + 1} bytes, it exceeds the "
                f"limit of {MAX_PATH_BYTES} bytes for a socket. Choose a shorter one"
            )
        try:
            found = self._path.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(found.st_mode):
            raise self._refused("the path exists and is not a socket: move the file, or use another path")
        self._reject_if_in_use()
        self._remove_stale(_identity(found))

    def publish(self) -> None:
        """Set the permissions of the bound file and link it to its final name.

        Raises:
            StartupError: Another server has created the file, or the file system rejects the operation.
        """
        bound = self.bound.path
        try:
            bound.chmod(self._mode)
            self._identity = _identity(bound.lstat())
            self._path.hardlink_to(bound)
        except FileExistsError as error:
            raise self._taken() from error
        except OSError as error:
            raise self._refused(f"{error.strerror or error}") from error
        finally:
            bound.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the file, unless another server has replaced it."""
        with suppress(OSError):
            if self._identity is not None and _identity(self._path.lstat()) == self._identity:
                self._path.unlink()

    def _reject_if_in_use(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_CONNECT_TIMEOUT_S)
            try:
                probe.connect(os.fsencode(self._path))
            except OSError as error:
                if error.errno in (errno.ECONNREFUSED, errno.ENOENT):
                    return
                if error.errno in (errno.EACCES, errno.EPERM):
                    raise self._refused(
                        "the path is a socket of another user, and may be in use. Remove it, or choose "
                        "another path"
                    ) from error
                raise self._taken() from error  # a full backlog, or a socket of another type
        raise self._taken()

    def _remove_stale(self, identity: tuple[int, int]) -> None:
        """Remove the stale socket. If another server has replaced it in the meantime, restore that file."""
        aside = self._temporary_name()
        try:
            self._path.rename(aside)
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._refused(
                "the path is a stale socket that this process has no permission to remove "
                f"({error.strerror or error}). Remove it, or choose another path"
            ) from error
        try:
            if _identity(aside.lstat()) != identity:
                with suppress(OSError):
                    self._path.hardlink_to(aside)
                raise self._taken()
        finally:
            aside.unlink(missing_ok=True)

    def _temporary_name(self) -> Path:
        return self._path.with_name(f".{secrets.token_hex(_NAME_BYTES)}")

    def _taken(self) -> StartupError:
        return self._refused("another server listens there. Stop it, or choose another path")

    def _refused(self, why: str) -> StartupError:
        return StartupError(f"cannot listen on {self._address}: {why}")


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
