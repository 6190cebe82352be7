"""What a page refuses, how tokens become words, and how maps become bytes."""

import base64
import dataclasses
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlens_viewer import HeadLabels, Page, html_of, viewed_tokens
from attnlens_viewer.encoding import square_root_bytes, top_bytes
from attnlens_viewer.results import ReadContrast, title_of
from attnlens_viewer.telling_place import Place, telling_place
from viewer_pages import HEADS, LAYERS, TOKENS, full_page, maps_of, plain_page, text_of, tokens_of


@dataclass(frozen=True)
class Placed:
    """A token as the client returns it."""

    text: str
    char_start: int
    char_end: int
    word_index: int | None
    source: str = "text"

    @property
    def is_special(self) -> bool:
        return self.source == "special"


def test_tokens_show_their_piece_of_the_text_and_know_their_word() -> None:
    text = "Unbelievably,  it 🙂"
    tokens = [
        Placed("[CLS]", 0, 0, None, "special"),
        Placed("un", 0, 2, 0),
        Placed("##believably", 2, 12, 0),
        Placed(",", 12, 13, 1),
        Placed("\u0120it", 14, 17, 2),  # with the space before it
        Placed("ð\u0141", 18, 19, 3),  # a character of two tokens
        Placed("\u013b\u0124", 18, 19, 3),
        Placed("[SEP]", 0, 0, None, "special"),
    ]
    viewed = viewed_tokens(tokens, {"text": text})
    assert [token.shown for token in viewed] == [
        "[CLS]", "Un", "believably", ",", "it", "🙂", "\u013b\u0124", "[SEP]",
    ]  # fmt: skip
    assert [token.word for token in viewed] == [0, 1, 1, 2, 3, 4, 4, 5]
    assert [token.is_joined for token in viewed] == [False, False, True, True, False, False, True, False]


def test_words_of_a_prompt_and_of_the_text_are_apart() -> None:
    tokens = [Placed("query", 0, 5, 0, "prompt"), Placed("cat", 0, 3, 0)]
    viewed = viewed_tokens(tokens, {"prompt": "query: ", "text": "cat"})
    assert [(token.shown, token.word) for token in viewed] == [("query", 0), ("cat", 1)]


@given(st.lists(st.floats(0, 1, width=32), min_size=1))
def test_a_byte_is_the_nearest_square_root(weights: list[float]) -> None:
    given_weights = np.array(weights, dtype=np.float32)
    back = (square_root_bytes(given_weights) / 255.0) ** 2
    assert np.abs(back - given_weights).max() <= 1 / 255
    assert np.array_equal(
        square_root_bytes(square_root_bytes(given_weights)), square_root_bytes(given_weights)
    )


@pytest.mark.parametrize("weight", [-0.1, 1.1, np.nan, np.inf])
def test_what_is_no_attention_weight_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="a page shows attention weights, from 0 to 1"):
        square_root_bytes(np.array([0.5, weight]))


def test_the_largest_of_a_row_come_with_their_columns() -> None:
    maps = np.array([[[5, 9, 9, 1], [0, 0, 0, 7]]], dtype=np.uint8)
    content = top_bytes(maps, 2)
    assert np.frombuffer(content[:8], "<u2").tolist() == [1, 2, 0, 3]
    assert list(content[8:]) == [9, 9, 0, 7]


def test_the_file_holds_each_layer_as_zlib_in_base64() -> None:
    document = html_of(plain_page())
    maps = maps_of(len(TOKENS))
    for layer in range(LAYERS):
        found = re.search(rf'id="attnlens-maps-0-{layer}">([^<]*)</script>', document)
        assert found is not None
        content = zlib.decompress(base64.b64decode(found[1]))
        assert content == square_root_bytes(maps[layer]).tobytes()


def test_a_page_opens_with_the_head_that_looks_furthest() -> None:
    text = text_of()
    maps = np.full((LAYERS, HEADS, len(TOKENS), len(TOKENS)), 1 / len(TOKENS))
    maps[2, 3, 8] = np.eye(len(TOKENS))[5]  # tired -> animal, three words away
    maps[1, 1, :, 0] = 1  # all at the first token
    assert telling_place(dataclasses.replace(text, maps=maps)) == Place(2, 3, 8)
    roots = [square_root_bytes(layer) for layer in maps]
    assert telling_place(dataclasses.replace(text, maps=roots)) == Place(2, 3, 8)
    assert telling_place(text_of(("[CLS]", "a", "[SEP]"))) == Place(0, 0, 0)


def test_the_title_of_a_contrast_names_all_three_texts() -> None:
    contrast = ReadContrast("B", "C" * 99, cast("Any", None))
    assert title_of(["A", "B"], contrast) == f"A / B rather than {'C' * 29}…"
    assert title_of(["A"], contrast) == title_of(["A", "B"], contrast)
    assert title_of(["A", "B"]) == "A / B"


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no text": (lambda: dataclasses.replace(plain_page(), texts=[]), "there are 0 texts"),
    "no tokens": (lambda: dataclasses.replace(text_of(), tokens=[]), "has 0 tokens, a page shows 1 to 2048"),
    "other maps": (
        lambda: dataclasses.replace(text_of(), tokens=tokens_of(TOKENS[:3])),
        r"maps of shape \(4, 11, 11\), not \(4, 3, 3\)",
    ),
    "no maps": (lambda: dataclasses.replace(text_of(), maps=[]), "no attention maps"),
    "words in disorder": (
        lambda: dataclasses.replace(text_of(), tokens=text_of().tokens[::-1]),
        "a word's tokens stand together",
    ),
    "scores": (
        lambda: dataclasses.replace(
            text_of(),
            scores=[dataclasses.replace(full_page().texts[0].scores[0], values=np.zeros(3))],
        ),
        r"the contributions of Text is \(3,\), not \(11,\)",
    ),
    "not finite": (
        lambda: dataclasses.replace(text_of(), head_contributions=np.full((LAYERS, HEADS), np.nan)),
        "some of the head contributions of Text are not finite",
    ),
    "a pair of one": (
        lambda: Page(title="", model="", texts=[text_of()], pair=full_page().pair),
        "a pair matrix needs two texts",
    ),
    "a head too many": (
        lambda: dataclasses.replace(plain_page(), labels=[HeadLabels(0, HEADS, ("x",))]),
        "labels of L0H4: the maps have 3 layers of 4 heads",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        make()
