"""Who sends a request: an identity or, without access control, an address."""

from dataclasses import dataclass, field
from functools import lru_cache
from urllib.parse import unquote

from attnlens_server.rates import RateLimits


@dataclass(frozen=True, slots=True)
class Client:
    """Sender of requests. Clients share the queue and the memory of the server fairly.

    Attributes:
        name: Name of an identity, or an address without port.
        share: Weight of the client relative to others.
        is_bulk: Whether its texts wait for those of interactive clients.
        is_identified: Whether the name was authenticated.
        rates: Rate limits. If None, there are none.
    """

    name: str
    share: float = 1.0
    is_bulk: bool = False
    is_identified: bool = False
    rates: RateLimits | None = field(default=None, compare=False, repr=False)


ANONYMOUS = Client("")
PRIORITY, BULK = "attnlens-priority", "bulk"
"""gRPC metadata or HTTP header, and its value, with which a client lets interactive clients go first."""


@lru_cache(maxsize=4096)
def client_at(peer: str) -> Client:
    """Return the client at an address, given as gRPC or `RequestRecord` describe it. Ports are ignored."""
    address = unquote(peer).removeprefix("ipv4:").removeprefix("ipv6:")
    if address.startswith("unix"):
        return Client("unix")
    host = address.rpartition(":")[0] or address
    return Client(host.strip("[]")[:64])
