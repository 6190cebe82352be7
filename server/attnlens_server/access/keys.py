"""API keys. The server stores only their SHA-256, which suffices for random keys of 256 bits."""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path

from attnlens_server.errors import StartupError

RESERVED = frozenset({"anonymous", "other"})  # metrics use these names for other clients
NAME = re.compile(rf"(?!(?:{'|'.join(sorted(RESERVED))})$)[A-Za-z0-9][A-Za-z0-9._@-]{{0,63}}")
NAME_RULE = (
    "use up to 64 letters, digits and . _ @ -, with a letter or digit first, except for anonymous and other"
)
_LINE = re.compile(r"(\S+)\s+sha256:([0-9a-f]{64})")
_KEY_BYTES = 32
_SHOWN_CHARACTERS = 40


class KeyRing:
    """Finds the name of a key.

    A key is looked up by a keyed hash of its digest. Its hash key is random and known only to this process,
    so the duration of a lookup reveals nothing about digests, and it is the same for any number of keys.

    Args:
        names: Names by the SHA-256 of a key.
    """

    def __init__(self, names: Mapping[bytes, str]) -> None:
        self._secret = secrets.token_bytes(_KEY_BYTES)
        self._entries = {self._index(digest): (digest, name) for digest, name in names.items()}
        self._missing = (bytes(_KEY_BYTES), "")

    def name_of(self, key: bytes) -> str:
        """Return the name of a key. Empty if the key is invalid."""
        digest = hashlib.sha256(key).digest()
        known, name = self._entries.get(self._index(digest), self._missing)
        return name if hmac.compare_digest(known, digest) else ""

    def digests_by_name(self) -> dict[str, frozenset[bytes]]:
        """Return the digests of each name."""
        digests: dict[str, set[bytes]] = {}
        for digest, name in self._entries.values():
            digests.setdefault(name, set()).add(digest)
        return {name: frozenset(own) for name, own in digests.items()}

    @property
    def names(self) -> frozenset[str]:
        """Names of all keys."""
        return frozenset(name for _, name in self._entries.values())

    def _index(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, digest_size=16, key=self._secret).digest()


def new_key(name: str) -> tuple[str, str]:
    """Return a new random key and its line in a key file.

    Raises:
        ValueError: The name is invalid.
    """
    if not NAME.fullmatch(name):
        raise ValueError(f"{name[:_SHOWN_CHARACTERS]!r} is not a valid name: {NAME_RULE}")
    key = secrets.token_urlsafe(_KEY_BYTES)
    return key, f"{name} sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def read_keys(path: Path) -> KeyRing:
    """Read a key file: lines `NAME sha256:HEX`, empty lines, and comments after `#`.

    Raises:
        StartupError: The file cannot be read or has an invalid line. Lines are not quoted, because they may
            contain keys.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise StartupError(f"cannot read the API keys in {path}: {reason}") from error
    names: dict[bytes, str] = {}
    for number, line in enumerate(_contents(lines), 1):
        if not line:
            continue
        where, match = f"{path}, line {number}", _LINE.fullmatch(line)
        if match is None:
            raise StartupError(
                f"{where} is not NAME sha256:HEX with 64 lower-case hexadecimal digits: create it with "
                "`attnlens key NAME`"
            )
        name, digest = match[1], bytes.fromhex(match[2])
        if not NAME.fullmatch(name):
            raise StartupError(f"{where} has an invalid name: {NAME_RULE}")
        if digest in names:
            raise StartupError(f"{where} repeats the key of {names[digest]}: remove one of the lines")
        names[digest] = name
    if not names:
        raise StartupError(f"{path} contains no API key: add the output of `attnlens key NAME`")
    return KeyRing(names)


def _contents(lines: Iterable[str]) -> Iterable[str]:
    return (line.partition("#")[0].strip() for line in lines)
