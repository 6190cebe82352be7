"""The steps of docs/access.md, and its tables."""

import os
import re
import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from attnlens_server.access.policy import GROUPS, METHODS, read_policy
from pages.blocks import ROOT, Block, blocks_of
from served import ServerProcess

PAGE = (ROOT / "docs" / "access.md").read_text("utf-8")
ADDRESS, HTTP_URL = "127.0.0.1:50051", "http://127.0.0.1:8080/"


class Follower:
    """Runs the commands of the page in a directory, with the key that the first one creates."""

    def __init__(self, folder: Path, bundle: Path, stack: ExitStack) -> None:
        self._folder, self._bundle, self._stack = folder, bundle, stack
        self._env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        self._key = self._address = self._url = ""

    def follow(self, block: Block) -> None:
        """Run a block and compare its output."""
        if block.form == "toml":
            (self._folder / "policy.toml").write_text(block.code)
            assert read_policy(self._folder / "policy.toml").rules("search").methods == METHODS
            return
        if block.form == "python":
            (self._folder / "example.py").write_text(block.code.replace(ADDRESS, self._address))
            assert self._run(f"{sys.executable} example.py") == "(1, 384)\n"
            return
        if block.code.startswith("export "):
            self._env |= {"ATTNLENS_API_KEY": self._key, "ATTNLENS_ADDRESS": self._address}
            return
        if "--api-keys" in block.code:
            self._serve(shlex.split(block.code)[3:])
            return
        printed = self._run(
            block.code.replace(HTTP_URL, self._url).replace("bundles/minilm", str(self._bundle))
        )
        if block.code.startswith("attnlens key"):
            self._key = printed.splitlines()[1]
        if block.shown:
            pattern = re.escape(block.shown).replace(re.escape("..."), ".+")
            assert re.fullmatch(pattern, printed, re.DOTALL), f"{block.place}\n{printed}"

    def _run(self, command: str) -> str:
        result = subprocess.run(
            ["bash", "-c", command],
            cwd=self._folder,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            text=True,
        )
        assert result.returncode == (1 if "invalid.toml" in command else 0), result.stdout
        return result.stdout

    def _serve(self, words: list[str]) -> None:
        options = [
            str(self._folder / word) if word == "keys.txt" else word.replace("8080", "0") for word in words
        ]
        server = self._stack.enter_context(ServerProcess(self._bundle, *options, "--lanes", "1"))
        self._address, self._url = server.address, server.http_url()


def test_steps_work(tmp_path: Path, minilm_bundle: Path) -> None:
    (tmp_path / "invalid.toml").write_text("[clients.search]\nmethod = []\n")
    with ExitStack() as stack:
        follower = Follower(tmp_path, minilm_bundle, stack)
        for block in blocks_of("docs/access.md"):
            follower.follow(block)


def test_table_of_groups_is_complete() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ((?:`\w+`(?:, )?)+) \|", PAGE, re.MULTILINE)
    assert {group: frozenset(re.findall(r"\w+", methods)) for group, methods in rows} == GROUPS
