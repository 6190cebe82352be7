"""The web page of a running server in a browser: form, results, errors and URLs."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mounted import PREFIX, Mounted
from opened_page import OpenedPage

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Route

FIRST, SECOND = "A man is playing a guitar.", "Someone plays an instrument."
DRAWN = "document.querySelector('.attnlens[data-ready]')"
HOSTILE = "</script><img src=x onerror=alert(1)> &lt;b&gt;"


@pytest.fixture
def live(browser: "Browser", viewer_url: str) -> Iterator[OpenedPage]:
    page = OpenedPage(browser, viewer_url, ready="document.querySelector('textarea')")
    yield page
    page.close()
    assert page.problems == []


def show(page: OpenedPage, *texts: str) -> None:
    """Fill in and submit the form, then wait for the result."""
    for index, text in enumerate(texts):
        page.tab.locator("textarea").nth(index).fill(text)
    page.press("Show")
    wait_for_result(page)


def wait_for_result(page: OpenedPage) -> None:
    page.wait("document.querySelector('.status').textContent !== 'Computing…'")


def test_submitted_text_shows_scores_and_attention(live: OpenedPage, viewer_url: str) -> None:
    show(live, FIRST)
    assert live.text(".title") == FIRST
    assert live.text(".text .sum").endswith("= 1.000 the similarity of the text to itself")
    live.choose_head(3, 1)
    live.press("attention of a token")
    assert "layer 3, head 1." in live.text(".text .sum")
    assert {url.removeprefix(viewer_url) for url in live.requests} == {"", "page.css", "live.js", "page"}


def test_new_result_replaces_the_previous_one(live: OpenedPage) -> None:
    show(live, FIRST)
    show(live, FIRST, SECOND, "A man is eating.")
    assert live.text(".title") == f"{FIRST} / {SECOND} rather than A man is eating."
    assert live.tab.locator(".pair").count() == 1
    assert live.text(".contrast .lead").endswith(f"to {SECOND} than to A man is eating..")
    assert live.tab.locator(".title").count() == 1


def test_start_page_shows_the_model_name_and_examples(live: OpenedPage) -> None:
    assert live.text("h1") == "all-MiniLM-L6-v2"
    assert live.tab.title() == "all-MiniLM-L6-v2 - attnlens"
    assert "what each word of a text contributes" in live.text(".about-model .lead")
    live.tab.locator(".example").last.click()
    wait_for_result(live)
    texts = live.tab.locator("textarea").evaluate_all("areas => areas.map((area) => area.value)")
    assert len(texts) == 3
    assert live.text(".title") == f"{texts[0]} / {texts[1]} rather than {texts[2]}"
    assert live.text("h1") == "all-MiniLM-L6-v2"


def test_view_can_be_shared_and_navigated_back_to(
    live: OpenedPage, browser: "Browser", viewer_url: str
) -> None:
    show(live, FIRST, SECOND)
    live.choose_head(3, 1)
    live.wait("location.hash.includes('layer=3&head=1')")
    shared = OpenedPage(browser, live.tab.url, ready=DRAWN)
    assert shared.text(".title") == f"{FIRST} / {SECOND}"
    assert shared.tab.locator(".attnlens[data-drawn]").get_attribute("data-drawn") == "0 3 1"
    shared.close()
    show(live, SECOND)
    live.tab.go_back()
    live.wait(f"document.querySelector('.title').textContent === '{FIRST} / {SECOND}'")
    live.tab.go_back()
    live.wait("document.querySelector('.title') === null")
    assert live.tab.url == viewer_url
    assert live.tab.locator("textarea").first.input_value() == ""


def test_nonexistent_head_in_the_url_is_ignored(browser: "Browser", viewer_url: str) -> None:
    page = OpenedPage(browser, f"{viewer_url}#text=It+rained.&layer=6&head=x", ready=DRAWN)
    drawn = page.tab.locator(".attnlens[data-drawn]").get_attribute("data-drawn") or ""
    assert [number.isdigit() for number in drawn.split()] == [True] * 3
    page.close()


def test_enter_submits_the_form(live: OpenedPage) -> None:
    live.tab.locator("textarea").first.fill("It rained.")
    live.tab.keyboard.press("Enter")
    live.wait(DRAWN)
    assert live.text(".title") == "It rained."


def test_hostile_text_is_displayed_as_text(live: OpenedPage) -> None:
    show(live, HOSTILE, HOSTILE)
    assert live.tab.locator("img").count() == 0
    assert live.text(".title").startswith("</script><img src=x")
    assert live.tab.evaluate("typeof window.intruder") == "undefined"


INVALID_TEXTS = [
    ((), 0, "The text is empty: enter a text."),
    (("word " * 400,), 0, "The text has 402 tokens, but the limit is 256: shorten it."),
    ((FIRST, "word " * 400), 1, "The second text has 402 tokens, but the limit is 256: shorten it."),
    ((FIRST, "", SECOND), 1, "The second text is empty: enter the text to compare with the third one."),
    (
        (FIRST, SECOND, "word " * 400),
        2,
        "The third text has 402 tokens, but the limit is 256: shorten it.",
    ),
    (
        (FIRST, SECOND, SECOND),
        2,
        "The third text has the same embedding as the second text: enter another text.",
    ),
]


def test_errors_are_shown_at_their_fields_and_keep_the_last_result(live: OpenedPage) -> None:
    show(live, "It rained.")
    for texts, field, message in INVALID_TEXTS:
        show(live, *texts, *[""] * (3 - len(texts)))
        area = live.tab.locator("textarea").nth(field)
        assert live.texts(".error") == [message if index == field else "" for index in range(3)]
        assert area.get_attribute("aria-invalid") == "true"
        assert area.evaluate("area => area === document.activeElement")
        assert live.text(".title") == "It rained."
        area.fill("Another text.")
        assert live.texts(".error") == ["", "", ""]
        assert len(live.problems) == 1, message  # the browser logs status 400
        live.problems.clear()


def test_busy_server_is_called_again(live: OpenedPage) -> None:
    busy = [{"error": "other pages are in progress: try again soon", "reason": "OVERLOADED"}]

    def respond(route: "Route") -> None:
        if busy:
            route.fulfill(status=429, headers={"Retry-After": "0"}, json=busy.pop())
        else:
            route.continue_()

    live.tab.route("**/page", respond)
    show(live, FIRST)
    assert live.text(".title") == FIRST
    assert len(live.problems) == 1  # the browser logs status 429
    live.problems.clear()


def test_failed_connection_is_reported(live: OpenedPage) -> None:
    live.tab.route("**/page", lambda route: route.abort())
    show(live, FIRST)
    assert live.text(".status").startswith("No response from the server: ")
    live.problems.clear()


def test_network_access_is_blocked(live: OpenedPage) -> None:
    blocked = live.tab.evaluate(
        "async () => { try { await fetch('https://example.org/'); return false } catch { return true } }"
    )
    assert blocked
    assert any("Content Security Policy" in problem for problem in live.problems)
    live.problems.clear()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_reports_no_violations(browser: "Browser", viewer_url: str, scheme: str) -> None:
    page = OpenedPage(browser, viewer_url, ready="document.querySelector('textarea')", color_scheme=scheme)
    assert page.violations() == []
    show(page, FIRST, "", SECOND)
    assert page.violations() == []
    show(page, FIRST, SECOND, "A man is eating.")
    assert page.violations() == []
    page.close()


@pytest.mark.parametrize("width", [390, 1200])
def test_page_does_not_overflow_horizontally(browser: "Browser", viewer_url: str, width: int) -> None:
    page = OpenedPage(browser, viewer_url, ready="document.querySelector('textarea')", width=width)
    show(page, FIRST, SECOND, "A man is eating.")
    assert page.tab.evaluate("document.documentElement.scrollWidth") <= width
    page.close()


def test_page_asks_for_the_key_of_the_server(browser: "Browser", minilm_bundle: Path) -> None:
    with Mounted(minilm_bundle) as mounted:
        url = f"http://127.0.0.1:{mounted.port}{PREFIX}/"
        page = OpenedPage(browser, url, ready="document.querySelector('textarea')")
        key = page.tab.get_by_label("Key", exact=True)
        assert not key.is_visible()
        show(page, FIRST)
        assert page.text(".field .error:not([hidden])") == "This server needs a key."
        for value, message in (
            ("wrong", "The key is invalid: send one of the server's keys."),
            ("other", ""),
        ):
            key.fill(value)
            key.press("Enter")
            wait_for_result(page)
            assert key.get_attribute("aria-invalid") == str(bool(message)).lower()
            assert message in (page.tab.locator(".live-form").text_content() or "")
        assert page.text(".title") == FIRST
        page.close()
    assert len(page.problems) == 2
    assert all("401" in problem for problem in page.problems)
