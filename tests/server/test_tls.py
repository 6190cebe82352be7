"""Encryption, and clients that must identify themselves."""

from pathlib import Path

import grpc
import pytest
import trustme

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
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


def list_models(address: str, credentials: grpc.ChannelCredentials) -> int:
    with grpc.secure_channel(address, credentials) as channel:
        return len(EncoderServiceStub(channel).ListModels(pb.ListModelsRequest(), timeout=20).models)


def test_a_server_with_a_certificate_speaks_tls_and_nothing_else(
    minilm_bundle: Path, authority: trustme.CA, tls_args: list[str]
) -> None:
    roots = authority.cert_pem.bytes()
    with ServerProcess(minilm_bundle, *tls_args) as server:
        assert list_models(server.address, grpc.ssl_channel_credentials(roots)) == 1
        with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError):
            EncoderServiceStub(channel).ListModels(pb.ListModelsRequest(), timeout=20)


def test_with_a_client_authority_only_clients_with_a_certificate_are_heard(
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
