"""A RoBERTa with a byte-level BPE tokenizer, from a checkpoint to a server's tokens and a graph's answer."""

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from attnlens.bundle import read_manifest
from attnlens_export import ExportOptions, export_bundle
from attnlens_export.grid import small_grid
from attnlens_server.text import TextEncoder, describe_tokens
from odd_models import OddModel

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
TRAINING_TEXT = ["the cat sat on the mat", "a café is near the river", "naïve cats like the café"]
# Accents that the tokenizer merged and some that it did not, an emoji and a flag, a combining mark, CJK.
TEXTS = ["the café", "Zoë's naïve cat 😀!", "a🇳🇴b", "e\u0301te", "東京 the", "", "  two  spaces "]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("byte-level")
    model = OddModel("Roberta", {"type_vocab_size": 1, "max_position_embeddings": 34, "num_hidden_layers": 1})
    model.make().save_pretrained(directory / "source")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    tokenizer.save(str(directory / "source" / "tokenizer.json"))
    settings = {"model_max_length": 34, "pad_token": "<pad>"}
    (directory / "source" / "tokenizer_config.json").write_text(json.dumps(settings))
    export_bundle(directory / "source", directory / "bundle", ExportOptions(grid=small_grid(32)))
    return directory / "bundle"


def byte_alphabet() -> dict[str, int]:
    """Byte-level BPE spells each byte as a character; those that don't print are moved to 256 and above."""
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printing]
    moved = {chr(256 + place): byte for place, byte in enumerate(others)}
    return {chr(byte): byte for byte in printing} | moved


@pytest.mark.parametrize("text", TEXTS)
def test_every_token_says_which_characters_and_bytes_of_the_text_it_stands_for(
    text: str, bundle: Path
) -> None:
    text_encoder = TextEncoder(bundle / "tokenizer.json", read_manifest(bundle).max_tokens)
    (encoded,) = text_encoder.encode([text], with_offsets=True)
    first, *tokens, last = describe_tokens(encoded, text_encoder)
    assert (first.text, last.text, first.is_special, last.is_special) == ("<s>", "</s>", True, True)
    alphabet, whole = byte_alphabet(), text.encode()
    ends_of_characters = np.cumsum([0, *(len(character.encode()) for character in text)])
    start = 0
    for token in tokens:
        spelled = bytes(alphabet[character] for character in token.text)
        end = start + len(spelled)
        assert whole[start:end] == spelled
        # Blanks around a word are not part of its place; a token of blanks alone has an empty one.
        start_of_word = end - len(spelled.lstrip(b" "))
        end_of_word = max(start_of_word, start + len(spelled.rstrip(b" ")))
        if end_of_word > start_of_word:
            # A part of a character stands for the whole character.
            assert token.char_start == np.searchsorted(ends_of_characters, start_of_word, side="right") - 1
            assert token.char_end == np.searchsorted(ends_of_characters, end_of_word)
        assert whole[token.byte_start : token.byte_end].decode() == text[token.char_start : token.char_end]
        start = end
    assert start == len(whole)


def test_an_emoji_is_four_tokens_at_one_place(bundle: Path) -> None:
    text_encoder = TextEncoder(bundle / "tokenizer.json", 32)
    (encoded,) = text_encoder.encode(["a 😀b"], with_offsets=True)
    tokens = [token for token in describe_tokens(encoded, text_encoder) if not token.is_special]
    assert [(token.char_start, token.char_end) for token in tokens[-5:]] == [(2, 3)] * 4 + [(3, 4)]
    assert [(token.byte_start, token.byte_end) for token in tokens[-5:]] == [(2, 6)] * 4 + [(6, 7)]


def test_a_text_is_cut_at_the_usable_positions_and_the_graph_takes_that_and_no_more(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    assert (manifest.max_tokens, manifest.architecture.max_position_embeddings) == (32, 32)
    assert json.loads((bundle / "tokenizer_config.json").read_text())["model_max_length"] == 32
    text_encoder = TextEncoder(bundle / "tokenizer.json", manifest.max_tokens)
    (encoded,) = text_encoder.encode(["café 😀 " * 20], with_offsets=False)
    assert encoded.num_tokens == 32 < encoded.num_tokens_total
    session = onnxruntime.InferenceSession(bundle / "onnx" / "model.onnx", providers=["CPUExecutionProvider"])
    assert [each.name for each in session.get_inputs()] == ["input_ids", "attention_mask"]
    ids = encoded.input_ids[None]
    (hidden,) = session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})
    assert np.isfinite(hidden).all()
    longer = np.zeros((1, 33), dtype=np.int64)
    with pytest.raises(Exception, match="out of data bounds"):
        session.run(None, {"input_ids": longer, "attention_mask": np.ones_like(longer)})
