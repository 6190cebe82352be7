"""Display of scores: sums, baselines, words, pairs of texts and contrasts."""

import dataclasses

import numpy as np

from attnlens_viewer import Page
from opened_page import Open
from viewer_pages import TOKENS, full_page, plain_page, scores_of, text_of

MINUS = "\N{MINUS SIGN}"
VALUES = np.linspace(-0.1, 0.3, len(TOKENS), dtype=np.float32)


def scored_page() -> Page:
    return dataclasses.replace(plain_page(), texts=[text_of(scored=True)])


def test_sum_includes_the_values_and_the_baseline(open_page: Open) -> None:
    page = open_page(scored_page())
    total = VALUES.sum()
    assert page.text(".text .sum") == (
        f"{total:.3f} words +0.050 baseline = {total + 0.05:.3f} the cosine with itself"
    )
    page.press("Special tokens")
    specials = VALUES[0] + VALUES[-1]
    assert page.text(".text .sum").startswith(f"{total - specials:.3f} words +{specials:.3f} special tokens ")


def test_score_of_a_word_is_the_sum_of_its_tokens(open_page: Open) -> None:
    page = open_page(scored_page())
    titles = page.tab.locator(".text .chip").evaluate_all("chips => chips.map((chip) => chip.title)")
    assert titles[1] == f"un ##believ ##ably: {VALUES[1:4].sum():+.3f}".replace("-", MINUS)
    page.press("Tokens")
    titles = page.tab.locator(".text .chip").evaluate_all("chips => chips.map((chip) => chip.title)")
    assert [title.split(": ")[1].replace(MINUS, "-") for title in titles] == [f"{v:+.3f}" for v in VALUES]


def test_positive_scores_are_blue_and_negative_scores_vermilion(open_page: Open) -> None:
    page = open_page(scored_page())
    colors = page.tab.locator(".text .chip").evaluate_all(
        "chips => chips.map((chip) => chip.style.backgroundColor)"
    )
    assert colors[0].startswith("rgba(213, 94, 0, ")
    assert colors[-1] == "rgb(0, 114, 178)"
    assert page.pixels(".text .ramp")[0, -1].tolist() == [0, 114, 178]  # the end of the legend


def test_deviation_from_the_expected_sum_is_shown(open_page: Open) -> None:
    wrong = dataclasses.replace(scores_of(VALUES, 0.05), expected_sum=2.0)
    text = dataclasses.replace(text_of(), scores=[wrong])
    page = open_page(dataclasses.replace(plain_page(), texts=[text]))
    assert f"The sum deviates from the expected 2.000 by {MINUS}0.850." in page.text(".text .about")


def test_faithfulness_is_shown_even_if_not_measured(open_page: Open) -> None:
    page = open_page(scored_page())
    assert "Spearman 0.84" in page.text(".text .about")
    assert "rank correlation of 0.84" in page.text(".notes")
    unmeasured = dataclasses.replace(scores_of(VALUES, 0.05), rho=None)
    text = dataclasses.replace(text_of(), scores=[unmeasured])
    page = open_page(dataclasses.replace(plain_page(), texts=[text]))
    assert "was not measured" in page.text(".text .about")
    assert "rank correlation" not in page.text(".notes")


def test_large_baseline_does_not_shrink_the_bars_of_tokens(open_page: Open) -> None:
    full = full_page()
    assert full.contrast is not None
    contrast = dataclasses.replace(full.contrast, scores=scores_of(VALUES, 10.0))
    page = open_page(dataclasses.replace(full, contrast=contrast))
    rows = page.tab.locator(".contrast .bars tr").evaluate_all(
        "rows => rows.map(row => [row.querySelector('th').textContent, row.querySelector('i')?.style.width])"
    )
    widths = dict(rows)
    assert widths.pop("baseline") is None  # has no bar
    assert "100%" in widths.values()


def test_page_without_scores_shows_the_attention_of_the_selected_token(open_page: Open) -> None:
    page = open_page(plain_page())
    assert page.tab.get_by_role("group", name="Color by").count() == 0
    page.tab.locator(".text .chip").nth(3).click()
    assert page.text(".text .sum").startswith("animal attends to the shaded words")


