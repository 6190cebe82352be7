"""Listening TCP sockets."""

import errno
import socket
from contextlib import ExitStack
from typing import Any

from attnlens_server.listening.address import TcpAddress

BACKLOG = 1024
# The machine lacks a family of addresses, such as IPv6 for `localhost`.
_UNAVAILABLE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def listen(address: TcpAddress) -> list[socket.socket]:
    """Return a non-blocking socket for each address of a host, all with the same port.

    As in gRPC, `::` accepts IPv4 and IPv6.

    Raises:
        OSError: An address cannot be bound.
    """
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    port, sockets, problem = address.port, list[socket.socket](), OSError(errno.EADDRNOTAVAIL, "no address")
    with ExitStack() as stack:
        for family, _, _, _, (host, _, *scope) in dict.fromkeys(found):
            try:
                listening = _bound(family, (host, port, *scope))
            except OSError as error:
                if error.errno not in _UNAVAILABLE:
                    raise
                problem = error
                continue
            sockets.append(stack.enter_context(listening))
            port = listening.getsockname()[1]
        if not sockets:
            raise problem
        stack.pop_all()
    return sockets


def _bound(family: int, name: tuple[Any, ...]) -> socket.socket:
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, name[0] != "::")
        listening.bind(name)
        listening.listen(BACKLOG)
        listening.setblocking(False)  # noqa: FBT003 - the name of the standard library
    except BaseException:
        listening.close()
        raise
    return listening
