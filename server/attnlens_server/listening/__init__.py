"""Server addresses: parsing, Unix socket files, TLS files and bind errors."""

from attnlens_server.listening.address import AbstractAddress, Address, TcpAddress, UnixAddress, parse_address
from attnlens_server.listening.bind_problems import find_bind_problem
from attnlens_server.listening.unix_socket import UnixSocket

__all__ = [
    "AbstractAddress",
    "Address",
    "TcpAddress",
    "UnixAddress",
    "UnixSocket",
    "find_bind_problem",
    "parse_address",
]
