"""Browser fixtures for the viewer tests."""

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
    """Launch a headless browser, shared by the tests of this package.

    It is closed before other tests run: its running event loop would make asyncio tests fail.
    """
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - takes a moment

    executables = [path for command in COMMANDS if (path := shutil.which(command))]
    if not executables:
        pytest.fail(f"Chromium not found ({', '.join(COMMANDS)}). Run viewer/install_for_tests.sh chromium.")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executables[0], args=FLAGS)
        yield browser
        browser.close()


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
