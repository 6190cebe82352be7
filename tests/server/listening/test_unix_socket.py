"""Unix sockets never replace another server's file, and leave no files behind."""

import os
import socket
import stat
from pathlib import Path

import pytest

from attnlens_server.errors import StartupError
from attnlens_server.listening import UnixAddress, UnixSocket
from attnlens_server.listening.address import MAX_PATH_BYTES


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A path in a directory with a short name, since test names would exceed the path limit."""
    return tmp_path_factory.mktemp("s") / "a.sock"


def listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


def publish(path: Path, mode: int = 0o660) -> tuple[UnixSocket, socket.socket]:
    """Publish a plain socket the way the server publishes gRPC's."""
    file = UnixSocket(UnixAddress(path), mode)
    file.prepare()
    listener = listen(file.bound.path)
    try:
        file.publish()
    except BaseException:
        listener.close()
        raise
    return file, listener


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_socket_file_appears_with_its_permissions_and_no_other_files(path: Path, mode: int) -> None:
    file, listener = publish(path, mode)
    with listener:
        found = path.stat()
        assert stat.S_ISSOCK(found.st_mode)
        assert stat.S_IMODE(found.st_mode) == mode
        assert [entry.name for entry in path.parent.iterdir()] == ["a.sock"]
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
        file.remove()
    assert list(path.parent.iterdir()) == []


def test_socket_in_use_is_not_replaced(path: Path) -> None:
    with listen(path):
        before = path.stat().st_ino
        with pytest.raises(
            StartupError, match=r"another server listens there\. Stop it, or choose another path"
        ):
            UnixSocket(UnixAddress(path), 0o660).prepare()
        assert path.stat().st_ino == before


def test_stale_socket_is_replaced(path: Path) -> None:
    listen(path).close()
    _, listener = publish(path)
    with listener:
        assert [entry.name for entry in path.parent.iterdir()] == ["a.sock"]
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_one_of_two_concurrently_started_servers_fails(path: Path) -> None:
    first, second = (UnixSocket(UnixAddress(path), 0o660) for _ in range(2))
    first.prepare()
    second.prepare()
    with listen(first.bound.path), listen(second.bound.path):
        first.publish()
        with pytest.raises(StartupError, match="another server listens there"):
            second.publish()
        second.remove()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    assert [entry.name for entry in path.parent.iterdir()] == ["a.sock"]


def test_socket_created_during_the_check_is_restored(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listen(path).close()
    late = UnixSocket(UnixAddress(path), 0o660)
    others: list[socket.socket] = []

    def look_while_another_starts(_: UnixSocket) -> None:
        path.unlink()
        (path.parent / "filler").touch()  # otherwise, the inode of the removed socket might be reused
        others.append(listen(path))

    monkeypatch.setattr(UnixSocket, "_reject_if_in_use", look_while_another_starts)
    with pytest.raises(StartupError, match="another server listens there"):
        late.prepare()
    with others[0], socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["a.sock", "filler"]


def test_file_of_another_server_is_not_removed_on_exit(path: Path) -> None:
    file, listener = publish(path)
    with listener:
        path.unlink()
        (path.parent / "filler").touch()
        with listen(path):
            file.remove()
            assert path.exists()


@pytest.mark.parametrize("what", ["file", "directory", "link"])
def test_file_that_is_not_a_socket_is_not_replaced(path: Path, what: str) -> None:
    if what == "file":
        path.write_text("precious")
    elif what == "directory":
        path.mkdir()
    else:
        path.symlink_to("elsewhere")
    with pytest.raises(StartupError, match=r"the path exists and is not a socket: move the file"):
        UnixSocket(UnixAddress(path), 0o660).prepare()
    assert os.path.lexists(path)


def test_missing_directory_is_reported_by_name(path: Path) -> None:
    address = UnixAddress(path.parent / "none" / "a.sock")
    with pytest.raises(StartupError, match=r"the directory .*/none does not exist: create it first"):
        UnixSocket(address, 0o660).prepare()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_directory_of_another_user_is_reported_by_name(path: Path) -> None:
    path.parent.chmod(0o500)
    with pytest.raises(StartupError, match="the user of this process has no permission to create files in"):
        UnixSocket(UnixAddress(path), 0o660).prepare()
    path.parent.chmod(0o700)


def test_directory_too_long_for_the_temporary_name_is_rejected(path: Path) -> None:
    directory = path.parent / ((MAX_PATH_BYTES - len(str(path.parent)) - 3) * "l")
    directory.mkdir()
    address = UnixAddress(directory / "a")
    assert len(str(address.path)) == MAX_PATH_BYTES
    with pytest.raises(StartupError, match="too long"):
        UnixSocket(address, 0o660).prepare()
