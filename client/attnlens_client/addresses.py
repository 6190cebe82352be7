"""Addresses of servers, their gRPC targets, and proxies of the environment."""

import os
import re
import socket
import sys
from collections.abc import Sequence
from ipaddress import ip_address, ip_network
from urllib.parse import unquote_to_bytes, urlsplit

_HOST_AND_PORT = re.compile(r"([\w.-]+|\[[\w:.%-]+\]):([0-9]{1,5})")
_OTHER_TARGET = re.compile(r"(?:unix|unix-abstract|dns|ipv4|ipv6|vsock|xds):.+")
_MAX_PORT = 65535
# sun_path of sockaddr_un has 108 bytes on Linux and 104 on macOS, including a terminating zero.
_MAX_PATH_BYTES = 107 if sys.platform == "linux" else 103


def checked_address(address: str | Sequence[str]) -> str:
    """Validate an address, or the addresses of several servers, and return them separated by commas.

    gRPC would replace an invalid port by 443, or by the port modulo 65536.

    Raises:
        TypeError: `address` is neither a str nor a sequence of str.
        ValueError: `address` is invalid, or a socket path is too long.
    """
    addresses = [address] if isinstance(address, str) else address
    if not isinstance(addresses, list | tuple) or not all(isinstance(each, str) for each in addresses):
        raise TypeError(f"address is {address!r}: use a str, HOST:PORT or unix:PATH, or a list of HOST:PORT")
    joined = ",".join(addresses)
    if not (_OTHER_TARGET.fullmatch(joined) or all(map(_is_host_and_port, joined.split(",")))):
        raise ValueError(
            f"address is {joined!r}: use HOST:PORT with a port from 1 to {_MAX_PORT}, several of them "
            "separated by commas, or unix:PATH"
        )
    num_bytes = len(unquote_to_bytes(joined.removeprefix("unix:").removeprefix("//")))
    if joined.startswith("unix:") and num_bytes > _MAX_PATH_BYTES:
        raise ValueError(
            f"address has a path of {num_bytes} bytes, {joined!r}, but the limit for sockets is "
            f"{_MAX_PATH_BYTES}: use a relative or a shorter path"
        )
    return joined


def _is_host_and_port(address: str) -> bool:
    parts = _HOST_AND_PORT.fullmatch(address)
    return parts is not None and 1 <= int(parts[2]) <= _MAX_PORT


def has_several(address: str) -> bool:
    """Return whether a valid address may stand for several servers: a list, or a name for DNS."""
    if parts := _HOST_AND_PORT.fullmatch(address):
        return parts[1] != "localhost" and not _is_ip(parts[1])
    if address.startswith(("ipv4:", "ipv6:")):
        return "," in address
    return address.startswith("dns:") or not _OTHER_TARGET.fullmatch(address)


def _is_ip(host: str) -> bool:
    try:
        ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def grpc_target(address: str) -> str:
    """Return the gRPC target of a valid address.

    gRPC lists can only contain IP addresses, so names in a list are resolved here, once. Names that cannot be
    resolved are omitted. If none can, the first call reports the error.
    """
    servers = address.split(",")
    if len(servers) == 1 or _OTHER_TARGET.fullmatch(address):
        return address
    found = [ip for server in servers for ip in _resolved(server)]
    if not found:
        return servers[0]
    if all(":" not in host for host, _ in found):
        return "ipv4:" + ",".join(f"{host}:{port}" for host, port in found)
    # A target has addresses of one kind. IPv4 addresses have an IPv6 form.
    return "ipv6:" + ",".join(f"[{host if ':' in host else f'::ffff:{host}'}]:{port}" for host, port in found)


def _resolved(server: str) -> list[tuple[str, int]]:
    """Return the distinct IP addresses of a server, with its port."""
    host, _, port = server.rpartition(":")
    try:
        infos = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [(str(ip), int(port)) for ip in dict.fromkeys(info[4][0] for info in infos)]


def single_targets(address: str) -> list[str]:
    """Return one gRPC target for each IP address of host names, or the address if it has no names."""
    parts = _HOST_AND_PORT.fullmatch(address)
    if _OTHER_TARGET.fullmatch(address) or (parts and _is_ip(parts[1])):
        return [address]
    found = [ip for server in address.split(",") for ip in _resolved(server)]
    return [f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}" for host, port in found]


def environment_proxy(address: str) -> str:
    """Return the proxy that gRPC uses for a valid address, with the variable that names it, or ""."""
    if address.startswith(("unix", "vsock")):
        return ""
    # As in gRPC: the first of these variables applies, and capitalized ones are ignored.
    name = next((name for name in ("grpc_proxy", "https_proxy", "http_proxy") if os.environ.get(name)), "")
    proxy = urlsplit(os.environ.get(name, ""))
    excluded = next(filter(None, map(os.environ.get, ("no_grpc_proxy", "no_proxy"))), "")
    first, _, _ = address.partition(",")
    host = re.sub("^(dns|ipv4|ipv6):(//[^/]*/)?", "", first).rpartition(":")[0].strip("[]")
    if proxy.scheme != "http" or any(_excludes(entry.strip(), host) for entry in excluded.split(",")):
        return ""
    return f"{proxy.netloc.rpartition('@')[2]} of the environment variable {name}"  # without the password


def _excludes(entry: str, host: str) -> bool:
    """Return whether an entry of no_proxy, the end of a name or a network, contains a host."""
    if not entry:
        return False
    try:
        return ip_address(host) in ip_network(entry, strict=False)
    except ValueError:
        return host.lower().endswith(entry.lower())
