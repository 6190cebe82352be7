"""TLS and client certificates."""

import http.client
import ssl
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens_server.config import ServerConfig
from attnlens_server.errors import StartupError
from attnlens_server.listening.tls import ServerTls, tls_context
from attnlens_server.server import Server, _credentials
from served import ServerProcess


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def tls_args(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("tls")
    identity = authority.issue_cert("127.0.0.1", "localhost")
    identity.private_key_pem.write_to_path(directory / "key.pem")
    identity.cert_chain_pems[0].write_to_path(directory / "cert.pem")
    authority.cert_pem.write_to_path(directory / "ca.pem")
    return ["--tls-cert", str(directory / "cert.pem"), "--tls-key", str(directory / "key.pem")]


def open_tls(cert: Path, key: Path) -> ServerTls:
    tls = ServerTls(cert, key, None)
    tls.use(tls.load())
    return tls


def test_invalid_certificate_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "cert.pem"
    path.write_text("garbage")
    with pytest.raises(StartupError, match=f"{path} has no PEM CERTIFICATE"):
        open_tls(path, path)


def test_incomplete_pem_file_is_reported_by_name(tls_args: list[str], tmp_path: Path) -> None:
    cert, key = Path(tls_args[1]), Path(tls_args[3])
    other = tmp_path / "other.pem"
    trustme.CA().issue_cert("localhost").private_key_pem.write_to_path(other)
    damaged = tmp_path / "damaged.pem"
    damaged.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    for files, message in (
        ((key, key, None), f"^{key} has no PEM CERTIFICATE"),
        ((cert, cert, None), f"^{cert} has no PEM PRIVATE KEY"),
        ((cert, tmp_path / "none.pem", None), r"^cannot read the PEM file .*none\.pem: No such file"),
        ((cert, other, None), f"^{other} is not the private key of {cert}"),
        ((damaged, key, None), f"^{damaged} or {key} is not valid PEM"),
        ((cert, key, key), f"^{key} has no PEM CERTIFICATE"),
        ((cert, key, damaged), f"^{damaged} is not valid PEM"),
    ):
        with pytest.raises(StartupError, match=message):
            tls_context(*files)


def test_key_with_a_passphrase_is_rejected_without_a_prompt(tls_args: list[str], tmp_path: Path) -> None:
    cert, plain = Path(tls_args[1]), Path(tls_args[3])
    key = load_pem_private_key(plain.read_bytes(), None)
    locked = tmp_path / "locked.pem"
    secret = BestAvailableEncryption(b"secret")
    locked.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, secret))
    with pytest.raises(StartupError, match=r"locked\.pem is encrypted.*openssl pkey"):
        open_tls(cert, locked)


@pytest.mark.parametrize(
    ("from_days", "to_days", "message"),
    [(-2, -1, "certificate has expired"), (1, 2, "certificate is not yet valid"), (-1, 1, None)],
)
def test_expired_or_future_certificate_logs_a_warning(
    authority: trustme.CA,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    from_days: int,
    to_days: int,
    message: str | None,
) -> None:
    now = datetime.now(UTC)
    first, last = now + timedelta(days=from_days), now + timedelta(days=to_days)
    identity = authority.issue_cert("localhost", not_before=first, not_after=last)
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    identity.cert_chain_pems[0].write_to_path(cert)
    identity.private_key_pem.write_to_path(key)
    assert _credentials(open_tls(cert, key)) is not None
    warnings = [f"clients will reject {cert}: {message}"] if message else []
    if to_days > 0:
        warnings.append(
            f"{cert} expires in {to_days}.0 days: replace it and its key, and the server will use them"
        )
    assert [each.getMessage() for each in caplog.records] == warnings


def list_models(address: str, credentials: grpc.ChannelCredentials) -> int:
    with grpc.secure_channel(address, credentials) as channel:
        return len(EncoderServiceStub(channel).ListModels(pb.ListModelsRequest(), timeout=20).models)


def test_server_with_a_certificate_accepts_only_tls(
    minilm_bundle: Path, authority: trustme.CA, tls_args: list[str]
) -> None:
    roots = authority.cert_pem.bytes()
    with ServerProcess(minilm_bundle, *tls_args) as server:
        assert list_models(server.address, grpc.ssl_channel_credentials(roots)) == 1
        with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError):
            EncoderServiceStub(channel).ListModels(pb.ListModelsRequest(), timeout=20)


async def test_unix_socket_supports_tls(
    minilm_bundle: Path, authority: trustme.CA, tls_args: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("s") / "a.sock"
    cert, key = Path(tls_args[1]), Path(tls_args[3])
    server = Server(ServerConfig(bundle=minilm_bundle, address=f"unix:{path}", tls_cert=cert, tls_key=key))
    grpc_server, address = await server._listen()
    trusting = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    named = [("grpc.ssl_target_name_override", "localhost")]  # gRPC uses the path as the host name
    codes = []
    for channel in (grpc.aio.secure_channel(address, trusting, named), grpc.aio.insecure_channel(address)):
        async with channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await EncoderServiceStub(channel).ListModels(pb.ListModelsRequest(), timeout=20)
            codes.append(dict(caught.value.trailing_metadata()).get("attnlens-error-reason"))
    await server._shut_down(grpc_server)
    # The server, which is not warm yet, rejects the first call. The plaintext call does not reach it.
    assert codes == ["NOT_READY", None]
    assert not path.exists()


def test_client_authority_requires_client_certificates(
    minilm_bundle: Path, authority: trustme.CA, tls_args: list[str]
) -> None:
    roots = authority.cert_pem.bytes()
    client = authority.issue_cert("client.example")
    known = grpc.ssl_channel_credentials(
        roots, client.private_key_pem.bytes(), client.cert_chain_pems[0].bytes()
    )
    client_ca = str(Path(tls_args[1]).with_name("ca.pem"))
    with ServerProcess(minilm_bundle, *tls_args, "--tls-client-ca", client_ca) as server:
        assert list_models(server.address, known) == 1
        with pytest.raises(grpc.RpcError):
            list_models(server.address, grpc.ssl_channel_credentials(roots))


def test_viewer_uses_tls_and_requires_the_same_certificates(
    minilm_bundle: Path, tls_args: list[str], authority: trustme.CA
) -> None:
    roots = str(Path(tls_args[1]).with_name("ca.pem"))
    args = [*tls_args, "--tls-client-ca", roots, "--http-port", "0"]
    stranger, known = ssl.create_default_context(cafile=roots), ssl.create_default_context(cafile=roots)
    authority.issue_cert("browser").configure_cert(known)
    with ServerProcess(minilm_bundle, *args) as server:
        url = server.http_url()
        assert url.startswith("https://127.0.0.1:")
        with urllib.request.urlopen(url, context=known, timeout=30) as reply:
            assert reply.status == 200
        with pytest.raises((ssl.SSLError, urllib.error.URLError, ConnectionResetError)):
            urllib.request.urlopen(url, context=stranger, timeout=30)
        with pytest.raises((urllib.error.URLError, ConnectionResetError, http.client.BadStatusLine)):
            urllib.request.urlopen(url.replace("https", "http"), timeout=30)
