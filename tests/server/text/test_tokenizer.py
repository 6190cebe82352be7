"""Tokens and their offsets, compared with hand-counted values."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from attnlens_server.config import ConfigError
from attnlens_server.errors import (
    InputTooLongError,
    InvalidFieldsError,
    NotSupportedError,
    StartupError,
)
from attnlens_server.text import (
    Input,
    InputEncoder,
    PairEncoder,
    TextEncoder,
    TextPair,
    TokenIds,
    TokenSource,
    UntokenizableError,
)
from attnlens_server.text.tokenizer import _growth_of_charsmap
from attnlens_server.text.tokens import utf8_offsets
from token_spans import SpelledToken, described


@pytest.fixture(scope="module")
def text_encoder(minilm_dir: Path) -> TextEncoder:
    return TextEncoder(minilm_dir / "tokenizer.json", max_tokens=16)


@given(st.text())
def test_byte_offsets_match_encoded_prefixes(text: str) -> None:
    assert list(utf8_offsets(text)) == [len(text[:end].encode()) for end in range(len(text) + 1)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # token; character span; byte span; word index
        ("a cat", [("a", (0, 1), (0, 1), 0), ("cat", (2, 5), (2, 5), 1)]),
        # é and ï take two bytes each. The tokenizer strips accents, which must not shift the offsets.
        ("né naïve", [("ne", (0, 2), (0, 3), 0), ("naive", (3, 8), (4, 10), 1)]),
        # é as e and a combining accent: the tokenizer drops the accent, which belongs to its letter
        ("ne\u0301 a", [("ne", (0, 3), (0, 4), 0), ("a", (4, 5), (5, 6), 1)]),
        # an emoji outside the Basic Multilingual Plane: one character, four bytes
        ("😀 ok", [("[UNK]", (0, 1), (0, 4), 0), ("ok", (2, 4), (5, 7), 1)]),
        # each Chinese character is a separate word of three bytes
        ("中 a", [("中", (0, 1), (0, 3), 0), ("a", (2, 3), (4, 5), 1)]),
        # one word with two tokens
        ("x embeddings", [
            ("x", (0, 1), (0, 1), 0),
            ("em", (2, 4), (2, 4), 1),
            ("##bed", (4, 7), (4, 7), 1),
            ("##ding", (7, 11), (7, 11), 1),
            ("##s", (11, 12), (11, 12), 1),
        ]),
    ],
)  # fmt: skip
def test_offsets_match_hand_counted_values(
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


def test_byte_offsets_select_the_token_in_the_encoded_text(text_encoder: TextEncoder) -> None:
    text = "Zoë's café: 東京 😀!"
    [encoded] = text_encoder.encode([(text,)], with_record=True)
    for token in described(encoded, text_encoder):
        cut = text.encode()[slice(*token.bytes)].decode()
        assert cut == text[slice(*token.chars)]


def test_truncation_keeps_the_last_special_token_and_is_reported(text_encoder: TextEncoder) -> None:
    [whole, cut] = text_encoder.encode([("cat",), ("cat " * 30,)])
    assert (whole.num_tokens, whole.num_tokens_total) == (3, 3)
    assert (cut.num_tokens, cut.num_tokens_total) == (16, 32)
    assert cut.input_ids[0] == whole.input_ids[0]
    assert cut.input_ids[-1] == whole.input_ids[-1]


@pytest.mark.parametrize("num_tokens", [1, 4, 5])
def test_text_at_the_token_limit_is_not_truncated(num_tokens: int) -> None:
    encoder = InputEncoder(None, 4, exclude_prompt=False)
    inputs = [Input(token_ids=TokenIds(range(num_tokens)))]
    if num_tokens > 4:
        with pytest.raises(InputTooLongError, match="has 5 tokens, but the limit is 4"):
            encoder.encode(inputs, range(1), prompt="", truncate=False)
        return
    [encoded] = encoder.encode(inputs, range(1), prompt="", truncate=False)
    assert encoded.num_tokens == encoded.num_tokens_total == num_tokens


def test_final_separator_does_not_count_as_a_prompt_token(text_encoder: TextEncoder) -> None:
    assert text_encoder.num_prompt_tokens("query: ") == len(["[CLS]", "query", ":"])


def test_encoding_without_offsets_returns_the_same_ids(text_encoder: TextEncoder) -> None:
    texts = [("Zoë's café",), ("",), ("東京 😀",), ("cat " * 30,), ("a cat", "the mat")]
    fast = text_encoder.encode(texts)
    full = text_encoder.encode(texts, with_record=True)
    assert [text.input_ids.tolist() for text in fast] == [text.input_ids.tolist() for text in full]


def test_empty_text_has_only_special_tokens(text_encoder: TextEncoder) -> None:
    [encoded] = text_encoder.encode([("",)], with_record=True)
    assert [token.text for token in described(encoded, text_encoder)] == ["[CLS]", "[SEP]"]


@pytest.mark.parametrize(("max_tokens", "fits"), [(1, False), (2, False), (3, True)])
def test_token_limit_must_exceed_the_special_tokens(minilm_dir: Path, max_tokens: int, *, fits: bool) -> None:
    path = minilm_dir / "tokenizer.json"
    if not fits:
        with pytest.raises(ConfigError, match="each text has 2 special tokens: use at least 3"):
            TextEncoder(path, max_tokens)
        return
    [encoded] = TextEncoder(path, max_tokens).encode([("a long text",)])
    assert (encoded.num_tokens, encoded.num_tokens_total) == (3, 5)


def test_invalid_tokenizer_file_is_rejected_by_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(StartupError, match=r"tokenizer\.json is not a tokenizer"):
        TextEncoder(tmp_path / "tokenizer.json", max_tokens=16)


# --- unsafe tokenizers ----------------------------------------------------------------------------


def changed(minilm_dir: Path, tmp_path: Path, **parts: Any) -> Path:
    """Write MiniLM's tokenizer with some parts replaced."""
    content = json.loads((minilm_dir / "tokenizer.json").read_text())
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content | parts))
    return path


