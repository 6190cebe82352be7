"""Takes screenshots of the viewer: `python docs/draw_viewer.py BUNDLE RERANKER CLASSIFIER`, with Chromium.

BUNDLE is a bundle of MiniLM. The others contain the models that examples/train_reranker.py trains. They are
optional.

No test compares them, because fonts differ between machines.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from attnlens_analysis.teach import walkthrough_page

PICTURES = Path(__file__).parent / "pictures"
CHROMIUM = "/usr/bin/chromium"
SENTENCE = "The animal didn't cross the street because it was too tired."
CONTRAST = {
    "text": "A man is playing a guitar.",
    "other": "Someone plays an instrument.",
    "rather_than": "A man is eating an apple.",
}
RANKING = {
    "query": "A man is playing a guitar.",
    "documents": "A man is eating an apple.\nSomeone plays an instrument.\nA man plays a guitar outside.",
}
LABELS = {"text": "The government announced new taxes on Tuesday."}
PARAGRAPH = (
    "A library lends more than books. In the mornings students sit at the long tables under the "
    "windows, and retired engineers read the newspapers of the week before. At noon a teacher brings "
    "her class, because the librarian keeps a drawer of old maps on which the river still runs through "
    "the middle of the town. In the afternoon somebody always asks how to print a form, and somebody "
    "else always knows. When the rain comes, people who never read stand in the doorway, look at the "
    "shelves and take one book with them, out of politeness. Half of these books return late. The "
    "librarian does not mind: a book that returns late, she says, was read, or at least was carried "
    "around by a person who meant to read it. Every spring she counts what was borrowed. Novels come "
    "first, then travel guides, then everything about gardens; the maps were never borrowed, yet no "
    "drawer is opened more often."
)


def draw(address: str, browser: Browser) -> None:
    """Take all screenshots from a live viewer."""
    colors = {"color_scheme": "light"}
    live = _open(browser, address, {}, viewport={"width": 1000, "height": 620}, **colors)
    _save(live, "viewer_live")
    sentence = {"text": SENTENCE, "layer": "3", "head": "1"}
    one = _open(browser, address, sentence, viewport={"width": 1000, "height": 980}, **colors)
    one.locator(".part.text").get_by_text("it", exact=True).click()
    one.evaluate("scrollTo(0, document.querySelector('.attnlens[data-ready] .title').offsetTop - 40)")
    _save(one, "viewer")
    two = _open(browser, address, CONTRAST, viewport={"width": 900, "height": 900}, **colors)
    _save(two, "viewer_contrast", ".part.contrast")
    two.locator(".part.pair").get_by_text("guitar", exact=True).first.click()
    _save(two, "viewer_pair", ".part.pair")
    dark = _open(
        browser, address, {"text": PARAGRAPH}, viewport={"width": 1100, "height": 1390}, color_scheme="dark"
    )
    dark.evaluate("scrollTo(0, document.querySelector('.attnlens[data-ready] .title').offsetTop - 40)")
    _save(dark, "viewer_long")


def draw_ranking(address: str, browser: Browser) -> None:
    """Take the screenshots of a ranking."""
    page = _open(browser, address, RANKING, viewport={"width": 1000, "height": 1220}, color_scheme="light")
    _save(page, "viewer_ranking")
    _save(page, "viewer_ranking_contrast", ".part.contrast")


def draw_labels(address: str, browser: Browser) -> None:
    """Take the screenshot of a classified text."""
    page = _open(browser, address, LABELS, viewport={"width": 1000, "height": 1380}, color_scheme="light")
    page.locator(".label-reasons .term.total").wait_for()
    _save(page, "viewer_labels")


def draw_walkthrough(bundle: str, browser: Browser, directory: str) -> None:
    """Take the screenshot of a page that shows attention step by step."""
    path = Path(directory) / "steps.html"
    path.write_text(walkthrough_page(Path(bundle), SENTENCE), encoding="utf-8")
    fragment = {"step": "6", "token": "10", "layer": "3", "head": "1"}
    viewport = {"width": 1180, "height": 960}
    _save(_open(browser, path.as_uri(), fragment, viewport=viewport, color_scheme="light"), "viewer_steps")


def _open(browser: Browser, address: str, fragment: Mapping[str, str], **settings: Any) -> Page:
    page = browser.new_page(**settings)
    page.set_default_timeout(10_000)
    page.goto(f"{address}#{urlencode(fragment)}")
    if fragment:
        page.locator(".attnlens[data-ready], .has-result .title").first.wait_for()
    return page


def _save(page: Page, name: str, selector: str | None = None) -> None:
    path = PICTURES / f"{name}.png"
    target = page.locator(selector).first if selector else page
    target.screenshot(path=path, animations="disabled")
    with Image.open(path) as image:
        image.convert("RGB").quantize(256, Image.Quantize.FASTOCTREE).save(path, optimize=True)


@contextmanager
def served(bundle: str) -> Iterator[str]:
    """Serve a bundle and yield the URL of its page."""
    command = [sys.executable, "-m", "attnlens_cli.main", "serve", bundle, "--port", "0", "--http-port", "0"]
    with (
        tempfile.TemporaryDirectory() as directory,
        subprocess.Popen(command, stdout=subprocess.PIPE, cwd=directory, text=True) as server,
    ):
        try:
            assert server.stdout is not None
            yield next(line.split()[-1] for line in server.stdout if "the viewer are at" in line)
        finally:
            server.terminate()


def main(bundle: str, *heads: str) -> None:
    """Serve the bundles and take all screenshots."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        with served(bundle) as address, tempfile.TemporaryDirectory() as directory:
            draw(address, browser)
            draw_walkthrough(bundle, browser, directory)
        for head, take in zip(heads, (draw_ranking, draw_labels), strict=False):
            with served(head) as address:
                take(address, browser)


if __name__ == "__main__":
    main(*(str(Path(path).resolve()) for path in sys.argv[1:]))
