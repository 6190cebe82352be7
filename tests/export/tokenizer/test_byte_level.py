"""A RoBERTa with a byte-level BPE tokenizer, from a checkpoint to a server's tokens and a graph's answer."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from attnlens.bundle import read_manifest
from attnlens_server.text import TextEncoder, TokenSource
from token_spans import described

# Accents, an emoji and a flag, a combining mark, CJK, runs of spaces.
TEXTS = ["the café", "Zoë's naïve cat 😀!", "a🇳🇴b", "e\u0301te", "東京 the", "", "  two  spaces "]


@pytest.fixture(scope="module")
def bundle(small_bundle: Callable[[str], Path]) -> Path:
    return small_bundle("byte-level")


def byte_alphabet() -> dict[str, int]:
    """Byte-level BPE spells each byte as a character; those that don't print are moved to 256 and above."""
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printing]
    moved = {chr(256 + place): byte for place, byte in enumerate(others)}
    return {chr(byte): byte for byte in printing} | moved


@pytest.mark.parametrize("text", TEXTS)
def test_every_token_has_its_character_and_byte_offsets(text: str, bundle: Path) -> None:
    text_encoder = TextEncoder(bundle / "tokenizer.json", read_manifest(bundle).max_tokens)
    (encoded,) = text_encoder.encode([(text,)], with_record=True)
    first, *tokens, last = described(encoded, text_encoder)
    assert (first.text, last.text) == ("<s>", "</s>")
    assert first.source == last.source == TokenSource.SPECIAL
    alphabet, whole = byte_alphabet(), text.encode()
    ends_of_characters = np.cumsum([0, *(len(character.encode()) for character in text)])
    start = 0
    for token in tokens:
        spelled = bytes(alphabet[character] for character in token.text)
        end = start + len(spelled)
        assert whole[start:end] == spelled
        # Blanks around a word are not part of its place, unless there is nothing else.
        blanks = len(spelled) - len(spelled.lstrip(b" ")) if spelled.strip(b" ") else 0
        # A token that is part of a character has the span of the whole character.
        assert token.chars[0] == np.searchsorted(ends_of_characters, start + blanks, side="right") - 1
        assert token.chars[1] == np.searchsorted(ends_of_characters, end)
        assert whole[slice(*token.bytes)].decode() == text[slice(*token.chars)]
        start = end
    assert start == len(whole)


def test_emoji_is_four_tokens_at_one_place(bundle: Path) -> None:
    text_encoder = TextEncoder(bundle / "tokenizer.json", 32)
    (encoded,) = text_encoder.encode([("a 😀b",)], with_record=True)
    tokens = [token for token in described(encoded, text_encoder) if token.source != TokenSource.SPECIAL]
    assert [token.chars for token in tokens[-5:]] == [(2, 3)] * 4 + [(3, 4)]
    assert [token.bytes for token in tokens[-5:]] == [(2, 6)] * 4 + [(6, 7)]


def test_text_is_cut_at_the_usable_positions_and_the_graph_takes_that_and_no_more(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    assert (manifest.max_tokens, manifest.architecture.max_position_embeddings) == (32, 32)
    assert json.loads((bundle / "tokenizer_config.json").read_text())["model_max_length"] == 32
    text_encoder = TextEncoder(bundle / "tokenizer.json", manifest.max_tokens)
    (encoded,) = text_encoder.encode([("café 😀 " * 20,)])
    assert encoded.num_tokens == 32 < encoded.num_tokens_total
    session = onnxruntime.InferenceSession(bundle / "onnx" / "model.onnx", providers=["CPUExecutionProvider"])
    assert [each.name for each in session.get_inputs()] == ["input_ids", "attention_mask"]
    ids = encoded.input_ids[None]
    (hidden,) = session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})
    assert np.isfinite(hidden).all()
    longer = np.zeros((1, 33), dtype=np.int64)
    with pytest.raises(Exception, match="out of data bounds"):
        session.run(None, {"input_ids": longer, "attention_mask": np.ones_like(longer)})
