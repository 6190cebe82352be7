"""Who sends a request: an identity or, without access control, an address."""

from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import IPv6Address, IPv6Network
from urllib.parse import unquote

from attnlens_server.rates import RateLimits


@dataclass(frozen=True, slots=True)
class Client:
    """Sender of requests. Clients share the queue and the memory of the server fairly.

    Attributes:
        name: Name of an identity, or an IP address (of IPv6, its network).
        share: Weight of the client relative to others.
        is_bulk: Whether its texts run after texts of interactive clients.
        is_identified: Whether the name was authenticated.
        rates: Rate limits, or None.
        denied: Methods that the policy denies to it.
    """

    name: str
    share: float = 1.0
    is_bulk: bool = False
    is_identified: bool = False
    rates: RateLimits | None = field(default=None, compare=False, repr=False)
    denied: frozenset[str] = field(default=frozenset(), compare=False, repr=False)


ANONYMOUS = Client("")
PRIORITY, BULK = "attnlens-priority", "bulk"
"""gRPC metadata or HTTP header, and its value, with which a client lets interactive clients go first."""


@lru_cache(maxsize=4096)
def client_at(peer: str) -> Client:
    """Return the client at an address, given as gRPC or `RequestRecord` describe it. Ports are ignored."""
    return client_at_host(host_of(peer))


@lru_cache(maxsize=4096)
def client_at_host(host: str) -> Client:
    """Return the client at an IP address without a port.

    An IPv6 network of 64 bits is one client: its owner can use another address for each call.
    """
    try:
        address = IPv6Address(host)
    except ValueError:
        return Client(host)
    if address.ipv4_mapped is not None:
        return Client(str(address.ipv4_mapped))
    if address.is_link_local or address.is_loopback:  # different machines have the same first 64 bits
        return Client(host)
    return Client(str(IPv6Network((address, 64), strict=False)))


def host_of(peer: str) -> str:
    """Return the IP address of a peer, or `unix`."""
    address = unquote(peer).removeprefix("ipv4:").removeprefix("ipv6:")
    if address.startswith("unix"):
        return "unix"
    return (address.rpartition(":")[0] or address).strip("[]")[:64]
