"""The cells of the matrix are the weights, whatever is chosen."""

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


def coloured(weights: Array, name: str = "viridis") -> npt.NDArray[np.uint8]:
    table = np.rint(mpl.colormaps[name](np.arange(256))[:, :3] * 255).astype(np.uint8)
    return np.asarray(table[np.rint(255 * np.sqrt(weights)).astype(int)])


def stored(weights: Array) -> Array:
    """What is left of the weights after they were rounded to bytes."""
    return np.asarray(np.square(np.rint(255 * np.sqrt(weights)) / 255), dtype=np.float32)


def to_words(weights: Array) -> Array:
    columns = np.stack([weights[..., word].sum(axis=-1) for word in WORDS], axis=-1)
    return np.stack([columns[..., word, :].mean(axis=-2) for word in WORDS], axis=-2)


def test_a_cell_has_the_colour_of_its_weight_in_every_head(open_page: Open) -> None:
    page = open_page(plain_page())
    page.press("Tokens")
    maps = maps_of(len(TOKENS))
    for layer in range(LAYERS):
        for head in range(HEADS):
            page.choose_head(layer, head)
            np.testing.assert_array_equal(page.pixels(CELLS), coloured(maps[layer, head]))


@pytest.mark.parametrize("name", ["viridis", "cividis"])
def test_the_colours_are_those_of_matplotlib(open_page: Open, name: str) -> None:
    page = open_page(plain_page())
    page.press("Tokens")
    page.press(name)
    page.choose_head(1, 2)
    np.testing.assert_array_equal(page.pixels(CELLS), coloured(maps_of(len(TOKENS))[1, 2], name))


def test_a_row_of_words_is_the_mean_and_a_column_the_sum(open_page: Open) -> None:
    page = open_page(plain_page())
    page.choose_head(2, 1)
    wanted = coloured(to_words(stored(maps_of(len(TOKENS))[2, 1])))
    assert_nearly_equal(page.pixels(CELLS), wanted)


def test_without_special_tokens_rows_are_scaled_to_one(open_page: Open) -> None:
    page = open_page(plain_page())
    page.press("Special tokens")
    page.choose_head(0, 3)
    content = to_words(stored(maps_of(len(TOKENS))[0, 3]))[1:-1, 1:-1]
    assert_nearly_equal(page.pixels(CELLS), coloured(content / content.sum(axis=-1, keepdims=True)))
    assert "Special tokens had" in page.text(".read-out")


def test_the_mean_of_the_heads_is_one_of_the_choices(open_page: Open) -> None:
    page = open_page(plain_page())
    page.press("Tokens")
    page.tab.get_by_label("Head", exact=True).select_option("mean")
    layer = int(page.tab.get_by_label("Layer", exact=True).input_value())
    wanted = coloured(stored(maps_of(len(TOKENS))[layer]).mean(axis=0))
    assert_nearly_equal(page.pixels(CELLS), wanted)


def test_a_small_page_keeps_the_largest_weights_and_says_so(open_page: Open) -> None:
    spellings = [f"t{number}" for number in range(50)]
    text = text_of(spellings)
    page = open_page(Page(title="Many", model="small", texts=[text]), small=True)
    page.press("Tokens")
    page.choose_head(1, 1)
    weights = maps_of(50)[1, 1]
    limit = np.sort(np.rint(255 * np.sqrt(weights)), axis=-1)[:, -32, None]
    kept = np.where(np.rint(255 * np.sqrt(weights)) > limit, weights, 0)
    got, wanted = page.pixels(CELLS), coloured(kept)
    at_limit = np.rint(255 * np.sqrt(weights)) == limit  # of equal ones, some are kept
    np.testing.assert_array_equal(got[~at_limit], wanted[~at_limit])
    assert "the 32 largest weights of each row" in page.text(".facts")
    assert "This page was made small" in page.text(".notes")


def test_the_read_out_names_the_five_largest_weights_of_the_row(open_page: Open) -> None:
    page = open_page(plain_page())
    page.press("Tokens")
    page.choose_head(1, 0)
    page.tab.locator(".text .chip").nth(5).click()
    weights = stored(maps_of(len(TOKENS))[1, 0, 5])
    order = np.argsort(-weights, kind="stable")[:5]
    assert page.texts(".read-out th") == [TOKENS[place].removeprefix("##") for place in order]
    shown = [float(text) for text in page.texts(".read-out .number")]
    np.testing.assert_allclose(shown, weights[order], atol=0.006)


def assert_nearly_equal(got: npt.NDArray[np.uint8], wanted: npt.NDArray[np.uint8]) -> None:
    """Sums in float32 may round to the neighbouring colour."""
    assert got.shape == wanted.shape
    assert np.abs(got.astype(int) - wanted.astype(int)).max() <= 4
    assert (got == wanted).all(axis=-1).mean() > 0.9
