"""Places of tokens for each kind of tokenizer, counted by hand."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from attnlens_server.text import TextEncoder, TokenSource
from token_spans import KINDS, TABLES, SpelledToken, described

TOKENIZERS = Path(__file__).parents[2] / "data" / "tokenizers"


@pytest.fixture(scope="module")
def text_encoders() -> dict[str, TextEncoder]:
    return {kind: TextEncoder(TOKENIZERS / kind / "tokenizer.json", 1000) for kind in KINDS}


def tokens_of(text_encoder: TextEncoder, text: str) -> list[SpelledToken]:
    [encoded] = text_encoder.encode([(text,)], with_record=True)
    return [token for token in described(encoded, text_encoder) if token.source != TokenSource.SPECIAL]


def as_table(tokens: list[SpelledToken]) -> list[tuple[str, tuple[int, int], tuple[int, int]]]:
    return [(token.text, token.chars, token.bytes) for token in tokens]


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind in KINDS for text in TABLES[kind]])
def test_tokens_stand_where_they_stand(kind: str, text: str, text_encoders: dict[str, TextEncoder]) -> None:
    assert as_table(tokens_of(text_encoders[kind], text)) == TABLES[kind][text]


# Letters of many scripts, marks, joiners, selectors, flags, ligatures, white space; and anything.
TRICKY = st.text(
    st.sampled_from("aeﬁßİ é東の😀👩💻🇳🇴▁Ġ  \u0301\u0308\u200d\ufe0f\u3000\u200b\t\n\u1112\u1161\u11abस्")
)
ANY_TEXT = TRICKY | st.text(max_size=40)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(text=ANY_TEXT)
@example(text="\ufdfa a")  # one character that NFKC makes four words of
def test_places_are_ordered_and_cut_the_same_out_of_characters_and_bytes(
    kind: str, text: str, text_encoders: dict[str, TextEncoder]
) -> None:
    whole, last_start = text.encode(), 0
    for token in tokens_of(text_encoders[kind], text):
        start, end = token.chars
        assert 0 <= start <= end <= len(text)
        assert last_start <= start
        last_start = start
        held = text[start:end]
        assert held.encode() == whole[slice(*token.bytes)]
        assert held == held.strip() or held.isspace()
        assert token.word is not None


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(text=ANY_TEXT, max_tokens=st.integers(3, 12))
@example(text="ae\u0301 a", max_tokens=5)
@example(text="the 😀", max_tokens=5)
def test_a_cut_text_has_the_places_that_it_has_whole(
    kind: str, text: str, max_tokens: int, text_encoders: dict[str, TextEncoder]
) -> None:
    whole = as_table(tokens_of(text_encoders[kind], text))
    cut = as_table(tokens_of(TextEncoder(TOKENIZERS / kind / "tokenizer.json", max_tokens), text))
    assert len(cut) == min(len(whole), max_tokens - 2)
    # Whether a mark behind the last token has a token of its own is cut off with it.
    assert cut[:-1] == whole[: len(cut)][:-1]
    for last, same in zip(cut[-1:], whole[len(cut) - 1 :], strict=False):
        assert (last[0], last[1][0]) == (same[0], same[1][0])
        assert last[1][1] <= same[1][1]


def save_prefixed(path: Path, *, trim_offsets: bool, nested: bool) -> TextEncoder:
    """A byte-level tokenizer that puts a space before the text and before what follows a special token."""
    tokenizer = Tokenizer.from_file(str(TOKENIZERS / "byte-level" / "tokenizer.json"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    roberta = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets, add_prefix_space=True)
    template: Any = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.post_processor = (
        processors.Sequence([processors.ByteLevel(trim_offsets=trim_offsets), template])
        if nested
        else roberta
    )
    tokenizer.save(str(path))
    return TextEncoder(path, 32)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("trim_offsets", [False, True])
def test_byte_level_places_do_not_depend_on_how_the_tokenizer_trims(
    *, trim_offsets: bool, nested: bool, tmp_path: Path
) -> None:
    text_encoder = save_prefixed(tmp_path / "tokenizer.json", trim_offsets=trim_offsets, nested=nested)
    # A space was put before the first word: nothing in the text stands for it.
    assert as_table(tokens_of(text_encoder, "the")) == [("Ġthe", (0, 3), (0, 3))]
    assert as_table(tokens_of(text_encoder, "b a")) == [
        ("Ġb", (0, 1), (0, 1)), ("Ġa", (2, 3), (2, 3))
    ]  # fmt: skip
    assert as_table(tokens_of(text_encoder, "é"))[0] == ("Ġ", (0, 0), (0, 0))
    # There is a space, and none is put there.
    assert as_table(tokens_of(text_encoder, " the")) == [("Ġthe", (1, 4), (1, 4))]
    # The library trims the space that it puts behind the special token: (6, 6), before "é" at (5, 6).
    text = "a</s>éb"
    places = [token.chars for token in tokens_of(text_encoder, text)]
    assert places == [(0, 1), (1, 5), (5, 5), (5, 6), (5, 6), (6, 7)]


def test_spaces_that_the_tokenizer_keeps_inside_its_words_are_left_out(tmp_path: Path) -> None:
    vocabulary = [("<unk>", 0.0), ("▁the", -1.0), ("▁", -2.0), ("▁of▁the", -1.0), ("Ġ", -1.0)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text_encoder = TextEncoder(tmp_path / "tokenizer.json", 32)
    assert as_table(tokens_of(text_encoder, "the of the")) == [
        ("▁the", (0, 3), (0, 3)), ("▁of▁the", (4, 10), (4, 10))
    ]  # fmt: skip
    # Letters that look like the tokenizer's own marks are letters.
    assert as_table(tokens_of(text_encoder, "▁"))[-1] == ("▁", (0, 1), (0, 3))
    assert as_table(tokens_of(text_encoder, "Ġ"))[-1] == ("Ġ", (0, 1), (0, 2))
    assert as_table(tokens_of(text_encoder, "G\u0307"))[-1] == ("Ġ", (0, 2), (0, 3))
