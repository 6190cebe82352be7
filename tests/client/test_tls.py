"""TLS and mutual TLS, from the client and the command line."""

import subprocess
import sys
from pathlib import Path

import grpc
import pytest
import trustme

from attnlens_client import Client, UnavailableError
from served import ServerProcess


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a certificate for `encoder.test` and `localhost`, its key, and the CA certificate."""
    directory = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    identity = authority.issue_cert("encoder.test", "localhost")
    identity.private_key_pem.write_to_path(directory / "key.pem")
    identity.cert_chain_pems[0].write_to_path(directory / "cert.pem")
    authority.cert_pem.write_to_path(directory / "ca.pem")
    return directory


def test_client_and_server_authenticate_each_other(certificates: Path, minilm_bundle: Path) -> None:
    cert, key, ca = (certificates / name for name in ("cert.pem", "key.pem", "ca.pem"))
    options = ("--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(ca))
    name = [("grpc.ssl_target_name_override", "encoder.test")]
    with ServerProcess(minilm_bundle, *options) as server:
        both = grpc.ssl_channel_credentials(ca.read_bytes(), key.read_bytes(), cert.read_bytes())
        with Client(server.address, credentials=both, channel_options=name) as client:
            assert client.embed(["It rained."]).shape == (1, 384)
        # All servers of a list have a certificate for the name of the first one.
        several = [server.address.replace("127.0.0.1", "localhost"), "127.0.0.1:1"]
        with Client(several, credentials=both, max_attempts=1) as client:
            assert client.embed(["It rained."]).shape == (1, 384)
        anonymous = grpc.ssl_channel_credentials(ca.read_bytes())
        for credentials in (anonymous, None):
            with (
                Client(
                    server.address, credentials=credentials, channel_options=name, max_attempts=1
                ) as client,
                pytest.raises(UnavailableError),
            ):
                client.embed(["It rained."])
        command = [sys.executable, "-m", "attnlens_cli.main", "info", "--json", "--address", server.address]
        files = ["--tls-ca", str(ca), "--tls-cert", str(cert), "--tls-key", str(key)]
        result = subprocess.run(
            [*command, *files, "--tls-server-name", "encoder.test"],
            capture_output=True,
            check=False,
            text=True,
        )
        assert (result.returncode, result.stderr) == (0, "")
        failures: list[tuple[list[str], str]] = [
            ([], "or --tls if the server uses TLS"),
            (["--tls"], "is not signed by a trusted CA: use the certificate of the server's CA as --tls-ca"),
            (files, "is for another name: use an --address in the certificate, or --tls-server-name"),
        ]
        # Run in parallel, since each command retries for seconds.
        processes = [
            subprocess.Popen([*command, "--timeout-s", "10", *given], stderr=subprocess.PIPE, text=True)
            for given, _ in failures
        ]
        for process, (_, remedy) in zip(processes, failures, strict=True):
            _, message = process.communicate()
            assert (process.returncode, message.count("\n")) == (1, 1)
            assert remedy in message
