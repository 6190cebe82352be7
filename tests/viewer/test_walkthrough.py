"""The walkthrough page: navigation, options, numbers, state in the URL and accessibility."""

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from attnlens_viewer.walkthrough import Walkthrough, walkthrough_html
from opened_page import Open, OpenedPage
from viewer_pages import TOKENS
from walkthrough_pages import sample, softmax

NUM_STEPS = 8
NEXT = "Next \N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}"
MASKED = "\N{MINUS SIGN}∞"
CHANGED = "&scaling=off&mask=padding&padding=2&temperature=2"
HOSTILE = ("[CLS]", "</script><img src=x onerror=alert(1)>", "שלום", "x" * 400, "[SEP]")

OpenWalkthrough = Callable[..., OpenedPage]


@pytest.fixture
def open_walkthrough(open_file: Open, tmp_path: Path) -> OpenWalkthrough:
    """Return a function that renders a page to a file and opens it at a URL fragment."""

    def open_(content: Walkthrough | None = None, fragment: str = "", **settings: object) -> OpenedPage:
        path = tmp_path / "page.html"
        path.write_text(walkthrough_html(content or sample()), encoding="utf-8")
        return open_file(f"{path.as_uri()}#{fragment}", **settings)

    return open_


def drawn(page: OpenedPage) -> list[int]:
    """Return the step, counted from 1, the token, the layer and the head."""
    return [
        int(part) for part in (page.tab.locator(".walkthrough").get_attribute("data-drawn") or "").split()
    ]


def numbers(page: OpenedPage, selector: str = ".token-list .number") -> list[float]:
    texts = page.texts(selector)
    return [float(t.replace("\N{MINUS SIGN}", "-").replace("< ", "").replace("∞", "inf")) for t in texts]


def press_keys(page: OpenedPage, *keys: str) -> None:
    for key in keys:
        page.tab.keyboard.press(key)


def test_reader_can_go_through_all_steps(open_walkthrough: OpenWalkthrough) -> None:
    page = open_walkthrough()
    assert drawn(page) == [1, 5, 0, 1]
    assert page.text(".facts") == "small · 11 tokens · 2 layers"
    headings = [page.text("section h2")]
    for _ in range(NUM_STEPS - 1):
        page.press(NEXT)
        headings.append(page.text("section h2"))
        assert any(letter.isdigit() for letter in page.text(".fact"))
    assert [heading[:2] for heading in headings] == [f"{number}." for number in range(1, NUM_STEPS + 1)]
    assert page.tab.get_by_role("button", name=NEXT).is_disabled()
    assert len(page.requests) == 1


def test_scores_scaling_and_weights_match_numpy(open_walkthrough: OpenWalkthrough) -> None:
    values = sample().layers[0]
    scores = values.query[1, 5].astype(float) @ values.key[1].T.astype(float)
    page = open_walkthrough(fragment="step=3")
    np.testing.assert_allclose(numbers(page), scores, atol=6e-4)
    page.press("4 Scaling")
    np.testing.assert_allclose(numbers(page), scores * 6**-0.5, atol=6e-4)
    page.press("6 Softmax")
    np.testing.assert_allclose(numbers(page), values.weights[1, 5], atol=6e-4)
    weights = values.weights[1, 5]
    entropy = -(weights * np.log(weights)).sum()
    assert f"Sum: 1.000000. Entropy: {entropy:.2f} of at most ln 11 = 2.40" in page.text(".fact")
    page.press("7 Values")
    weighted = weights[:, None] * values.value[1]
    output = weighted.sum(axis=0)
    shares = [
        float(text.rstrip(" %").replace("\N{MINUS SIGN}", "-")) for text in page.texts(".token-list .number")
    ]
    np.testing.assert_allclose(shares, 100 * weighted @ output / (output @ output), atol=0.6)


def test_options_change_the_weights_until_they_are_reset(open_walkthrough: OpenWalkthrough) -> None:
    page = open_walkthrough(fragment="step=4")
    page.press("Scale the scores")
    page.press("5 Mask")
    page.press("Padding")
    page.tab.get_by_label("Last tokens to mask").fill("3")
    assert page.texts(".token-list .number")[-4:].count(MASKED) == 3
    assert page.text(".fact") == f"3 of 11 scores of “animal” are {MASKED}."
    page.press("6 Softmax")
    page.tab.get_by_label("Temperature τ").press("End")
    values = sample().layers[0]
    scores = (values.query[1, 5].astype(float) @ values.key[1].T.astype(float)) / 10
    expected = np.concatenate([softmax(scores[:-3]), np.zeros(3)])
    np.testing.assert_allclose(numbers(page), expected, atol=6e-4)
    note = "Different from the model: not scaled, last 3 tokens masked, temperature 10.0."
    assert page.text(".changed") == note
    page.press("8 Heads")
    assert page.text(".changed") == note
    page.press("Reset")
    assert page.tab.evaluate("document.activeElement.tagName") == "H2"
    assert not page.tab.locator(".changed").is_visible()
    page.press("6 Softmax")
    np.testing.assert_allclose(numbers(page), values.weights[1, 5], atol=6e-4)


