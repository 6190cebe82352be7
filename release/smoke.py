"""Smoke test of an installed `attnlens[http,server]`: serves a bundle and calls it. Run by check.py."""

import subprocess
import sys
from http import HTTPStatus
from importlib import import_module
from pathlib import Path
from urllib.request import urlopen

from attnlens_client import AttentionQuery, Client

TEXT = "It rained, so it was wet."
TOLERANCE = 1e-3


def main(bundle: str) -> None:
    """Serve `bundle` and call the server."""
    for package in ("attnlens", "attnlens_analysis", "attnlens_cli", "attnlens_server", "attnlens_viewer"):
        import_module(package)
    attnlens = str(Path(sys.executable).with_name("attnlens"))
    command = [attnlens, "serve", bundle, "--port", "0", "--http-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split(" is ready at ")[1].split(": ")[0]
            url = server.stdout.readline().split(" are at ")[1].strip()
            with urlopen(f"{url}healthz") as response:  # noqa: S310 - our own server
                assert response.status == HTTPStatus.OK
            ask(address)
            subprocess.run([attnlens, "attend", TEXT, "--address", address], check=True)
        finally:
            server.terminate()
    assert server.returncode == 0


def ask(address: str) -> None:
    """Request embeddings, attention and an explanation, and check that they are consistent."""
    with Client(address) as client:
        width = client.get_model().embedding_size
        assert client.embed([TEXT, "A cat."]).shape == (2, width)
        [result] = client.encode([TEXT], attention=AttentionQuery())
        assert abs(result.weights.sum(-1) - 1).max() < TOLERANCE
        [explanation] = client.explain([TEXT])
        print(explanation)


if __name__ == "__main__":
    main(sys.argv[1])
