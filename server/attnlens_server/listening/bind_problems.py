"""Reasons for bind errors, which gRPC does not report."""

import errno
import socket
from typing import Any

from attnlens_server.listening.address import AbstractAddress, TcpAddress

PRIVILEGED_PORTS = 1024
_IN_USE = "another program listens there. Stop it, or choose another"


def find_bind_problem(address: TcpAddress | AbstractAddress, option: str = "port") -> str:
    """Bind an address again and return why the system rejects it, with a remedy.

    Args:
        address: Address that gRPC could not bind.
        option: Name of the option that specifies the port.
    """
    try:
        for family, name in _names(address):
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(name)
    except OSError as error:
        return bind_problem(error, address, option)
    return "the address is available now: try again"


def bind_problem(error: OSError, address: TcpAddress | AbstractAddress, option: str = "port") -> str:
    """Return a user-facing message for an error of `bind`."""
    if isinstance(address, AbstractAddress):
        in_use = error.errno == errno.EADDRINUSE
        return f"{_IN_USE} name" if in_use else error.strerror or str(error)
    if isinstance(error, socket.gaierror):
        return f"{address.host!r} is not an address of this machine ({error})"
    reasons = {
        errno.EADDRINUSE: f"{_IN_USE} --{option}, or 0 for a free one",
        errno.EADDRNOTAVAIL: (
            "no interface of this machine has that address. Use 127.0.0.1 to accept connections from this "
            "machine only, or 0.0.0.0 for all interfaces"
        ),
    }
    if address.port < PRIVILEGED_PORTS:
        reasons[errno.EACCES] = (
            f"ports below {PRIVILEGED_PORTS} require a privilege. Choose a higher --{option}, or grant the "
            "process CAP_NET_BIND_SERVICE"
        )
    return reasons.get(error.errno or 0, error.strerror or str(error))


def _names(address: TcpAddress | AbstractAddress) -> list[tuple[int, Any]]:
    if isinstance(address, AbstractAddress):
        return [(socket.AF_UNIX, b"\0" + address.name)]
    addresses = socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    return [(family, name) for family, _, _, _, name in addresses]
