"""Listening sockets of the HTTP ports."""

import errno
import socket
from contextlib import ExitStack

import pytest

from attnlens_server.listening import TcpAddress
from attnlens_server.listening import tcp as tcp_module
from attnlens_server.listening.tcp import listen


def connect(host: str, port: int) -> None:
    socket.create_connection((host, port), timeout=10).close()


def test_all_interfaces_of_ipv6_are_also_those_of_ipv4() -> None:
    [listening] = listen(TcpAddress("::", 0))
    with listening:
        for host in ("127.0.0.1", "::1"):
            connect(host, listening.getsockname()[1])


@pytest.mark.parametrize(("host", "other"), [("127.0.0.1", "::1"), ("::1", "127.0.0.1"), ("0.0.0.0", "::1")])
def test_other_hosts_accept_one_family(host: str, other: str) -> None:
    [listening] = listen(TcpAddress(host, 0))
    with listening:
        connect("127.0.0.1" if host == "0.0.0.0" else host, listening.getsockname()[1])
        with pytest.raises(OSError, match="refused"):
            connect(other, listening.getsockname()[1])


def names(monkeypatch: pytest.MonkeyPatch, *hosts: str) -> None:
    """Let the name `names` have these addresses."""
    found = [
        (socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0))
        for host in hosts
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)


def test_all_addresses_of_a_name_have_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    names(monkeypatch, "::1", "127.0.0.1", "127.0.0.1")
    with ExitStack() as stack:
        sockets = [stack.enter_context(listening) for listening in listen(TcpAddress("names", 0))]
        assert len(sockets) == 2
        assert len({listening.getsockname()[1] for listening in sockets}) == 1


def test_address_that_the_machine_lacks_is_left_out_unless_it_is_the_only_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names(monkeypatch, "192.0.2.1", "127.0.0.1")
    [listening] = listen(TcpAddress("names", 0))
    listening.close()
    names(monkeypatch, "192.0.2.1")
    with pytest.raises(OSError, match="assign requested address") as caught:
        listen(TcpAddress("names", 0))
    assert caught.value.errno == errno.EADDRNOTAVAIL


def test_port_in_use_closes_the_other_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[socket.socket] = []
    bound = tcp_module._bound

    def remember(*args: object) -> socket.socket:
        opened.append(bound(*args))  # type: ignore[arg-type]
        return opened[-1]

    monkeypatch.setattr(tcp_module, "_bound", remember)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        names(monkeypatch, "127.0.0.2", "127.0.0.1")
        with pytest.raises(OSError, match="in use"):
            listen(TcpAddress("names", port))
    assert [listening.fileno() for listening in opened] == [-1]
