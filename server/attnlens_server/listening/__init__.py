"""Server addresses: parsing, Unix socket files, TLS files and bind errors."""

from attnlens_server.listening.address import AbstractAddress, Address, TcpAddress, UnixAddress, parse_address
from attnlens_server.listening.troubles import why_not
from attnlens_server.listening.unix_socket import UnixSocket

__all__ = [
    "AbstractAddress",
    "Address",
    "TcpAddress",
    "UnixAddress",
    "UnixSocket",
    "parse_address",
    "why_not",
]