def test_biases_and_masks_of_the_model_are_shown(open_walkthrough: OpenWalkthrough) -> None:
    page = open_walkthrough(fragment="step=4&layer=2&head=2&token=0")
    assert "This layer does not scale its scores" in page.text(".content")
    assert page.texts("figcaption")[1] == "Position bias, which is added"
    page.press("5 Mask")
    assert page.text(".fact") == f"7 of 11 scores of “[CLS]” are {MASKED}."
    page.press("Causal")
    assert page.text(".fact") == f"10 of 11 scores of “[CLS]” are {MASKED}."
    page.press("4 Scaling")
    page.press("Scale by 1/√d_k")
    assert "scaled by 1/√d_k" in page.text(".changed")
    assert "layer 1 (longformer)" in page.text(".about")


def test_agreement_with_the_model_is_reported(open_walkthrough: OpenWalkthrough) -> None:
    content = sample()
    content.layers[0].weights[0, 3, 4] += 0.01
    page = open_walkthrough(content, fragment="step=6")
    assert page.text(".fact").endswith("disagree: the weights of layer 0 differ by at most 1.0e-2.")
    page.tab.get_by_label("Layer", exact=True).select_option("2")
    assert "This page and the model agree: the weights of layer 2" in page.text(".fact")


def test_row_without_keys_has_no_weights(open_walkthrough: OpenWalkthrough) -> None:
    page = open_walkthrough(fragment="step=6&layer=2&token=10&mask=padding&padding=8")
    assert page.text(".fact") == "No key is left, so there are no weights."
    assert set(numbers(page)) == {0}


def test_heads_are_next_to_each_other(open_walkthrough: OpenWalkthrough) -> None:
    page = open_walkthrough(fragment="step=8&layer=2&head=0")
    assert "5 values = 15 values. Head 0 fills values 0 to 4" in page.text(".fact")
    page.press("Head 2")
    assert drawn(page) == [8, 5, 2, 2]
    assert page.tab.evaluate("document.activeElement.textContent") == "Head 2"
    page.tab.get_by_label("Layer", exact=True).select_option("0")
    assert drawn(page) == [8, 5, 0, 1]  # layer 0 has two heads


def test_keyboard_moves_through_steps_tokens_heads_and_layers(open_walkthrough: OpenWalkthrough) -> None:
    page = open_walkthrough()
    press_keys(page, "ArrowLeft", "ArrowRight", "ArrowRight", "ArrowLeft", "Shift+ArrowRight", "[", "}")
    assert drawn(page) == [2, 6, 2, 0]
    press_keys(page, "]", "]", "]", "{", "Shift+ArrowLeft")
    assert drawn(page) == [2, 5, 0, 1]
    page.tab.locator(".chip[tabindex='0']").focus()
    press_keys(page, "ArrowRight", "End")
    assert drawn(page) == [2, len(TOKENS) - 1, 0, 1]
    press_keys(page, "?")
    assert page.tab.get_by_role("dialog").is_visible()
    page.tab.get_by_label("Use these shortcuts").uncheck()
    press_keys(page, "Escape", "[")
    assert not page.tab.get_by_role("dialog").is_visible()
    assert drawn(page)[3] == 1


def test_arrow_keys_in_a_field_do_not_change_the_step(open_walkthrough: OpenWalkthrough) -> None:
    page = open_walkthrough(fragment="step=6")
    page.tab.get_by_label("Temperature τ").press("ArrowRight")
    assert drawn(page)[0] == 6
    assert page.text("output") == "1.1"


@pytest.mark.parametrize("step", range(1, NUM_STEPS + 1))
def test_tab_key_reaches_every_control(open_walkthrough: OpenWalkthrough, step: int) -> None:
    page = open_walkthrough(fragment=f"step={step}{CHANGED}")
    controls = "button:not(:disabled), input, select, summary"
    page.tab.evaluate(
        f"""() => {{
          const controls = [...document.querySelectorAll("{controls}")];
          window.left = new Set(controls.filter((each) => each.checkVisibility()));
          document.addEventListener("focusin", (event) => window.left.delete(event.target));
        }}"""
    )
    press_keys(page, *["Tab"] * 50)
    assert page.tab.evaluate("[...window.left].map((each) => each.outerHTML)") == []


