"""Identifies the senders of HTTP requests."""

import hashlib
import ssl
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Protocol

from starlette.types import Scope

from attnlens_server.access import Access, Caller, name_in_certificate
from attnlens_server.access.keys import KeyRing
from attnlens_server.clients import BULK, PRIORITY, Client, client_at
from attnlens_server.errors import UnauthenticatedError
from attnlens_server.http_api.listener import TLS

Authenticate = Callable[[Mapping[str, str]], Client | None]
"""Returns the sender of a request with these headers (by lower-case name), or None for an anonymous one.

Raises UnauthenticatedError unless the headers contain valid credentials.
"""


class Gate(Protocol):
    """Access control for HTTP requests."""

    @property
    def needs_key(self) -> bool:
        """Whether requests need a key."""

    @property
    def has_open_health(self) -> bool:
        """Whether health checks need no credentials."""

    def identify(
        self, scope: Scope, headers: Mapping[str, str], peer: str, methods: tuple[str, ...]
    ) -> Client:
        """Return the sender of a request to a route with these methods.

        Raises:
            UnauthenticatedError, PermissionDeniedError: See `Access.identify`.
        """


class AccessGate:
    """The access control of the server, with its keys, certificates and policy."""

    def __init__(self, access: Access) -> None:
        self._access = access

    @property
    def needs_key(self) -> bool:
        """Whether requests need a key."""
        return self._access.needs_key

    @property
    def has_open_health(self) -> bool:
        """Whether health checks need no credentials."""
        return self._access.has_open_health

    def identify(
        self, scope: Scope, headers: Mapping[str, str], peer: str, methods: tuple[str, ...]
    ) -> Client:
        """Return the sender of a request."""
        caller = Caller(
            peer,
            headers.get("authorization", ""),
            headers.get(PRIORITY) == BULK,
            lambda: _certificate_name(scope.get(TLS)),
        )
        return self._access.identify(caller, methods)


class HeaderGate:
    """Access control by a function of the headers."""

    needs_key = True
    has_open_health = True

    def __init__(self, authenticate: Authenticate) -> None:
        self._authenticate = authenticate

    def identify(
        self, scope: Scope, headers: Mapping[str, str], peer: str, methods: tuple[str, ...]
    ) -> Client:
        """Return the sender of a request."""
        del scope, methods
        client = self._authenticate(headers) or client_at(peer)
        return replace(client, is_bulk=True) if headers.get(PRIORITY) == BULK else client


def bearer_keys(keys: Collection[str]) -> Authenticate:
    """Return a function that accepts requests with one of the keys: `Authorization: Bearer KEY`.

    Clients are named after a hash of their key, which reveals nothing about a random key. For other names,
    use `api_keys` of `ServerConfig`.

    Args:
        keys: Valid keys.

    Raises:
        ValueError: `keys` is empty, or contains an empty key.
    """
    encoded = [key.encode() for key in keys]
    if not all(encoded) or not encoded:
        raise ValueError("keys is empty, or contains an empty key: pass at least one key")
    digests = [hashlib.sha256(key).digest() for key in encoded]
    ring = KeyRing({digest: f"key-{digest.hex()[:8]}" for digest in digests})

    def authenticate(headers: Mapping[str, str]) -> Client:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            raise UnauthenticatedError("the key is missing: send the header `Authorization: Bearer KEY`")
        name = ring.name_of(key.strip().encode("latin-1"))
        if not name:
            raise UnauthenticatedError("the key is invalid: send one of the server's keys")
        return Client(name, is_identified=True)

    return authenticate


def _certificate_name(connection: ssl.SSLObject | None) -> str:
    """Return the name in the client certificate, or an empty string."""
    shown: Any = connection.getpeercert() if connection is not None else None
    if not shown:
        return ""
    alternatives = [
        [value for kind, value in shown.get("subjectAltName", ()) if kind == wanted]
        for wanted in ("URI", "DNS", "email")
    ]
    common = [value for part in shown.get("subject", ()) for kind, value in part if kind == "commonName"]
    return name_in_certificate(*alternatives, common)
