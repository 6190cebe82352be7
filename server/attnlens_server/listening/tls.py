"""Validation of TLS certificates and keys, because gRPC does not report why it rejects them."""

import logging
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from attnlens_server.errors import StartupError

logger = logging.getLogger(__name__)

WARNING_DAYS = 14
"""A certificate that expires within this time is reported once a day."""
_DAY_S = 86_400
_DATE_ERRORS = (9, 10)  # X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL
_NO_CHECK_TIME = 0x20_0000  # X509_V_FLAG_NO_CHECK_TIME of OpenSSL


@dataclass(frozen=True, slots=True)
class TlsContent:
    """Content of the TLS files.

    Attributes:
        context: SSL context for new connections.
        certificate: Certificate chain in PEM format.
        key: Private key in PEM format.
        client_ca: Root certificates of clients in PEM format, or None.
        expires_at: When the certificate expires, in seconds since the epoch. None if unknown.
    """

    context: ssl.SSLContext
    certificate: bytes
    key: bytes
    client_ca: bytes | None
    expires_at: float | None


class ServerTls:
    """TLS files of a server, which are replaced while it runs. New connections use the new ones.

    Args:
        certificate: File with the certificate chain.
        key: File with the private key.
        client_ca: File with the root certificates of clients, or None.

    Attributes:
        files: Paths of all files.
        context: SSL context for asyncio, whose connections use the current content.
        content: Current content. Set by `use`.
    """

    content: TlsContent

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None) -> None:
        self._paths = certificate, key, client_ca
        self.files = [path for path in self._paths if path is not None]
        self.context: ssl.SSLContext = _CurrentContext(lambda: self.content.context)
        self._warned_at = -float("inf")

    @property
    def expires_at(self) -> float | None:
        """When the certificate expires, in seconds since the epoch. None if unknown."""
        return self.content.expires_at

    def load(self) -> TlsContent:
        """Read the files.

        Raises:
            StartupError: A file is missing or invalid.
        """
        certificate, key, client_ca = self._paths
        context = tls_context(certificate, key, client_ca)
        roots = client_ca.read_bytes() if client_ca else None
        expires_at = expiry(context, certificate)
        return TlsContent(context, certificate.read_bytes(), key.read_bytes(), roots, expires_at)

    def use(self, content: TlsContent) -> None:
        """Use this content for new connections, and log if clients will reject the certificate."""
        is_first = not hasattr(self, "content")
        self.content = content
        if problem := validity_problem(content.context, self._paths[0]):
            logger.warning("clients will reject %s: %s", self._paths[0], problem)
        elif not is_first:
            logger.info("new certificate", extra={"file": str(self._paths[0])})
        self._warned_at = -float("inf")
        self.check_expiry()

    def check_expiry(self) -> None:
        """Log a warning, at most once a day, if the certificate expires soon."""
        now, expires_at = time.time(), self.content.expires_at
        if expires_at is None or not now < expires_at < now + WARNING_DAYS * _DAY_S:
            return
        if now - self._warned_at >= _DAY_S:
            self._warned_at = now
            days = (expires_at - now) / _DAY_S
            logger.warning(
                "%s expires in %.1f days: replace it and its key, and the server will use them",
                self._paths[0],
                days,
            )


class _CurrentContext(ssl.SSLContext):
    """Context of a listening socket, whose new connections use the current content.

    They share nothing with the previous one: a client that was accepted before may otherwise resume its
    session although the new client CA does not accept its certificate.
    """

    _current: Callable[[], ssl.SSLContext]

    def __new__(cls, current: Callable[[], ssl.SSLContext]) -> Self:
        """Create a context. `current` returns the one to use."""
        context = super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)
        context._current = current
        return context

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:  # noqa: ANN401 - as asyncio passes them
        """Return a connection. asyncio calls this for each one."""
        return self._current().wrap_bio(*args, **kwargs)


def tls_context(certificate: Path, key: Path, client_ca: Path | None) -> ssl.SSLContext:
    """Load PEM files into an SSL context. With `client_ca`, clients must present a certificate.

    Raises:
        StartupError: A file is missing or invalid.
    """

    def refuse_passphrase() -> str:  # otherwise, the library prompts on the terminal
        raise StartupError(
            f"{key} is encrypted, but the server cannot ask for a passphrase: decrypt it with "
            "`openssl pkey -in KEY -out NEW_KEY`, and let only the server's user read the new file"
        )

    for path, part in ((certificate, "CERTIFICATE"), (key, "PRIVATE KEY"), (client_ca, "CERTIFICATE")):
        if path is not None:
            _check_part(path, part)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key, refuse_passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise StartupError(
                f"{key} is not the private key of {certificate}: use this certificate's key"
            ) from error
        raise StartupError(f"{certificate} or {key} is not valid PEM: write both again ({error})") from error
    if client_ca is not None:
        try:
            context.load_verify_locations(client_ca)
        except ssl.SSLError as error:
            raise StartupError(f"{client_ca} is not valid PEM: write it again ({error})") from error
        context.verify_mode = ssl.CERT_REQUIRED
        # Set by default since Python 3.13: rejects certificates without an authority key identifier, which
        # gRPC accepts.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def _check_part(path: Path, part: str) -> None:
    """Check that a PEM file is readable and contains a part.

    Raises:
        StartupError: The file is not readable or lacks the part.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StartupError(f"cannot read the PEM file {path}: {error.strerror}") from error
    if f"{part}-----".encode() not in content:
        raise StartupError(f"{path} has no PEM {part}: use a file with a line -----BEGIN {part}-----")


def validity_problem(server_context: ssl.SSLContext, certificate: Path) -> str | None:
    """Return why a certificate is not valid now, or None if it is."""
    try:
        _shake_hands(server_context, certificate)
    except ssl.SSLCertVerificationError as error:
        return error.verify_message if error.verify_code in _DATE_ERRORS else None
    except ssl.SSLError:  # clients and gRPC report other problems
        return None
    return None


def expiry(server_context: ssl.SSLContext, certificate: Path) -> float | None:
    """Return when a certificate expires, in seconds since the epoch, or None if its file is unusable."""
    with suppress(ssl.SSLError):
        shown = _shake_hands(server_context, certificate, ssl.VerifyFlags(_NO_CHECK_TIME)).getpeercert()
        if shown:
            return float(ssl.cert_time_to_seconds(str(shown["notAfter"])))
    return None


def _shake_hands(
    server_context: ssl.SSLContext, certificate: Path, flags: ssl.VerifyFlags | None = None
) -> ssl.SSLObject:
    """Return the client's side of a handshake in memory, far enough to know the server's certificate."""
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.check_hostname = False
    client_context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate itself is trusted
    if flags is not None:
        client_context.verify_flags |= flags
    client_context.load_verify_locations(certificate)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client):
        with suppress(ssl.SSLWantReadError):
            side.do_handshake()
    return client
