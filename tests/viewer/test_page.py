"""Page validation, conversion of tokens and encoding of attention maps."""

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
from attnlens_viewer.initial_view import InitialView, initial_view
from attnlens_viewer.results import ContrastResult, build_title
from viewer_pages import HEADS, LAYERS, TOKENS, full_page, maps_of, plain_page, text_of, tokens_of


@dataclass(frozen=True)
class SourceToken:
    """A token as returned by the client."""

    text: str
    char_start: int
    char_end: int
    word_index: int | None
    source: str = "text"

    @property
    def is_special(self) -> bool:
        return self.source == "special"


def test_tokens_show_their_span_of_the_text_and_are_grouped_into_words() -> None:
    text = "Unbelievably,  it 🙂"
    tokens = [
        SourceToken("[CLS]", 0, 0, None, "special"),
        SourceToken("un", 0, 2, 0),
        SourceToken("##believably", 2, 12, 0),
        SourceToken(",", 12, 13, 1),
        SourceToken("\u0120it", 14, 17, 2),  # the span includes the preceding space
        SourceToken("ð\u0141", 18, 19, 3),  # one character split into two tokens
        SourceToken("\u013b\u0124", 18, 19, 3),
        SourceToken("[SEP]", 0, 0, None, "special"),
    ]
    viewed = viewed_tokens(tokens, {"text": text})
    assert [token.shown for token in viewed] == [
        "[CLS]", "Un", "believably", ",", "it", "🙂", "\u013b\u0124", "[SEP]",
    ]  # fmt: skip
    assert [token.word for token in viewed] == [0, 1, 1, 2, 3, 4, 4, 5]
    assert [token.is_joined for token in viewed] == [False, False, True, True, False, False, True, False]


def test_prompt_and_text_do_not_share_words() -> None:
    tokens = [SourceToken("query", 0, 5, 0, "prompt"), SourceToken("cat", 0, 3, 0)]
    viewed = viewed_tokens(tokens, {"prompt": "query: ", "text": "cat"})
    assert [(token.shown, token.word) for token in viewed] == [("query", 0), ("cat", 1)]


@given(st.lists(st.floats(0, 1, width=32), min_size=1))
def test_weights_are_quantized_to_the_nearest_square_root(values: list[float]) -> None:
    weights = np.array(values, dtype=np.float32)
    encoded = square_root_bytes(weights)
    decoded = (encoded / 255.0) ** 2
    assert np.abs(decoded - weights).max() <= 1 / 255
    assert np.array_equal(square_root_bytes(encoded), encoded)


@pytest.mark.parametrize("weight", [-0.1, 1.1, np.nan, np.inf])
def test_values_outside_0_to_1_are_rejected(weight: float) -> None:
    with pytest.raises(ValueError, match="attention weights must be between 0 and 1"):
        square_root_bytes(np.array([0.5, weight]))


def test_largest_weights_of_a_row_are_stored_with_their_columns() -> None:
    maps = np.array([[[5, 9, 9, 1], [0, 0, 0, 7]]], dtype=np.uint8)
    content = top_bytes(maps, 2)
    assert np.frombuffer(content[:8], "<u2").tolist() == [1, 2, 0, 3]
    assert list(content[8:]) == [9, 9, 0, 7]


def test_document_embeds_each_layer_as_base64_zlib() -> None:
    document = html_of(plain_page())
    maps = maps_of(len(TOKENS))
    for layer in range(LAYERS):
        match = re.search(rf'id="attnlens-maps-0-{layer}">([^<]*)</script>', document)
        assert match is not None
        content = zlib.decompress(base64.b64decode(match[1]))
        assert content == square_root_bytes(maps[layer]).tobytes()


def test_page_opens_with_the_head_that_attends_to_distant_words() -> None:
    text = text_of()
    maps = np.full((LAYERS, HEADS, len(TOKENS), len(TOKENS)), 1 / len(TOKENS))
    maps[2, 3, 8] = np.eye(len(TOKENS))[5]  # tired -> animal, three words away
    maps[1, 1, :, 0] = 1  # every token attends to the first
    assert initial_view(dataclasses.replace(text, maps=maps)) == InitialView(2, 3, 8)
    encoded = [square_root_bytes(layer) for layer in maps]
    assert initial_view(dataclasses.replace(text, maps=encoded)) == InitialView(2, 3, 8)
    assert initial_view(text_of(("[CLS]", "a", "[SEP]"))) == InitialView(0, 0, 0)


def test_title_of_a_contrast_names_all_three_texts() -> None:
    contrast = ContrastResult("B", "C" * 99, cast("Any", None))
    assert build_title(["A", "B"], contrast) == f"A / B rather than {'C' * 29}…"
    assert build_title(["A"], contrast) == build_title(["A", "B"], contrast)
    assert build_title(["A", "B"]) == "A / B"


INVALID: dict[str, tuple[Callable[[], object], str]] = {
    "no text": (lambda: dataclasses.replace(plain_page(), texts=[]), "displays one or two texts, got 0"),
    "no tokens": (
        lambda: dataclasses.replace(text_of(), tokens=[]),
        "0 tokens, but a page displays 1 to 2048",
    ),
    "maps of another size": (
        lambda: dataclasses.replace(text_of(), tokens=tokens_of(TOKENS[:3])),
        r"maps of shape \(4, 11, 11\), expected \(4, 3, 3\)",
    ),
    "no maps": (lambda: dataclasses.replace(text_of(), maps=[]), "no attention maps"),
    "unordered words": (
        lambda: dataclasses.replace(text_of(), tokens=text_of().tokens[::-1]),
        "not in ascending order",
    ),
    "scores of another size": (
        lambda: dataclasses.replace(
            text_of(),
            scores=[dataclasses.replace(full_page().texts[0].scores[0], values=np.zeros(3))],
        ),
        r"contributions scores of Text: shape is \(3,\), expected \(11,\)",
    ),
    "non-finite values": (
        lambda: dataclasses.replace(text_of(), head_contributions=np.full((LAYERS, HEADS), np.nan)),
        "head contributions of Text: contains non-finite values",
    ),
    "a pair matrix for one text": (
        lambda: Page(title="", model="", texts=[text_of()], pair=full_page().pair),
        "a pair matrix requires two texts",
    ),
    "labels for a nonexistent head": (
        lambda: dataclasses.replace(plain_page(), labels=[HeadLabels(0, HEADS, ("x",))]),
        "nonexistent head L0H4: the attention maps have 3 layers with 4 heads",
    ),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_pages_are_rejected(case: str) -> None:
    make, message = INVALID[case]
    with pytest.raises(ValueError, match=message):
        make()
