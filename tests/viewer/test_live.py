"""The page of a running server in a browser: the form fetches, and shows what a file shows."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from opened_page import OpenedPage

if TYPE_CHECKING:
    from playwright.sync_api import Browser

FIRST, SECOND = "A man is playing a guitar.", "Someone plays an instrument."
HOSTILE = "</script><img src=x onerror=alert(1)> &lt;b&gt;"


@pytest.fixture
def live(browser: "Browser", viewer_url: str) -> Iterator[OpenedPage]:
    page = OpenedPage(browser, viewer_url, ready="document.querySelector('textarea')")
    yield page
    page.close()
    assert page.problems == []


def show(page: OpenedPage, *texts: str) -> None:
    """Fill in the form, send it and wait for the reply."""
    for place, text in enumerate(texts):
        page.tab.locator("textarea").nth(place).fill(text)
    page.press("Show")
    page.wait("!document.querySelector('.told').textContent.startsWith('Asking')")


def test_a_text_shows_its_scores_and_its_attention(live: OpenedPage, viewer_url: str) -> None:
    show(live, FIRST)
    assert live.text("h1") == FIRST
    assert live.text(".text .sum").endswith("= 1.000 for the text's own vector")
    live.choose_head(3, 1)
    live.press("attention of a token")
    assert "layer 3, head 1." in live.text(".text .sum")
    assert {url.removeprefix(viewer_url) for url in live.requests} == {"", "page.css", "live.js", "page"}


def test_the_next_texts_take_the_place_of_the_first(live: OpenedPage) -> None:
    show(live, FIRST)
    show(live, FIRST, SECOND, "A man is eating.")
    assert live.text("h1") == f"{FIRST} / {SECOND}"
    assert live.tab.locator(".pair").count() == 1
    assert "rather than to" in live.text(".contrast .lead")
    assert live.tab.locator("h1").count() == 1


def test_enter_sends_the_form(live: OpenedPage) -> None:
    live.tab.locator("textarea").first.fill("It rained.")
    live.tab.keyboard.press("Enter")
    live.wait("document.querySelector('.attnlens[data-ready]')")
    assert live.text("h1") == "It rained."


def test_hostile_text_is_text(live: OpenedPage) -> None:
    show(live, HOSTILE, HOSTILE)
    assert live.tab.locator("img").count() == 0
    assert live.text("h1").startswith("</script><img src=x")
    assert live.tab.evaluate("typeof window.intruder") == "undefined"


def test_a_refusal_is_shown_and_the_last_page_stays(live: OpenedPage) -> None:
    show(live, FIRST)
    show(live, "word " * 400)
    assert live.text(".told") == "a text has 402 tokens, the model takes 256: shorten it"
    assert live.text("h1") == FIRST
    assert len(live.problems) == 1  # the browser's own line about the status 400
    live.problems.clear()


def test_the_network_is_forbidden(live: OpenedPage) -> None:
    blocked = live.tab.evaluate(
        "async () => { try { await fetch('https://example.org/'); return false } catch { return true } }"
    )
    assert blocked
    assert any("Content Security Policy" in problem for problem in live.problems)
    live.problems.clear()


@pytest.mark.parametrize("width", [360, 1200])
def test_nothing_sticks_out_of_a_screen(browser: "Browser", viewer_url: str, width: int) -> None:
    page = OpenedPage(browser, viewer_url, ready="document.querySelector('textarea')", width=width)
    show(page, FIRST, SECOND, "A man is eating.")
    assert page.tab.evaluate("document.documentElement.scrollWidth") <= width
    page.close()
