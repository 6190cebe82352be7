"""The page /docs in a browser: keyboard, phone width, and requests."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def test_page_lists_the_routes_and_sends_requests(browser: "Browser", viewer_url: str) -> None:
    page = browser.new_page(viewport={"width": 375, "height": 800})
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.goto(f"{viewer_url}docs")
    route = page.locator(".operation", has=page.locator("summary code", has_text="/v1/attnlens/embed"))
    route.locator("summary").first.focus()
    page.keyboard.press("Enter")
    route.get_by_role("button", name="Send").wait_for()
    for _ in range(3):  # the list of fields, the body, the button
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    route.get_by_role("status").get_by_text("Status 200").wait_for()
    assert '"embeddings": [' in (route.get_by_label("Response").text_content() or "")
    assert page.locator(".operation").count() > 15
    assert page.evaluate("document.documentElement.scrollWidth") == 375
    assert not problems
    page.close()


def test_examples_of_all_routes_are_accepted(browser: "Browser", viewer_url: str) -> None:
    page = browser.new_page()
    page.goto(f"{viewer_url}docs")
    page.locator(".operation").first.wait_for()
    rejected = set()
    for route in page.locator(".operation").all():
        route.locator("summary").first.click()
        route.get_by_role("button", name="Send").click()
        status = route.get_by_role("status").get_by_text("Status")
        status.wait_for()
        if "Status 2" not in (status.text_content() or ""):
            rejected.add(route.locator("summary code").first.text_content())
    # They need a name, token ids, or another type of model.
    others = {"/v1/models/{name}", "/embed_sparse", "/v2/embed", "/vectors"}
    rerankers = {"/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score", "/v1/attnlens/score"}
    classifiers = {"/predict", "/classify", "/v1/attnlens/classify"}
    assert rejected <= others | rerankers | classifiers
    page.close()
