"""The file of a socket: nobody's place is taken, and nothing is left behind."""

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
    """A path in a directory with a short name, from which the names of tests are left out."""
    return tmp_path_factory.mktemp("s") / "a.sock"


def listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


def publish(path: Path, mode: int = 0o660) -> tuple[UnixSocket, socket.socket]:
    """Do what the server does, with a plain socket in gRPC's place."""
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
def test_a_file_has_its_permissions_when_it_appears_and_is_alone(path: Path, mode: int) -> None:
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


def test_a_socket_in_use_is_left_alone(path: Path) -> None:
    with listen(path):
        before = path.stat().st_ino
        with pytest.raises(
            StartupError, match=r"another server listens there\. Stop it, or choose another path"
        ):
            UnixSocket(UnixAddress(path), 0o660).prepare()
        assert path.stat().st_ino == before


def test_a_socket_that_nobody_listens_at_is_replaced(path: Path) -> None:
    listen(path).close()
    _, listener = publish(path)
    with listener:
        assert [entry.name for entry in path.parent.iterdir()] == ["a.sock"]
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_of_two_servers_that_start_at_once_one_is_refused(path: Path) -> None:
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


def test_a_socket_that_has_come_meanwhile_is_put_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listen(path).close()
    late = UnixSocket(UnixAddress(path), 0o660)
    others: list[socket.socket] = []

    def look_while_another_starts(_: UnixSocket) -> None:
        path.unlink()
        (path.parent / "filler").touch()  # or its number might be that of the removed one
        others.append(listen(path))

    monkeypatch.setattr(UnixSocket, "_reject_if_in_use", look_while_another_starts)
    with pytest.raises(StartupError, match="another server listens there"):
        late.prepare()
    with others[0], socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["a.sock", "filler"]


def test_a_file_of_another_server_is_not_removed_at_the_end(path: Path) -> None:
    file, listener = publish(path)
    with listener:
        path.unlink()
        (path.parent / "filler").touch()
        with listen(path):
            file.remove()
            assert path.exists()


@pytest.mark.parametrize("what", ["file", "directory", "link"])
def test_what_is_no_socket_is_left_alone(path: Path, what: str) -> None:
    if what == "file":
        path.write_text("precious")
    elif what == "directory":
        path.mkdir()
    else:
        path.symlink_to("elsewhere")
    with pytest.raises(StartupError, match=r"a file is there that is no socket\. Move it away"):
        UnixSocket(UnixAddress(path), 0o660).prepare()
    assert os.path.lexists(path)


def test_a_directory_that_is_not_there_is_named(path: Path) -> None:
    address = UnixAddress(path.parent / "none" / "a.sock")
    with pytest.raises(StartupError, match=r"there is no directory .*/none\. Make it first"):
        UnixSocket(address, 0o660).prepare()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_of_another_user_is_named(path: Path) -> None:
    path.parent.chmod(0o500)
    with pytest.raises(StartupError, match="the user of this process may not make files in"):
        UnixSocket(UnixAddress(path), 0o660).prepare()
    path.parent.chmod(0o700)


def test_a_directory_too_long_for_the_name_in_the_meantime_is_refused(path: Path) -> None:
    directory = path.parent / ((MAX_PATH_BYTES - len(str(path.parent)) - 3) * "l")
    directory.mkdir()
    address = UnixAddress(directory / "a")
    assert len(str(address.path)) == MAX_PATH_BYTES
    with pytest.raises(StartupError, match="too long"):
        UnixSocket(address, 0o660).prepare()
