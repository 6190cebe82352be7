"""The code of docs/typescript.md runs in Node.js and Chromium; the README of the package has a part of it."""

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from pages.blocks import Block, blocks_in, blocks_of
from pages.shown import difference
from typescript.conftest import CLIENT, Server

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PAGE = "docs/typescript.md"
URL = "http://127.0.0.1:8080/"


def blocks(form: str) -> list[Block]:
    """Return the blocks of a language, one at least."""
    found = [block for block in blocks_of(PAGE) if block.form == form]
    assert found
    return found


def installed(folder: Path, code: str) -> Path:
    """Write a module into a project with the package."""
    (folder / "package.json").write_text('{"private": true}')
    install: list[str | Path] = ["npm", "install", "--offline", "--no-audit", "--no-fund", CLIENT]
    subprocess.run(install, cwd=folder, check=True, capture_output=True)
    module = folder / "example.mjs"
    module.write_text(code)
    return module


def test_examples_print_what_the_page_shows(node_modules: Path, server: Server, tmp_path: Path) -> None:
    assert node_modules.exists()
    assert CLIENT.relative_to(CLIENT.parents[1]).as_posix() in blocks_of(PAGE)[0].code
    code = "".join(block.code for block in blocks("js"))
    assert URL.rstrip("/") in code
    module = installed(tmp_path, code.replace(URL.rstrip("/"), server.url))
    result = subprocess.run(["node", module], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    commands = ("npm ", "cd ")
    shown = "".join(block.code for block in blocks("text") if not block.code.startswith(commands))
    assert not difference(shown, result.stdout)


def test_page_in_a_browser_shows_its_result(browser: "Browser", server: Server) -> None:
    [example] = blocks("html")
    page = browser.new_page()
    page.goto(f"{server.origin}/empty")
    page.set_content(example.code.replace(URL.rstrip("/"), server.url))
    page.get_by_text("5 tokens").wait_for()
    page.close()


def test_readme_has_the_code_of_the_page() -> None:
    page = {block.code for block in blocks_of(PAGE)}
    readme = blocks_in((CLIENT / "README.md").read_text("utf-8"), "README.md")
    assert {block.code for block in readme if block.form in ("js", "html")} <= page
