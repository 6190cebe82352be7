"""Authentication by keys."""

import hmac
from collections.abc import Collection, Mapping

from attnlens_server.errors import UnauthenticatedError
from attnlens_server.http_api.app import Authenticate


def bearer_keys(keys: Collection[str]) -> Authenticate:
    """Return a function that accepts requests with one of the keys: `Authorization: Bearer KEY`.

    The comparison takes the same time for each key, so that its duration reveals nothing about them.

    Args:
        keys: Valid keys.

    Raises:
        ValueError: There are no keys, or one is empty.
    """
    encoded = [key.encode() for key in keys]
    if not all(encoded) or not encoded:
        raise ValueError("keys is empty, or contains an empty key: pass at least one key")

    def authenticate(headers: Mapping[str, str]) -> None:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            raise UnauthenticatedError("the key is missing: send the header `Authorization: Bearer KEY`")
        sent = key.strip().encode("latin-1")
        if not any([hmac.compare_digest(sent, valid) for valid in encoded]):  # noqa: C419 - compare all of them
            raise UnauthenticatedError("the key is invalid: send one of the server's keys")

    return authenticate
