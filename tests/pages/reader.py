"""Runs the commands and code of a page in a directory with the files that it mentions."""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner

from attnlens_cli.app import Invocation, attnlens
from commands_here import process_as_before
from pages.blocks import ROOT, Block
from pages.exceptions import CONTINUED
from pages.shown import difference
from served import ServerProcess

ADDRESS = "127.0.0.1:50051"
HTTP_URL = "http://127.0.0.1:8080"
PRINTED_BESIDE = re.compile(r"^print\(.*\)  # (.*)$", re.MULTILINE)


class Reader:
    """Runs blocks and compares their output with the page. Servers run until `stack` is closed."""

    def __init__(self, folder: Path, server: ServerProcess, stack: ExitStack) -> None:
        self._folder, self._server, self._stack = folder, server, stack
        self._names: dict[str, Any] = {}
        self._socket = folder / "attnlens.sock"
        self._http_url = HTTP_URL
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ATTNLENS_")}
        self.env = kept | {
            "PATH": path,
            "COLUMNS": "100",
            "ATTNLENS_ADDRESS": server.address,
            "ATTNLENS_CACHE_DIR": str(folder / "cache"),
            "HOME": str(folder),
            "PIP_REQUIRE_VIRTUALENV": "1",
        }

    def follow(self, block: Block) -> None:
        """Run or parse one block. Raises AssertionError with its location if the output differs."""
        assert block.form in FORMS, f"{block.place}: no way is known to run or parse {block.form!r}"
        printed = FORMS[block.form](self, block)
        shown = block.shown
        if block.form == "python" and not shown:
            shown = "".join(f"{line}\n" for line in PRINTED_BESIDE.findall(block.code))
        told = difference(shown, printed) if shown or block.form == "python" else ""
        assert not told, f"{block.place}\n{told}"

    def python(self, block: Block) -> str:
        """Run Python code in this process. On pages in `CONTINUED`, names of earlier blocks are available."""
        if block.page not in CONTINUED:
            self._names = {}
        self._names.setdefault("__name__", "page")
        code = compile(self._here(block.code), block.place, "exec")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, self._names)
        return printed.getvalue()

    def command(self, block: Block) -> str:
        line = self._here(block.code)
        words = shlex.split(line, comments=True)
        if words[:2] == ["attnlens", "serve"]:
            return self._serve(words[2:])
        if words[0] != "attnlens" or "|" in words:
            return self._shell(line, block)
        result = CliRunner(env=self._cli_env()).invoke(attnlens, words[1:], obj=Invocation())
        assert result.exit_code == 0, f"{block.place}\n{result.output}\n{result.exception!r}"
        return result.output

    def _serve(self, words: list[str]) -> str:
        if words == ["bundles/minilm"]:
            return self._server.ready_line
        server = ServerProcess(Path(words[0]))
        server.command = [sys.executable, "-m", "attnlens_cli.main", "serve", *words]
        if "--port" not in words and "--address" not in words:
            server.command += ["--port", "0"]
        self._stack.enter_context(server)
        if "--http-port" not in words:
            return server.ready_line
        url = server.http_url()
        self._http_url = url.removesuffix("/")
        printed = f"{server.ready_line}HTTP and the viewer are at {url}\n"
        if "--metrics-port" in words:
            assert server.process.stdout is not None
            printed += server.process.stdout.readline()
        return printed

    def _shell(self, line: str, block: Block) -> str:
        if shutil.which("jq") is None:
            line = line.partition(" | jq ")[0]
        result = subprocess.run(
            ["bash", "-c", f"set -euo pipefail; {line}"],
            cwd=self._folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            text=True,
        )
        assert result.returncode == 0, f"{block.place}\n{result.stdout}{result.stderr}"
        return result.stdout

    def _cli_env(self) -> dict[str, str | None]:
        return {name: None for name in os.environ if name.startswith("ATTNLENS_")} | self.env

    def _here(self, code: str) -> str:
        """Replace addresses on the page by those of the test servers, and ports by free ports."""
        code = code.replace(ADDRESS, self._server.address).replace(HTTP_URL, self._http_url)
        code = code.replace("/run/attnlens/attnlens.sock", str(self._socket))
        return re.sub(r"-port (50051|8080)\b", "-port 0", code)

    def json(self, block: Block) -> str:
        json.loads(block.code)
        return ""

    def json_lines(self, block: Block) -> str:
        for line in block.code.splitlines():
            json.loads(line.replace(", ...]", "]"))
        return ""

    def yaml(self, block: Block) -> str:
        list(yaml.safe_load_all(block.code))
        return ""

    def toml(self, block: Block) -> str:
        tomllib.loads(block.code)
        return ""

    def variables(self, block: Block) -> str:
        """Check that options read all variables. Another test checks that docs/options.md is complete."""
        known = (ROOT / "docs" / "options.md").read_text("utf-8")
        for name in re.findall(r"^(\w+)=", block.code, re.MULTILINE):
            assert f"`{name}`" in known, f"{block.place}: no option reads {name}"
        return ""


FORMS = {
    "python": Reader.python,
    "command": Reader.command,
    "json": Reader.json,
    "json lines": Reader.json_lines,
    "variables": Reader.variables,
    "yaml": Reader.yaml,
    "toml": Reader.toml,
}


@contextlib.contextmanager
def reader(folder: Path, bundle: Path, server: ServerProcess) -> Iterator[Reader]:
    """Yield a reader in a folder with the bundle and text files, which becomes the working directory."""
    (folder / "bundles").mkdir()
    (folder / "bundles" / "minilm").symlink_to(bundle)
    (folder / "sentences.txt").write_text("It rained.\nThe street was wet.\n")
    passages = [json.dumps({"id": number, "text": f"Passage {number}."}) for number in range(3)]
    for name in ("corpus.jsonl", "texts.jsonl"):
        (folder / name).write_text("\n".join(passages) + "\n")
    with ExitStack() as stack, contextlib.chdir(folder), process_as_before():
        yield Reader(folder, server, stack)
