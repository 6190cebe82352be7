"""Browser and Node.js fixtures for the viewer tests."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from attnlens_viewer import Page, html_of
from opened_page import Open, OpenedPage, launched_browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser

VIEWER = Path(__file__).parents[2] / "viewer"


@pytest.fixture(scope="package")
def browser() -> "Iterator[Browser]":
    """Launch a headless browser, shared by the tests of this package.

    It is closed before other tests run: its running event loop would make asyncio tests fail.
    """
    with launched_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def node_modules() -> Path:
    if shutil.which("node") is None:
        pytest.fail("Node.js is not installed: run viewer/install_for_tests.sh node")
    modules = VIEWER / "node_modules"
    if not modules.exists():
        pytest.fail("esbuild and TypeScript are not installed: run npm ci in viewer/, or make test-all")
    return modules


@pytest.fixture
def open_file(browser: "Browser") -> Iterator[Open]:
    """Return a function that opens a file. The teardown asserts that no script errors occurred."""
    opened: list[OpenedPage] = []

    def open_(path: Path, **settings: Any) -> OpenedPage:
        page = OpenedPage(browser, path, **settings)
        opened.append(page)
        return page

    yield open_
    for page in opened:
        page.close()
    assert [problem for page in opened for problem in page.problems] == []


@pytest.fixture
def open_page(open_file: Open, tmp_path: Path) -> Open:
    """Return a function that renders a page to a file and opens it."""

    def open_(page: Page, *, small: bool = False, **settings: object) -> OpenedPage:
        path = tmp_path / "page.html"
        path.write_text(html_of(page, small=small), encoding="utf-8")
        return open_file(path, **settings)

    return open_