def test_focus_is_not_hidden_behind_the_buttons_at_the_bottom(open_walkthrough: OpenWalkthrough) -> None:
    page = open_walkthrough(fragment="step=2", width=390)
    page.tab.set_viewport_size({"width": 390, "height": 480})
    hidden = """() => {
      const bar = document.querySelector(".turn");
      const [focus, top] = [document.activeElement, bar.getBoundingClientRect().top];
      return focus !== document.body && !bar.contains(focus) && focus.getBoundingClientRect().bottom > top;
    }"""
    for _ in range(25):
        press_keys(page, "Tab")
        assert not page.tab.evaluate(hidden)


def test_state_is_stored_in_the_url(open_walkthrough: OpenWalkthrough) -> None:
    page = open_walkthrough(fragment=f"step=6&token=2&layer=2&head=2{CHANGED}")
    assert drawn(page) == [6, 2, 2, 2]
    assert page.text("output") == "2.0"
    press_keys(page, "ArrowRight", "[")
    page.wait("location.hash.includes('step=7') && location.hash.includes('head=1')")
    fragment = page.tab.evaluate("location.hash")
    assert fragment == f"#step=7&token=2&layer=2&head=1{CHANGED}"


def test_invalid_parts_of_a_url_are_ignored(open_walkthrough: OpenWalkthrough) -> None:
    page = open_walkthrough(fragment="step=9&token=11&layer=1&head=2&mask=x&padding=0&temperature=0")
    assert drawn(page) == [1, 5, 0, 1]
    page.press("6 Softmax")
    assert "agree" in page.text(".fact")


def test_step_is_announced_to_screen_readers(open_walkthrough: OpenWalkthrough) -> None:
    page = open_walkthrough()
    press_keys(page, "ArrowRight")
    page.wait("document.querySelector('[role=status]').textContent.includes('values')")
    status = page.tab.locator("[role=status]").text_content() or ""
    assert status.startswith("Step 2, q, k, v. Layer 0, head 1. x has 12 values.")


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 360)])
@pytest.mark.parametrize("step", range(1, NUM_STEPS + 1))
def test_axe_reports_no_violations_and_nothing_overflows(
    open_walkthrough: OpenWalkthrough, scheme: str, width: int, step: int
) -> None:
    page = open_walkthrough(fragment=f"step={step}{CHANGED}", color_scheme=scheme, width=width)
    assert page.violations() == []
    assert page.tab.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_reports_no_violations_in_the_dialog(open_walkthrough: OpenWalkthrough, scheme: str) -> None:
    page = open_walkthrough(color_scheme=scheme)
    page.press("Keyboard (?)")
    assert page.violations() == []


def test_reduced_motion_disables_transitions(open_walkthrough: OpenWalkthrough) -> None:
    page = open_walkthrough(reduced_motion="reduce")
    moving = "[...document.querySelectorAll('.walkthrough *')].map((each) => getComputedStyle(each))"
    assert page.tab.evaluate(f"{moving}.some((s) => s.transitionProperty !== 'none')") is False


def test_hostile_tokens_are_displayed_as_text(open_walkthrough: OpenWalkthrough) -> None:
    page = open_walkthrough(sample(HOSTILE), width=360)
    for step in range(1, NUM_STEPS + 1):
        page.tab.evaluate("(step) => { location.hash = `step=${step}` }", step)
        page.wait(f"document.querySelector('.walkthrough').dataset.drawn.startsWith('{step} ')")
        assert page.tab.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.tab.locator("img").count() == 0
    assert page.tab.title() == f"Attention step by step: {' '.join(HOSTILE)}"


def test_text_of_one_token_can_be_displayed(open_walkthrough: OpenWalkthrough) -> None:
    page = open_walkthrough(sample(["it"]), fragment="step=6")
    assert numbers(page) == [1]
    assert "at most ln 1 = 0.00" in page.text(".fact")


def test_document_contains_float32_arrays() -> None:
    document = walkthrough_html(sample())
    data = json.loads(document.split('id="attnlens-data">')[1].partition("</script>")[0])
    assert [layer["index"] for layer in data["layers"]] == [0, 2]
    assert [layer["hasBias"] for layer in data["layers"]] == [False, True]
    arrays = re.findall(r'id="attnlens-layer-[02]">([^<]*)</script>', document)
    assert sum(map(len, arrays)) == pytest.approx(sample().array_bytes, abs=8)
    decoded = np.frombuffer(base64.b64decode(arrays[1]), "<f4")
    expected = np.concatenate([array.ravel() for array in sample().layers[2].arrays])
    np.testing.assert_array_equal(decoded, expected.astype(np.float32))
