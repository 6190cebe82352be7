"""Word-level attention and dependency scores, compared with manual counts."""

import numpy as np
import pytest

from attnlens_analysis.heads.maps import Head
from attnlens_analysis.heads.syntax import RelationScore, SyntaxCounts, strongest_word
from attnlens_analysis.heads.treebank import Word
from attnlens_analysis.heads.words import NO_WORD, word_level, words_of_tokens
from hand_made_maps import pointing

# "She reads two books ." with the tokens [CLS] She read ##s two books . [SEP]
WORDS = (
    Word("She", "PRON", 1, "nsubj"),
    Word("reads", "VERB", None, "root"),
    Word("two", "NUM", 3, "nummod"),
    Word("books", "NOUN", 1, "obj"),
    Word(".", "PUNCT", 1, "punct"),
)
PLACES = [(0, 0), (0, 3), (4, 8), (8, 9), (10, 13), (14, 19), (20, 21), (0, 0)]
FORMS = [word.form for word in WORDS]
TOKEN_WORDS = np.array([NO_WORD, 0, 1, 1, 2, 3, 4, NO_WORD])
ALL_THERE = np.ones(5, dtype=np.bool_)


def test_token_belongs_to_the_word_in_which_it_starts() -> None:
    assert words_of_tokens(FORMS, PLACES).tolist() == TOKEN_WORDS.tolist()
    # A token that spans two words, and an empty one.
    assert words_of_tokens(FORMS, [(0, 6), (4, 4), (20, 21)]).tolist() == [0, NO_WORD, 4]


def test_word_attention_sums_columns_and_averages_rows() -> None:
    weights = np.zeros((1, 8, 8), dtype=np.float32)
    weights[0, 1, 2], weights[0, 1, 3], weights[0, 1, 0] = 0.25, 0.5, 0.25  # She
    weights[0, 2, 1], weights[0, 3, 5] = 1, 1  # read, ##s
    words = word_level(weights, TOKEN_WORDS, 5)
    assert words.shape == (1, 5, 5)
    assert words[0, 0].tolist() == [0, 0.75, 0, 0, 0]  # remaining weight is on [CLS]
    assert words[0, 1].tolist() == [0.5, 0, 0, 0.5, 0]


def test_word_rows_sum_to_1_minus_attention_to_special_tokens() -> None:
    weights = np.random.default_rng(3).dirichlet(np.ones(8), (4, 8)).astype(np.float32)
    words = word_level(weights, TOKEN_WORDS, 5)
    left = 1 - weights[:, :, [0, 7]].sum(axis=-1)
    np.testing.assert_allclose(words[:, 1].sum(axis=-1), (left[:, 2] + left[:, 3]) / 2, atol=1e-6)


def test_strongest_word_excludes_the_word_itself() -> None:
    weights = np.array([[[0.9, 0.04, 0.06], [0.3, 0.4, 0.3], [0, 0, 1]]], dtype=np.float32)
    assert strongest_word(weights).tolist() == [[2, 0, 0]]


def scores_of(*heads: list[int], num_sentences: int = 4) -> dict[str, RelationScore]:
    counts = SyntaxCounts([Head(0, number) for number in range(len(heads))])
    weights = np.stack([pointing(targets) for targets in heads])
    for number in range(num_sentences):
        counts.add(weights, WORDS, ALL_THERE, scores=number % 2 == 1)
    return {score.relation: score for score in counts.scores()}


def test_best_head_and_direction_of_each_relation_are_selected() -> None:
    # In the first head, all words attend to the verb. In the second, the verb attends to its object.
    found = scores_of([1, 2, 1, 1, 1], [1, 3, 3, 4, 0])
    assert set(found) == {"all", "nsubj", "nummod", "obj"}
    assert (found["obj"].head, found["obj"].direction) == (Head(0, 0), "to_head")
    assert found["obj"].scored == 1
    assert (found["nummod"].head, found["nummod"].direction) == (Head(0, 1), "to_head")
    assert found["all"].num_chosen == found["all"].num_scored == 6
    # Each head predicts two of nsubj, nummod and obj.
    assert found["all"].scored == pytest.approx(2 / 3)
    assert (found["obj"].offset, found["nummod"].offset) == (-2, 1)
    assert found["all"].offset == 1
    assert found["all"].offset_scored == pytest.approx(2 / 3)


def test_heads_that_attend_to_dependents_are_selected() -> None:
    found = scores_of([4, 3, 4, 4, 0])
    assert (found["obj"].direction, found["obj"].scored) == ("to_dependent", 1)


def test_scoring_half_does_not_affect_the_selection() -> None:
    counts = SyntaxCounts([Head(0, 0), Head(0, 1)])
    right, wrong = pointing([1, 0, 3, 1, 0]), pointing([4, 4, 4, 4, 0])
    counts.add(np.stack([right, wrong]), WORDS, ALL_THERE, scores=False)
    counts.add(np.stack([wrong, right]), WORDS, ALL_THERE, scores=True)
    [score] = [score for score in counts.scores() if score.relation == "obj"]
    assert (score.head, score.chosen, score.scored) == (Head(0, 0), 1, 0)


def test_words_without_tokens_are_not_scored() -> None:
    counts = SyntaxCounts([Head(0, 0)])
    counts.add(pointing([1, 0, 3, 1, 0])[None], WORDS, np.array([1, 1, 0, 1, 1], np.bool_), scores=False)
    assert {score.relation for score in counts.scores()} == {"all", "nsubj", "obj"}


def test_relations_missing_from_the_scoring_half_have_no_score() -> None:
    score = scores_of([1, 0, 3, 1, 0], num_sentences=1)["obj"]
    assert score.num_scored == 0
    assert np.isnan([score.scored, *score.interval, score.offset_scored]).all()
