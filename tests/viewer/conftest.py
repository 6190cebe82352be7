"""One Chromium for all tests of the page."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from attnlens_viewer import Page, html_of
from opened_page import Open, OpenedPage

if TYPE_CHECKING:
    from playwright.sync_api import Browser

COMMANDS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


@pytest.fixture(scope="package")
def browser() -> "Iterator[Browser]":
    """A headless browser.

    It ends with this folder: while it lives, its event loop counts as running, and tests with asyncio fail.
    """
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - takes a moment

    found = [path for command in COMMANDS if (path := shutil.which(command))]
    if not found:
        pytest.fail(f"none of {', '.join(COMMANDS)} is installed: run viewer/install_for_tests.sh chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found[0], args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_file(browser: "Browser") -> Iterator[Open]:
    """Open a file from the disk, wait until it is drawn, and see at the end that nothing went wrong in it."""
    opened: list[OpenedPage] = []

    def open_it(path: Path, **settings: Any) -> OpenedPage:
        page = OpenedPage(browser, path, **settings)
        opened.append(page)
        return page

    yield open_it
    for page in opened:
        page.close()
    assert [problem for page in opened for problem in page.problems] == []


@pytest.fixture
def open_page(open_file: Open, tmp_path: Path) -> Open:
    """Write a page and open it."""

    def open_it(page: Page, *, small: bool = False, **settings: object) -> OpenedPage:
        path = tmp_path / "page.html"
        path.write_text(html_of(page, small=small), encoding="utf-8")
        return open_file(path, **settings)

    return open_it
