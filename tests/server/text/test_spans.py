"""Token offsets of each tokenizer type, compared with hand-counted values."""

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
def test_offsets_match_hand_counted_values(
    kind: str, text: str, text_encoders: dict[str, TextEncoder]
) -> None:
    assert as_table(tokens_of(text_encoders[kind], text)) == TABLES[kind][text]


# Letters of many scripts, marks, joiners, variation selectors, flags, ligatures and white space; or anything.
TRICKY = st.text(
    st.sampled_from("aeﬁßİ é東の😀👩💻🇳🇴▁Ġ  \u0301\u0308\u200d\ufe0f\u3000\u200b\t\n\u1112\u1161\u11abस्")
)
ANY_TEXT = TRICKY | st.text(max_size=40)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(text=ANY_TEXT)
@example(text="\ufdfa a")  # a single character that NFKC expands to four words
def test_offsets_are_ordered_and_agree_in_characters_and_bytes(
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
def test_truncation_does_not_change_offsets(
    kind: str, text: str, max_tokens: int, text_encoders: dict[str, TextEncoder]
) -> None:
    whole = as_table(tokens_of(text_encoders[kind], text))
    cut = as_table(tokens_of(TextEncoder(TOKENIZERS / kind / "tokenizer.json", max_tokens), text))
    assert len(cut) == min(len(whole), max_tokens - 2)
    # A mark after the last token may be truncated with it, depending on whether it is a separate token.
    assert cut[:-1] == whole[: len(cut)][:-1]
    for last, same in zip(cut[-1:], whole[len(cut) - 1 :], strict=False):
        assert (last[0], last[1][0]) == (same[0], same[1][0])
        assert last[1][1] <= same[1][1]


def save_prefixed(path: Path, *, trim_offsets: bool, nested: bool) -> TextEncoder:
    """A byte-level tokenizer that inserts a space before the text and after special tokens."""
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
def test_byte_level_offsets_do_not_depend_on_trimming(
    *, trim_offsets: bool, nested: bool, tmp_path: Path
) -> None:
    text_encoder = save_prefixed(tmp_path / "tokenizer.json", trim_offsets=trim_offsets, nested=nested)
    # The tokenizer inserts a space before the first word. It corresponds to no character of the text.
    assert as_table(tokens_of(text_encoder, "the")) == [("Ġthe", (0, 3), (0, 3))]
    assert as_table(tokens_of(text_encoder, "b a")) == [
        ("Ġb", (0, 1), (0, 1)), ("Ġa", (2, 3), (2, 3))
    ]  # fmt: skip
    assert as_table(tokens_of(text_encoder, "é"))[0] == ("Ġ", (0, 0), (0, 0))
    # The text already has a space, so none is inserted.
    assert as_table(tokens_of(text_encoder, " the")) == [("Ġthe", (1, 4), (1, 4))]
    # The library trims the space inserted after the special token: (6, 6), before "é" at (5, 6).
    text = "a</s>éb"
    spans = [token.chars for token in tokens_of(text_encoder, text)]
    assert spans == [(0, 1), (1, 5), (5, 5), (5, 6), (5, 6), (6, 7)]


def test_spaces_inside_tokenizer_words_are_excluded(tmp_path: Path) -> None:
    vocabulary = [("<unk>", 0.0), ("▁the", -1.0), ("▁", -2.0), ("▁of▁the", -1.0), ("Ġ", -1.0)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text_encoder = TextEncoder(tmp_path / "tokenizer.json", 32)
    assert as_table(tokens_of(text_encoder, "the of the")) == [
        ("▁the", (0, 3), (0, 3)), ("▁of▁the", (4, 10), (4, 10))
    ]  # fmt: skip
    # Characters that resemble the tokenizer's own markers are ordinary characters.
    assert as_table(tokens_of(text_encoder, "▁"))[-1] == ("▁", (0, 1), (0, 3))
    assert as_table(tokens_of(text_encoder, "Ġ"))[-1] == ("Ġ", (0, 1), (0, 2))
    assert as_table(tokens_of(text_encoder, "G\u0307"))[-1] == ("Ġ", (0, 2), (0, 3))
