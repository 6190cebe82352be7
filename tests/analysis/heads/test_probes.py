"""Validity and balance of the included test sentences."""

from collections import Counter
from pathlib import Path

import tokenizers

from attnlens_analysis.heads.coreference import nearest_noun
from attnlens_analysis.heads.probes import pronoun_items, word_pair_items

SINGULAR = {"he", "him", "his", "she", "her", "it", "its"}
PLURAL = {"they", "them", "their"}


def test_pronouns_have_an_antecedent_and_distractors() -> None:
    items = pronoun_items()
    assert Counter(item.kind for item in items) == {"gender": 120, "number": 114, "meaning": 56}
    assert len({item.words for item in items}) == len(items)
    for item in items:
        nouns = (item.antecedent, *item.distractors)
        assert item.words[item.pronoun].lower() in SINGULAR | PLURAL, item
        assert item.distractors, item
        assert len({item.pronoun, *nouns}) == 1 + len(nouns), item
        assert all(0 <= index < len(item.words) for index in nouns), item
        assert all(item.words[index].isalpha() for index in nouns), item
        assert item.words[-1] == ".", item


def test_only_the_antecedent_agrees_in_number() -> None:
    for item in pronoun_items():
        if item.kind == "number":
            is_plural = [
                item.words[index].endswith("s") or item.words[index] == "wolves" for index in item.distractors
            ]
            assert item.words[item.pronoun] in PLURAL | {"it", "its"}
            assert item.words[item.antecedent].endswith("s") == (item.words[item.pronoun] in PLURAL), item
            assert is_plural == [item.words[item.pronoun] not in PLURAL], item


def test_positions_do_not_reveal_the_antecedent() -> None:
    items = pronoun_items()
    for group in {item.group for item in items}:
        ranks = Counter(
            sorted((item.antecedent, *item.distractors)).index(item.antecedent)
            for item in items
            if item.group == group
        )
        assert len(ranks) > 1, group
        assert len(set(ranks.values())) == 1, group
    for half in (0, 1):
        scored = [item for item in items if item.group % 2 == half]
        nearest = sum(nearest_noun(item) == item.antecedent for item in scored)
        assert 0.45 < nearest / len(scored) < 0.5
        [(_, most_frequent)] = Counter(item.antecedent - item.pronoun for item in scored).most_common(1)
        assert most_frequent / len(scored) < 0.2


def test_sentence_pairs_differ_only_in_the_end() -> None:
    items = [item for item in pronoun_items() if item.kind == "meaning"]
    for first, second in zip(items[::2], items[1::2], strict=True):
        assert first.group == second.group
        assert first.pronoun == second.pronoun
        assert first.words[: first.pronoun + 1] == second.words[: second.pronoun + 1]
        assert (first.antecedent, first.distractors) == (second.distractors[0], (second.antecedent,))


def test_related_words_are_compared_in_the_same_texts() -> None:
    items = word_pair_items()
    assert Counter(item.part_of_speech for item in items) == {"noun": 40, "verb": 14, "adjective": 20}
    for item in items:
        word = item.words[item.first]
        assert item.first < item.second
        assert item.words[item.second] == word
        assert item.words.count(word) == 2, item
        assert len({word, item.synonym, item.unrelated}) == 3, item
        same, synonym, unrelated = item.variants
        assert same == item.words
        assert (synonym[item.first], unrelated[item.first]) == (item.synonym, item.unrelated)
        for variant in (synonym, unrelated):
            assert [n for n in range(len(same)) if same[n] != variant[n]] == [item.first]


def test_unrelated_words_are_the_synonyms_of_other_items() -> None:
    items = word_pair_items()
    for part in ("noun", "verb", "adjective"):
        selected = [item for item in items if item.part_of_speech == part]
        assert Counter(item.synonym for item in selected) == Counter(item.unrelated for item in selected)


def test_related_words_are_single_tokens_of_minilm(minilm_bundle: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(minilm_bundle / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab()
    for item in word_pair_items():
        assert {item.words[item.first], item.synonym, item.unrelated} <= set(vocabulary)