def test_selecting_a_word_shows_its_partners_in_the_other_text(open_page: Open) -> None:
    page = open_page(full_page())
    matrix = np.arange(len(TOKENS) * 4, dtype=np.float32).reshape(-1, 4) / 1000
    page.press("Tokens")
    page.tab.locator(".pair .side").nth(0).locator(".chip").nth(5).click()
    assert (
        page.text(".pair-map .sum")
        == "animal pairs most strongly with [SEP] +0.023, slept +0.022, it +0.021."
    )
    titles = (
        page.tab.locator(".pair .side")
        .nth(1)
        .locator(".chip")
        .evaluate_all("chips => chips.map((chip) => chip.title.split(': ')[1])")
    )
    assert titles == [f"+{value:.3f}" for value in matrix[5]]
    page.tab.locator(".pair .side").nth(1).locator(".chip").nth(2).click()
    assert page.text(".pair-map .sum").startswith("slept pairs most strongly with [SEP] +0.042, . +0.038")


def test_pair_matrix_includes_baselines_and_adds_up(open_page: Open) -> None:
    page = open_page(full_page())
    page.press("Tokens")
    assert page.pixels(".pair-map .cells").shape == (len(TOKENS) + 2, 4 + 2, 3)
    matrix = np.arange(len(TOKENS) * 4, dtype=np.float32) / 1000
    expected = (
        f"All tokens {matrix.sum():.3f}, baseline row and column {MINUS}0.310 = {matrix.sum() - 0.31:.3f}."
    )
    assert expected in page.text(".pair-map figcaption")


def test_bars_show_the_largest_scores_others_baseline_and_sum(open_page: Open) -> None:
    page = open_page(full_page())
    bars = ".pair .side:first-child .bars th"
    assert page.texts(bars)[-3:] == [
        "[SEP]",
        "baseline",
        "sum",
    ]  # a row for one other word would save no space
    page.press("Tokens")
    assert page.texts(bars)[-3:] == ["3 others", "baseline", "sum"]
    numbers = [
        float(text.replace(MINUS, "-")) for text in page.texts(".pair .side:first-child .bars .number")
    ]
    assert abs(sum(numbers[:-1]) - numbers[-1]) < 0.006


def test_contrast_quotes_both_texts(open_page: Open) -> None:
    page = open_page(full_page())
    lead = "The cosine similarity is 0.100 higher to It slept. than to It ran.."
    assert page.text(".contrast .lead") == lead
    assert page.tab.locator("section").first.get_attribute("class") == "part contrast"
    assert page.tab.locator(".contrast .bars i.minus").count() > 0


def test_attention_of_either_text_can_be_displayed(open_page: Open) -> None:
    page = open_page(full_page())
    page.press("Second text")
    page.wait("document.querySelector('.attnlens').dataset.drawn.startsWith('1 ')")
    assert page.texts(".text .chip") == ["[CLS]", "it", "slept", "[SEP]"]


def test_words_of_two_texts_are_shown_once(open_page: Open) -> None:
    page = open_page(dataclasses.replace(full_page(), contrast=None))
    shown = "chips => chips.filter((chip) => chip.offsetParent && chip.textContent === 'animal').length"
    assert page.tab.locator(".chip").evaluate_all(shown) == 1
    page.press("attention of a token")
    assert page.tab.locator(".chip").evaluate_all(shown) == 2


def test_heads_can_be_filtered_by_label_and_sorted(open_page: Open) -> None:
    page = open_page(full_page())
    page.wait("document.querySelector('.heads').dataset.painted === '3'")
    page.press("broad")
    shown = page.tab.locator(".head:not(.faded)").evaluate_all("heads => heads.map((head) => head.title)")
    assert [title.split(":")[0] for title in shown] == ["Layer 1, head 3"]
    page.press("broad")
    page.press("contribution")
    first = page.tab.locator(".head").first
    assert (first.get_attribute("aria-label") or "").startswith("Layer 2, head 3: contributes +0.400")
    page.press("label")
    assert (page.tab.locator(".head").first.get_attribute("title") or "").endswith("broad, next token")
    page.press("sharpest")
    assert page.tab.locator(".head").count() == 12
