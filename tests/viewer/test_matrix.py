"""The heat map of a head shows the attention weights, for any selection."""

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
import pytest

from attnlens_viewer import Page
from opened_page import Open
from viewer_pages import HEADS, LAYERS, TOKENS, maps_of, plain_page, text_of

Array = npt.NDArray[np.float32]

CELLS = ".map canvas.cells"
WORDS = [[0], [1, 2, 3], [4], [5], [6], [7], [8], [9], [10]]


def colored(weights: Array, name: str = "viridis") -> npt.NDArray[np.uint8]:
    table = np.rint(mpl.colormaps[name](np.arange(256))[:, :3] * 255).astype(np.uint8)
    return np.asarray(table[np.rint(255 * np.sqrt(weights)).astype(int)])


def rounded(weights: Array) -> Array:
    """Return the weights after rounding to bytes."""
    return np.asarray(np.square(np.rint(255 * np.sqrt(weights)) / 255), dtype=np.float32)


def to_words(weights: Array) -> Array:
    columns = np.stack([weights[..., word].sum(axis=-1) for word in WORDS], axis=-1)
    return np.stack([columns[..., word, :].mean(axis=-2) for word in WORDS], axis=-2)


def test_cells_have_the_color_of_their_weight_in_every_head(open_page: Open) -> None:
    page = open_page(plain_page())
    page.press("Tokens")
    maps = maps_of(len(TOKENS))
    for layer in range(LAYERS):
        for head in range(HEADS):
            page.choose_head(layer, head)
            np.testing.assert_array_equal(page.pixels(CELLS), colored(maps[layer, head]))


@pytest.mark.parametrize("name", ["viridis", "cividis"])
def test_color_scales_match_matplotlib(open_page: Open, name: str) -> None:
    page = open_page(plain_page())
    page.press("Tokens")
    page.press(name)
    page.choose_head(1, 2)
    np.testing.assert_array_equal(page.pixels(CELLS), colored(maps_of(len(TOKENS))[1, 2], name))


def test_word_maps_average_rows_and_sum_columns(open_page: Open) -> None:
    page = open_page(plain_page())
    page.choose_head(2, 1)
    expected = colored(to_words(rounded(maps_of(len(TOKENS))[2, 1])))
    assert_nearly_equal(page.pixels(CELLS), expected)


def test_rows_are_rescaled_to_1_when_special_tokens_are_hidden(open_page: Open) -> None:
    page = open_page(plain_page())
    page.press("Special tokens")
    page.choose_head(0, 3)
    content = to_words(rounded(maps_of(len(TOKENS))[0, 3]))[1:-1, 1:-1]
    assert_nearly_equal(page.pixels(CELLS), colored(content / content.sum(axis=-1, keepdims=True)))
    assert "Hidden special tokens account for" in page.text(".read-out")


def test_mean_over_heads_can_be_selected(open_page: Open) -> None:
    page = open_page(plain_page())
    page.press("Tokens")
    page.tab.get_by_label("Head", exact=True).select_option("mean")
    layer = int(page.tab.get_by_label("Layer", exact=True).input_value())
    expected = colored(rounded(maps_of(len(TOKENS))[layer]).mean(axis=0))
    assert_nearly_equal(page.pixels(CELLS), expected)


def test_small_page_keeps_only_the_largest_weights_and_shows_a_notice(open_page: Open) -> None:
    spellings = [f"t{number}" for number in range(50)]
    text = text_of(spellings)
    page = open_page(Page(title="Many", model="small", texts=[text]), small=True)
    page.press("Tokens")
    page.choose_head(1, 1)
    weights = maps_of(50)[1, 1]
    limit = np.sort(np.rint(255 * np.sqrt(weights)), axis=-1)[:, -32, None]
    kept = np.where(np.rint(255 * np.sqrt(weights)) > limit, weights, 0)
    actual, expected = page.pixels(CELLS), colored(kept)
    at_limit = np.rint(255 * np.sqrt(weights)) == limit  # only some of the ties are kept
    np.testing.assert_array_equal(actual[~at_limit], expected[~at_limit])
    assert "the 32 largest weights of each row" in page.text(".facts")
    assert "A small page was requested" in page.text(".notes")


def test_row_table_lists_the_five_largest_weights(open_page: Open) -> None:
    page = open_page(plain_page())
    page.press("Tokens")
    page.choose_head(1, 0)
    page.tab.locator(".text .chip").nth(5).click()
    weights = rounded(maps_of(len(TOKENS))[1, 0, 5])
    order = np.argsort(-weights, kind="stable")[:5]
    assert page.texts(".read-out th") == [TOKENS[index].removeprefix("##") for index in order]
    shown = [float(text) for text in page.texts(".read-out .number")]
    np.testing.assert_allclose(shown, weights[order], atol=0.006)


def assert_nearly_equal(actual: npt.NDArray[np.uint8], expected: npt.NDArray[np.uint8]) -> None:
    """Compare colors with a tolerance: float32 sums may round to an adjacent color."""
    assert actual.shape == expected.shape
    assert np.abs(actual.astype(int) - expected.astype(int)).max() <= 4
    assert (actual == expected).all(axis=-1).mean() > 0.9
