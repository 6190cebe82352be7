"""Tokens and their places in the text, counted by hand."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlens_server.config import ConfigError
from attnlens_server.errors import StartupError
from attnlens_server.text import TextEncoder, TokenSource
from attnlens_server.text.tokens import utf8_offsets
from token_places import SpelledToken, described


@pytest.fixture(scope="module")
def text_encoder(minilm_dir: Path) -> TextEncoder:
    return TextEncoder(minilm_dir / "tokenizer.json", max_tokens=16)


@given(st.text())
def test_byte_offsets_agree_with_encoding_each_prefix(text: str) -> None:
    assert list(utf8_offsets(text)) == [len(text[:end].encode()) for end in range(len(text) + 1)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # spelling; first and last character; the same in bytes; number of the word
        ("a cat", [("a", (0, 1), (0, 1), 0), ("cat", (2, 5), (2, 5), 1)]),
        # é and ï are two bytes each; the tokenizer strips the accents, the offsets must not shift
        ("né naïve", [("ne", (0, 2), (0, 3), 0), ("naive", (3, 8), (4, 10), 1)]),
        # é as e and a combining accent: the tokenizer drops the accent, which belongs to its letter's token
        ("ne\u0301 a", [("ne", (0, 3), (0, 4), 0), ("a", (4, 5), (5, 6), 1)]),
        # an emoji outside the basic plane: one character, four bytes
        ("😀 ok", [("[UNK]", (0, 1), (0, 4), 0), ("ok", (2, 4), (5, 7), 1)]),
        # each Chinese character is a word of its own, three bytes long
        ("中 a", [("中", (0, 1), (0, 3), 0), ("a", (2, 3), (4, 5), 1)]),
        # one word in two pieces
        ("x embeddings", [
            ("x", (0, 1), (0, 1), 0),
            ("em", (2, 4), (2, 4), 1),
            ("##bed", (4, 7), (4, 7), 1),
            ("##ding", (7, 11), (7, 11), 1),
            ("##s", (11, 12), (11, 12), 1),
        ]),
    ],
)  # fmt: skip
def test_tokens_stand_where_they_stand(
    text_encoder: TextEncoder,
    text: str,
    expected: list[tuple[str, tuple[int, int], tuple[int, int], int]],
) -> None:
    [encoded] = text_encoder.encode([(text,)], with_record=True)
    first, *tokens, last = described(encoded, text_encoder)
    assert [(token.text, token.chars, token.bytes, token.word) for token in tokens] == expected
    for special, spelling in ((first, "[CLS]"), (last, "[SEP]")):
        assert special.text == spelling
        assert special == SpelledToken(special.id, spelling, TokenSource.SPECIAL, (0, 0), (0, 0), None)
    assert {token.source for token in tokens} == {TokenSource.TEXT}


def test_byte_offsets_cut_the_token_out_of_the_bytes(text_encoder: TextEncoder) -> None:
    text = "Zoë's café: 東京 😀!"
    [encoded] = text_encoder.encode([(text,)], with_record=True)
    for token in described(encoded, text_encoder):
        cut = text.encode()[slice(*token.bytes)].decode()
        assert cut == text[slice(*token.chars)]


def test_a_long_text_is_cut_before_its_last_special_token_and_says_so(text_encoder: TextEncoder) -> None:
    [whole, cut] = text_encoder.encode([("cat",), ("cat " * 30,)])
    assert (whole.num_tokens, whole.num_tokens_total) == (3, 3)
    assert (cut.num_tokens, cut.num_tokens_total) == (16, 32)
    assert cut.input_ids[0] == whole.input_ids[0]
    assert cut.input_ids[-1] == whole.input_ids[-1]


def test_encoding_without_a_record_gives_the_same_ids(text_encoder: TextEncoder) -> None:
    texts = [("Zoë's café",), ("",), ("東京 😀",), ("cat " * 30,), ("a cat", "the mat")]
    fast = text_encoder.encode(texts)
    full = text_encoder.encode(texts, with_record=True)
    assert [text.input_ids.tolist() for text in fast] == [text.input_ids.tolist() for text in full]


def test_an_empty_text_has_special_tokens_only(text_encoder: TextEncoder) -> None:
    [encoded] = text_encoder.encode([("",)], with_record=True)
    assert [token.text for token in described(encoded, text_encoder)] == ["[CLS]", "[SEP]"]


@pytest.mark.parametrize(("max_tokens", "fits"), [(1, False), (2, False), (3, True)])
def test_the_limit_must_leave_room_beside_the_special_tokens(
    minilm_dir: Path, max_tokens: int, *, fits: bool
) -> None:
    path = minilm_dir / "tokenizer.json"
    if not fits:
        with pytest.raises(ConfigError, match="must be at least 3, since 2 special tokens"):
            TextEncoder(path, max_tokens)
        return
    [encoded] = TextEncoder(path, max_tokens).encode([("a long text",)])
    assert (encoded.num_tokens, encoded.num_tokens_total) == (3, 5)


def test_a_broken_tokenizer_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(StartupError, match=r"tokenizer\.json is not a tokenizer"):
        TextEncoder(tmp_path / "tokenizer.json", max_tokens=16)
