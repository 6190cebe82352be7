"""Addresses that a server can listen on, in the notation of gRPC targets."""

import ipaddress
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote_to_bytes

MAX_PORT = 65535
# sun_path of sockaddr_un has 108 bytes on Linux and 104 on macOS, including the final 0.
MAX_PATH_BYTES = 107 if sys.platform == "linux" else 103
_NAME = re.compile(r"[^\s\[\]:/,]+")
_HOST_AND_PORT = re.compile(r"(?P<host>[^\s\[\]:/]+|\[[\w:.%-]+\]):(?P<port>[0-9]{1,5})")
_UNIX, _ABSTRACT = "unix:", "unix-abstract:"
_SAFE = "/@+,=~"  # characters that gRPC does not require to be escaped, in addition to "_.-"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A host and a port. Port 0 selects a free port."""

    host: str
    port: int

    def __str__(self) -> str:
        """Return the gRPC target."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A Unix socket file with an absolute path."""

    path: Path

    def __str__(self) -> str:
        """Return the gRPC target, percent-encoded because gRPC ends a path at `?` and `#`."""
        return _UNIX + quote(os.fsencode(self.path), safe=_SAFE)


@dataclass(frozen=True, slots=True)
class AbstractAddress:
    """A name in Linux's abstract socket namespace."""

    name: bytes

    def __str__(self) -> str:
        """Return the gRPC target."""
        return _ABSTRACT + quote(self.name, safe=_SAFE)


Address = TcpAddress | UnixAddress | AbstractAddress


def parse_address(text: str) -> Address:
    """Parse `HOST:PORT`, `unix:PATH` or `unix-abstract:NAME`. Paths and names are percent-decoded.

    Raises:
        ValueError: The address is invalid or too long. The message is worded to follow an option name.
    """
    if text.startswith(_ABSTRACT):
        return _abstract(unquote_to_bytes(text.removeprefix(_ABSTRACT)))
    if text.startswith(_UNIX):
        return _unix(text.removeprefix(_UNIX))
    parts = _HOST_AND_PORT.fullmatch(text)
    if parts is None or int(parts["port"]) > MAX_PORT:
        raise ValueError(
            f"is {text!r}: use HOST:PORT with a port from 0 to {MAX_PORT}, unix:PATH or unix-abstract:NAME"
        )
    return TcpAddress(parts["host"].removeprefix("[").removesuffix("]"), int(parts["port"]))


def tcp_address(host: str, port: int) -> TcpAddress:
    """Return the address of a host, which may be an IPv6 address in brackets.

    Raises:
        ValueError: It is not a host. The message is worded to follow an option name.
    """
    name = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not _is_ipv6(name) and not _NAME.fullmatch(host):
        raise ValueError(
            f"is {host!r}: use one address or name without a port, such as 127.0.0.1, 0.0.0.0 for all "
            "interfaces, or :: for all interfaces with IPv4 and IPv6"
        )
    return TcpAddress(name, port)


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def _unix(text: str) -> UnixAddress:
    if text.startswith("//") and not text.startswith("///"):
        raise ValueError(f"is 'unix:{text}': start the path with one or three slashes")
    path = unquote_to_bytes(text.removeprefix("//"))
    if not path or b"\0" in path:
        raise ValueError(f"is 'unix:{text}': use a path after unix:, such as unix:/run/attnlens.sock")
    whole = os.path.abspath(path)  # noqa: PTH100 - Path.resolve would follow links
    _check_length("path", whole)
    return UnixAddress(Path(os.fsdecode(whole)))


def _abstract(name: bytes) -> AbstractAddress:
    if sys.platform != "linux":
        raise ValueError("is unix-abstract: abstract sockets exist only on Linux, use unix:PATH")
    if not name or b"\0" in name:
        raise ValueError("is unix-abstract: without a name: add one, such as unix-abstract:attnlens")
    _check_length("name", name)
    return AbstractAddress(name)


def _check_length(what: str, name: bytes) -> None:
    if len(name) > MAX_PATH_BYTES:
        raise ValueError(
            f"has a {what} of {len(name)} bytes, {os.fsdecode(name)!r}: the limit for "
            f"sockets is {MAX_PATH_BYTES}, choose a shorter one"
        )
