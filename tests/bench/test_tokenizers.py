"""The measurements of docs/tokenizers.md, compared with counts and sums by hand."""

import unicodedata
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from attnlens.reductions.units import TextUnits
from bench.studies import tokenizers as study

TEXTS = ["The shopkeeper, unbelievably naïve, read 1,962 books.", "Didn't he?  Heartbreaking!"]


@pytest.fixture(scope="module")
def minilm(minilm_dir: Path) -> Tokenizer:
    return study.open_tokenizer(minilm_dir)


def longest_matches(word: str, vocabulary: set[str]) -> list[str]:
    """Split a word by repeatedly taking the longest prefix in the vocabulary."""
    tokens: list[str] = []
    while word:
        mark = "##" if tokens else ""
        size = next(size for size in range(len(word), 0, -1) if mark + word[:size] in vocabulary)
        tokens.append(mark + word[:size])
        word = word[size:]
    return tokens


def test_fragmentation_of_minilm_equals_greedy_longest_matches(minilm: Tokenizer, minilm_dir: Path) -> None:
    vocabulary = set((minilm_dir / "vocab.txt").read_text(encoding="utf-8").splitlines())
    counts, num_tokens = [], 0
    for text in TEXTS:
        plain = unicodedata.normalize("NFD", text.lower())
        plain = "".join(char for char in plain if not unicodedata.combining(char))
        for run in "".join(char if char.isalnum() or char == " " else f" {char} " for char in plain).split():
            num_tokens += len(longest_matches(run, vocabulary))
            if run.isalnum():
                counts.append(len(longest_matches(run, vocabulary)))
    found = study.fragmentation(minilm, TEXTS)
    assert max(counts) > 3
    assert found == pytest.approx(
        (num_tokens / len(counts), sum(count > 1 for count in counts) / len(counts))
    )


def test_a_token_for_the_space_before_a_word_belongs_to_the_word() -> None:
    trained = study.train_all(["the old man and the river, the old house"] * 3)
    for name, space in (("BPE", "Ġ"), ("Unigram", "▁")):
        encoding = trained[name].encode("the 7", add_special_tokens=False)
        [word] = [word for word in study.WORD.finditer("the 7") if "7" in word[0]]
        assert study.tokens_in(encoding, *word.span()) == [space, "7"]


def test_only_byte_level_bpe_restores_case_spaces_and_unknown_characters() -> None:
    trained = study.train_all(["the old man and the river, the old house"] * 3)
    texts = ("the old man", "The old man", "the  old man", "the 東 man")
    restored = {name: [study.restores(each, text) for text in texts] for name, each in trained.items()}
    assert restored == {
        "WordPiece": [True, False, False, False],
        "BPE": [True, True, True, True],
        "Unigram": [True, False, True, False],  # T is not in the training text
    }


def test_changes_compares_the_largest_token_with_the_largest_word() -> None:
    # Tokens: a special token, a word of two tokens, two words of one token.
    units = TextUnits.of([None, 0, 0, 1, 2], [True, False, False, False, False], [False] * 5)
    head = np.array(
        [
            [1.0, 0.0, 0.0, 0.0, 0.0],
            [0.0, 0.5, 0.2, 0.2, 0.1],
            [0.0, 0.2, 0.1, 0.6, 0.1],  # mean of both: largest token .4, but words .5 .4 .1
            [0.1, 0.2, 0.2, 0.3, 0.2],  # largest token .3, but words .4 .3 .2
            [0.7, 0.0, 0.1, 0.0, 0.2],  # the special token is ignored: .2 in both
        ],
        np.float32,
    )
    assert study.changes(head[np.newaxis], units).tolist() == [[True, True, False]]
    np.testing.assert_array_equal(
        study.changes(np.stack([head, head])[np.newaxis], units)[1], [True, True, False]
    )
