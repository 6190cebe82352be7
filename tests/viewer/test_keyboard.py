"""Accessibility: keyboard operation, screen reader announcements and text alternatives for colors."""

from itertools import pairwise
from typing import Any

import pytest

from attnlens_viewer import Page
from opened_page import Open, OpenedPage
from viewer_pages import HEADS, LAYERS, TOKENS, full_page, plain_page, text_of


def focused(page: OpenedPage, attribute: str) -> Any:
    return page.tab.evaluate(f"document.activeElement.getAttribute('{attribute}')")


def press_keys(page: OpenedPage, *keys: str) -> None:
    for key in keys:
        page.tab.keyboard.press(key)


def test_arrow_keys_move_through_the_text(open_page: Open) -> None:
    page = open_page(plain_page())
    page.press("Tokens")
    page.tab.locator(".text .chip").first.click()
    press_keys(page, "ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft")
    assert focused(page, "data-index") == "2"
    assert page.text(".read-out caption") == "believ (##believ) attends to"
    press_keys(page, "End")
    assert focused(page, "data-index") == str(len(TOKENS) - 1)
    press_keys(page, "PageUp", "Home", "ArrowLeft")
    assert focused(page, "data-index") == "0"
    assert page.tab.locator('.text .chip[tabindex="0"]').count() == 1
    assert page.tab.locator('.text .chip[aria-selected="true"]').count() == 1


def test_arrow_keys_move_in_the_matrix_and_page_keys_switch_heads(open_page: Open) -> None:
    page = open_page(plain_page())
    page.press("Tokens")
    page.choose_head(0, 0)
    page.tab.locator(".text .chip").first.click()
    page.tab.locator(".map .cell-map").focus()
    press_keys(page, "ArrowDown", "ArrowDown", "ArrowRight", "ArrowUp")
    assert page.text(".read-out caption").startswith("un ")
    press_keys(page, *["PageDown"] * (HEADS + 1))
    page.wait("document.querySelector('.attnlens').dataset.drawn === '0 1 1'")
    press_keys(page, *["PageUp"] * (HEADS + 2))
    page.wait(f"document.querySelector('.attnlens').dataset.drawn === '0 {LAYERS - 1} {HEADS - 1}'")


def test_arrow_keys_move_through_the_heads(open_page: Open) -> None:
    page = open_page(plain_page())
    page.choose_head(0, 1)
    press_keys(page, "ArrowDown", "ArrowRight")
    assert focused(page, "aria-label") == "Layer 1, head 2"
    assert focused(page, "aria-pressed") == "true"
    press_keys(page, "End", "ArrowRight")
    assert focused(page, "aria-label") == f"Layer {LAYERS - 1}, head {HEADS - 1}"
    press_keys(page, "Home")
    assert focused(page, "aria-label") == "Layer 0, head 0"
    assert page.tab.locator('.head[tabindex="0"]').count() == 1


def test_tab_key_visits_every_section_once(open_page: Open) -> None:
    page = open_page(full_page())
    parts: list[str] = []
    page.tab.keyboard.press("Tab")
    while (part := part_of(page)) is not None:
        parts.append(part)
        page.tab.keyboard.press("Tab")
    assert list(dict.fromkeys(parts)) == ["top", "contrast", "text", "pair", "attention", "overview"]
    assert len(parts) < 45  # does not stop at every token and head


def part_of(page: OpenedPage) -> str | None:
    class_name = page.tab.evaluate("document.activeElement.closest('section, header')?.className ?? null")
    return None if class_name is None else class_name.split()[-1]


def test_selection_is_announced_to_screen_readers(open_page: Open) -> None:
    page = open_page(plain_page())
    page.press("Tokens")
    page.choose_head(1, 2)
    page.tab.locator(".text .chip").nth(5).click()
    page.wait("document.querySelector('[role=status]').textContent.includes('animal attends to')")
    assert (page.tab.locator("[role=status]").text_content() or "").startswith("Layer 1, head 2. animal ")


def test_every_color_has_a_number_as_alternative(open_page: Open) -> None:
    page = open_page(full_page())
    titles = page.tab.locator(".chip").evaluate_all("chips => chips.map((chip) => chip.title)")
    assert all(any(letter.isdigit() for letter in title) for title in titles)
    assert page.texts(".map .ticks span") == ["0", "0.05", "0.2", "0.5", "1"]


@pytest.mark.parametrize("width", [390, 1280])
def test_scale_labels_do_not_overlap(open_page: Open, width: int) -> None:
    page = open_page(full_page(), width=width)
    for scale in page.tab.locator(".ticks").all():
        boxes = [tick.bounding_box() for tick in scale.locator("span").all() if tick.is_visible()]
        edges = [(box["x"], box["x"] + box["width"]) for box in boxes if box is not None]
        assert all(right + 6 <= left for (_, right), (left, _) in pairwise(edges))


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 360)])
def test_axe_reports_no_violations(open_page: Open, scheme: str, width: int) -> None:
    assert open_page(full_page(), color_scheme=scheme, width=width).violations() == []


def test_axe_reports_no_violations_in_a_page_without_scores(open_page: Open) -> None:
    assert open_page(plain_page()).violations() == []


def test_reduced_motion_disables_transitions(open_page: Open) -> None:
    page = open_page(plain_page(), reduced_motion="reduce")
    transitions = page.tab.locator(".chip").evaluate_all(
        "chips => chips.map((chip) => getComputedStyle(chip).transitionProperty)"
    )
    assert set(transitions) == {"none"}


def test_text_of_one_token_can_be_displayed(open_page: Open) -> None:
    page = open_page(Page(title="One", model="small", texts=[text_of(("[CLS]",))]))
    page.press("Special tokens")
    assert page.texts(".text .chip") == ["[CLS]"]
    assert page.texts(".read-out .number") == ["1.0"]
