"""TLS from PEM files, and what is wrong with them: gRPC does not say."""

import ssl
from contextlib import suppress
from pathlib import Path

from attnlens_server.errors import StartupError

_DATE_ERRORS = (9, 10)  # X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL


def tls_context(certificate: Path, key: Path, client_ca: Path | None) -> ssl.SSLContext:
    """Return the standard library's TLS of PEM files; with `client_ca` clients must show a certificate.

    Raises:
        StartupError: a file can't be used.
    """

    def refuse_passphrase() -> str:  # without it, the library asks on the terminal
        raise StartupError(
            f"{key} is encrypted with a passphrase, and nobody can be asked for it: decrypt it with "
            "`openssl pkey -in KEY -out NEW_KEY`, and let only the server's user read the new file"
        )

    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate, key, refuse_passphrase)
        if client_ca is not None:
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:
        files = ", ".join(str(path) for path in (certificate, key, client_ca) if path)
        raise StartupError(f"can't use the PEM files {files}: {error}") from error
    return context


def validity_trouble(server_context: ssl.SSLContext, certificate: Path) -> str | None:
    """Return what is wrong with the dates of a certificate, by a handshake with ourselves, in memory."""
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
    except ssl.SSLError:  # what else may be wrong, clients and gRPC will say
        return None
    return None
