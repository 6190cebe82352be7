"""The steps of docs/tls.md: openssl, real servers, commands, Python and `buf curl`."""

import os
import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from pages.blocks import ROOT, Block, blocks_of
from served import ServerProcess

_, ERRORS = (ROOT / "docs" / "tls.md").read_text("utf-8").split("\n## Fix TLS errors\n")
BLOCKS = blocks_of("docs/tls.md")
EXAMPLE_ADDRESS = "127.0.0.1:50051"


class Follower:
    """Runs the commands of the page in a directory."""

    def __init__(self, folder: Path, bundle: Path, stack: ExitStack) -> None:
        self.folder, self.bundle, self._stack = folder, bundle, stack
        self.address = ""

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a command line that calls the most recently started server."""
        tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            ["bash", "-c", command.replace(EXAMPLE_ADDRESS, self.address)],
            cwd=self.folder,
            env={**os.environ, "PATH": tools, "ATTNLENS_INFO_ADDRESS": self.address},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            text=True,
        )

    def follow(self, block: Block) -> None:
        if block.form == "python":
            (self.folder / "example.py").write_text(block.code.replace(EXAMPLE_ADDRESS, self.address))
            result = self.run(f"{sys.executable} example.py")
            assert (result.returncode, result.stdout) == (0, "(1, 384)\n")
            return
        assert block.form == "command", block.place
        if block.code.startswith("attnlens serve "):
            self.serve(block.code)
            return
        result = self.run(block.code)
        assert result.returncode == 0, f"{block.place}\n{result.stdout}"
        if block.shown:
            assert result.stdout == block.shown

    def serve(self, command: str) -> None:
        words = shlex.split(command)[3:]  # arguments after `attnlens serve bundles/minilm`
        options = [word if word.startswith("--") else str(self.folder / word) for word in words]
        server = ServerProcess(self.bundle, *options)
        self.address = self._stack.enter_context(server).address


@pytest.mark.extended
def test_steps_work_and_errors_match_the_page(
    tmp_path: Path, minilm_bundle: Path, minilm_server: ServerProcess
) -> None:
    with ExitStack() as stack:
        follower = Follower(tmp_path, minilm_bundle, stack)
        encrypted = ""
        for block in BLOCKS:
            if "--tls-client-ca" in block.code:
                encrypted = encrypted or follower.address
            follower.follow(block)
        (tmp_path / "ca.der").write_bytes(b"\x30\x82")
        assert (
            follower.run("openssl pkey -in server.key -aes256 -passout pass:x -out locked.key").returncode
            == 0
        )
        assert_told(follower, "attnlens info --tls-ca ca.pem", "Socket closed")
        follower.address = encrypted
        named = "attnlens info --tls-ca ca.pem --tls-server-name other.example"
        assert_told(follower, "attnlens info", "Socket closed")
        untrusted = "unable to get local issuer certificate"
        assert_told(follower, "attnlens info --tls", untrusted)
        assert_told(follower, "attnlens info --tls-ca next.pem", untrusted)
        assert_told(follower, "attnlens info --tls-ca ca.key", "has no PEM CERTIFICATE")
        assert_told(follower, named, "Hostname Verification Check failed")
        assert_told(follower, "attnlens info --tls-ca ca.der", "is not a PEM file")
        follower.address = minilm_server.address
        assert_told(follower, "attnlens info --tls", "WRONG_VERSION_NUMBER")
    serve = f"attnlens serve {minilm_bundle} --port 0 --tls-cert server.pem --tls-key"
    assert_told(follower, f"{serve} client.key", "is not the private key of")
    assert_told(follower, f"{serve} locked.key", "is encrypted")


def assert_told(follower: Follower, command: str, told: str) -> None:
    """Check that a command fails with a message listed on the page."""
    result = follower.run(command)
    assert (result.returncode > 0, told in result.stdout) == (True, True), f"{command}\n{result.stdout}"
    assert f"| `{told}`" in ERRORS
