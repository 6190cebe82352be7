"""Validation of TLS certificates and keys, because gRPC does not report why it rejects them."""

import ssl
from contextlib import suppress
from pathlib import Path

from attnlens_server.errors import StartupError

_DATE_ERRORS = (9, 10)  # X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL


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
    """Return why a certificate is not valid now, or None if it is, from an in-memory handshake."""
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.check_hostname = False
    client_context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate itself is trusted
    client_context.load_verify_locations(certificate)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    try:
        for side in (client, server, client):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLCertVerificationError as error:
        return error.verify_message if error.verify_code in _DATE_ERRORS else None
    except ssl.SSLError:  # clients and gRPC report other problems
        return None
    return None
