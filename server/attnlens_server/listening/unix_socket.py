"""A socket file: it appears with its permissions, takes nobody's place, and goes when the server stops.

gRPC removes whatever socket has the path that it binds, one in use too, and the file that it makes has the
permissions of the umask. So gRPC binds another name in the same directory. When all is right the file gets
its own name by a link, which fails where that name is taken.
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
_NAME_BYTES = 3  # random ones in a name for the meantime


class UnixSocket:
    """The file of one server. First `prepare`, then bind `bound`, then `publish`; at the end `remove`.

    Attributes:
        bound: the address to bind.
    """

    def __init__(self, address: UnixAddress, mode: int) -> None:
        """Look at nothing yet.

        Args:
            address: what clients use.
            mode: the permissions of the file, such as 0o660. Whoever may write may connect.
        """
        self._address = address
        self._path = address.path
        self._mode = mode
        self.bound = UnixAddress(self._other_name())
        self._identity: tuple[int, int] | None = None

    def prepare(self) -> None:
        """Make sure that the name is free. A socket that nobody listens at is removed.

        Raises:
            StartupError: something else has the name, or no file can be made there.
        """
        directory = self._path.parent
        if not directory.is_dir():
            raise self._refused(f"there is no directory {directory}. Make it first")
        if not os.access(directory, os.W_OK | os.X_OK):
            raise self._refused(
                f"the user of this process may not make files in {directory}. Give the directory to that "
                "user, or choose another one"
            )
        if len(os.fsencode(self.bound.path)) > MAX_PATH_BYTES:
            raise self._refused(
                f"{directory} is too long: with a name of {2 * _NAME_BYTES + 1} bytes it has over "
                f"{MAX_PATH_BYTES}, which is what the system takes for a socket. Choose a shorter one"
            )
        try:
            found = self._path.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(found.st_mode):
            raise self._refused("a file is there that is no socket. Move it away, or choose another path")
        self._refuse_a_live_one()
        self._remove_stale(_identity(found))

    def publish(self) -> None:
        """Give the bound file its permissions and its name.

        Raises:
            StartupError: another server was faster, or the file system refuses it.
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
        """Remove the file, unless it is another server's by now."""
        with suppress(OSError):
            if self._identity is not None and _identity(self._path.lstat()) == self._identity:
                self._path.unlink()

    def _refuse_a_live_one(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_CONNECT_TIMEOUT_S)
            try:
                probe.connect(os.fsencode(self._path))
            except OSError as error:
                if error.errno in (errno.ECONNREFUSED, errno.ENOENT):
                    return
                if error.errno in (errno.EACCES, errno.EPERM):
                    raise self._refused(
                        "a socket of another user is there, and whether it is in use can't be seen. Remove "
                        "it, or choose another path"
                    ) from error
                raise self._taken() from error  # a full backlog, or a socket of another type
        raise self._taken()

    def _remove_stale(self, identity: tuple[int, int]) -> None:
        """Remove what was looked at. If another server has taken the place meanwhile, put its file back."""
        aside = self._other_name()
        try:
            self._path.rename(aside)
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._refused(
                f"a socket is left there, and this process may not remove it ({error.strerror or error}). "
                "Remove it, or choose another path"
            ) from error
        try:
            if _identity(aside.lstat()) != identity:
                with suppress(OSError):
                    self._path.hardlink_to(aside)
                raise self._taken()
        finally:
            aside.unlink(missing_ok=True)

    def _other_name(self) -> Path:
        return self._path.with_name(f".{secrets.token_hex(_NAME_BYTES)}")

    def _taken(self) -> StartupError:
        return self._refused("another server listens there. Stop it, or choose another path")

    def _refused(self, why: str) -> StartupError:
        return StartupError(f"can't listen on {self._address}: {why}")


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
