"""Which models take pairs of texts."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from attnlens_export.tokenizer.pairs import takes_pairs
from configs import small_config
from small_bundles import TOKENIZERS
from small_files import read, write

SPECIAL = ("[CLS]", "[SEP]")
NO_TYPES = {"embeddings.type_vocab_size": 0}
TWO_TYPES = {"embeddings.type_vocab_size": 2}


def write_tokenizer(directory: Path, single: str | None, pair: str | None) -> Path:
    """Write a tokenizer of words with such templates; None: without any."""
    words = {word: number for number, word in enumerate(("[UNK]", "first", "second", *SPECIAL))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if single is not None:
        special = [(token, words[token]) for token in SPECIAL]
        tokenizer.post_processor = processors.TemplateProcessing(single, pair, special)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.mark.parametrize("kind", ["wordpiece", "byte-level", "unigram"])
def test_tokenizers_of_the_families_separate_two_texts(kind: str) -> None:
    assert takes_pairs(TOKENIZERS / kind, small_config(TWO_TYPES))


@pytest.mark.parametrize(
    ("single", "pair", "expected"),
    [
        (None, None, True),
        ("[CLS] $A", "[CLS] $A $B", True),  # the second text is appended to the first
        ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", True),
        ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", True),
        ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:2 [SEP]:2", False),  # a type that the encoder lacks
    ],
)
def test_both_texts_and_known_types_make_a_pair(
    single: str | None, pair: str | None, expected: bool, tmp_path: Path
) -> None:
    assert takes_pairs(write_tokenizer(tmp_path, single, pair), small_config(TWO_TYPES)) is expected


def test_second_text_that_is_lost_makes_no_pair(tmp_path: Path) -> None:
    directory = write_tokenizer(tmp_path, "[CLS] $A", "[CLS] $A $B")
    content = read(directory / "tokenizer.json")
    content["post_processor"]["pair"].pop()
    write(directory / "tokenizer.json", content)
    assert not takes_pairs(directory, small_config(TWO_TYPES))


def test_types_do_not_matter_to_an_encoder_without_them(tmp_path: Path) -> None:
    directory = write_tokenizer(tmp_path, "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:2 [SEP]:2")
    assert takes_pairs(directory, small_config(NO_TYPES))


def test_bundle_without_a_tokenizer_takes_none(tmp_path: Path) -> None:
    assert not takes_pairs(tmp_path, small_config(TWO_TYPES))