def replace_all(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def test_ids_beyond_the_vocabulary_are_rejected(minilm_dir: Path, tmp_path: Path) -> None:
    encoder = TextEncoder(minilm_dir / "tokenizer.json", max_tokens=16)
    encoder.check_ids(30522)
    with pytest.raises(StartupError, match=r"has the id 30521, but the model only supports ids below 30521"):
        encoder.check_ids(30521)
    processor = json.loads((minilm_dir / "tokenizer.json").read_text())["post_processor"]
    processor["special_tokens"]["[SEP]"]["ids"] = [40000]
    with pytest.raises(StartupError, match="has the id 40000"):
        TextEncoder(changed(minilm_dir, tmp_path, post_processor=processor), 16).check_ids(30522)


def test_text_with_a_token_that_has_no_embedding_is_rejected(minilm_dir: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(minilm_dir / "tokenizer.json"))
    tokenizer.add_tokens(["<image>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    encoder = TextEncoder(tmp_path / "tokenizer.json", 16)
    encoder.check_ids(30522)
    inputs = InputEncoder(encoder, 16, exclude_prompt=False)
    texts = [Input(text="fine"), Input(text="an <image> here")]
    texts += [Input(text_pair=TextPair("fine", "<image>")), Input(text="long " * 20 + "<image>")]
    message = "contains the token '<image>', for which the model has no embedding: remove it"
    for index, field in {1: "text", 2: "text_pair", 3: "text"}.items():
        with pytest.raises(InvalidFieldsError, match=message) as caught:
            inputs.encode(texts[: index + 1 : index], range(2), prompt="", truncate=True)
        assert caught.value.violations[0].field == f"inputs[1].{field}"
    with pytest.raises(UntokenizableError, match=message):
        PairEncoder(encoder).encode([("fine", "<image>")])
    with pytest.raises(UntokenizableError, match=message):
        encoder.encode_pairs([("fine", "<image>")])
    assert inputs.encode(texts, range(1), prompt="", truncate=True)


def test_token_types_of_single_texts_are_kept_and_checked(minilm_dir: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(minilm_dir / "tokenizer.json"))
    template: Any = TemplateProcessing
    tokenizer.post_processor = template(single="$A:1 [SEP]:1", special_tokens=[("[SEP]", 102)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    encoder = TextEncoder(tmp_path / "tokenizer.json", 16)
    [encoded] = encoder.encode([("a cat",)])
    assert encoded.token_type_ids is not None
    assert encoded.token_type_ids.tolist() == [1, 1, 1]
    encoder.check_ids(30522, 2)
    encoder.check_ids(30522)
    with pytest.raises(StartupError, match="has the token type 1, but the model only supports types below 1"):
        encoder.check_ids(30522, 1)


@pytest.mark.parametrize(
    ("normalizer", "growth"),
    [
        (replace_all({"String": "a"}, "b" * (1 << 20)), "1048576"),
        (replace_all({"Regex": "a*"}, "b" * 5000), "5001"),
        ({"type": "Sequence", "normalizers": [replace_all({"String": "a"}, "aa")] * 20}, "1048576"),
        ({"type": "Prepend", "prepend": "a" * 5000}, "5001"),
    ],
)
def test_normalizer_that_expands_texts_too_much_is_rejected(
    minilm_dir: Path, tmp_path: Path, normalizer: dict[str, Any], growth: str
) -> None:
    with pytest.raises(
        StartupError, match=rf"can expand one byte to {growth} bytes, but the limit is 4096: export"
    ):
        TextEncoder(changed(minilm_dir, tmp_path, normalizer=normalizer), 16)


def test_expansion_of_a_charsmap_is_its_longest_replacement() -> None:
    charsmap = (8).to_bytes(4, "little") + bytes(8) + b"ab\0" + b"x" * 70 + b"\0"
    assert _growth_of_charsmap(charsmap) == 70


def test_only_texts_that_grow_beyond_the_limit_are_rejected(minilm_dir: Path, tmp_path: Path) -> None:
    path = changed(minilm_dir, tmp_path, normalizer=replace_all({"String": "a"}, "b " * 1000))
    inputs = InputEncoder(TextEncoder(path, 16), 16, exclude_prompt=False)
    texts = [Input(text="c" * 5000), Input(text="a" * 5000), Input(text="aa")]
    for indices in (range(3), range(1, 2)):
        with pytest.raises(InvalidFieldsError, match="exceed 4194304 bytes after normalization") as caught:
            inputs.encode(texts, indices, prompt="", truncate=True)
        assert caught.value.violations[0].field == f"inputs[{indices.start}].text"
    assert [text.num_tokens for text in inputs.encode(texts, range(2, 3), prompt="", truncate=True)] == [16]
    assert inputs.encode(texts, range(1), prompt="", truncate=True)


def test_text_that_makes_the_tokenizer_panic_is_reported(minilm_dir: Path, tmp_path: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    inputs = InputEncoder(
        TextEncoder(changed(minilm_dir, tmp_path, pre_tokenizer=split), 16), 16, exclude_prompt=True
    )
    endless = "a" * 40 + "!"
    texts = [Input(text="fine"), Input(text=endless), Input(text_pair=TextPair("fine", endless))]
    for indices, field in ((range(3), "inputs[1].text"), (range(2, 3), "inputs[2].text_pair")):
        with pytest.raises(
            InvalidFieldsError, match="cannot be tokenized by the model's tokenizer"
        ) as caught:
            inputs.encode(texts, indices, prompt="", truncate=True)
        assert [violation.field for violation in caught.value.violations] == [field]
    with pytest.raises(InvalidFieldsError, match=r"^prompt cannot be tokenized"):
        inputs.encode(texts, range(1), prompt=endless, truncate=True)


def test_token_ids_cannot_be_decoded_without_a_tokenizer() -> None:
    encoder = InputEncoder(None, 8, exclude_prompt=False)
    with pytest.raises(NotSupportedError, match="no tokenizer: decode the token ids in the client"):
        encoder.decode([Input(token_ids=TokenIds([1]))], range(1), skip_special_tokens=True)
