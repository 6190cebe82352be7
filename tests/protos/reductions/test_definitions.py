"""What each reduction is: compared with loops in float64, and with mistakes that must be noticed."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reduction_reference as reference
from attnlens.reductions import forms, maps
from attnlens.reductions.units import TextUnits, number_words

WORDS = np.array([0, 1, 1, 1, 2, 3, 3, 4], dtype=np.int32)
SPECIAL = np.array([True, False, False, False, False, False, False, True])
HEADS, TOKENS = 3, len(WORDS)
MAPS = reference.random_maps(HEADS, TOKENS)


def close(actual: Any, expected: Any, atol: float = 2e-7) -> None:
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=atol)


# --- the checks, which the mistakes below have to fail --------------------------------------------


def check_words() -> None:
    words = maps.word_level(MAPS, WORDS)
    close(words, reference.word_level(MAPS, WORDS.tolist()))
    np.testing.assert_allclose(words.sum(axis=-1), 1, atol=1e-6)


def check_words_apart() -> None:
    apart = np.array([0, 1, 2, 1, 3, 0, 3, 4], dtype=np.int32)
    close(maps.word_level(MAPS, apart), reference.word_level(MAPS, apart.tolist()))


def check_without() -> None:
    left, lost = maps.drop_units(MAPS, SPECIAL)
    expected, expected_lost = reference.without(MAPS, SPECIAL.tolist())
    close(left, expected)
    close(lost, expected_lost)
    np.testing.assert_allclose(left.sum(axis=-1), 1, atol=1e-6)
    assert (lost > 0.01).any()


def check_rollout() -> None:
    layers = [reference.random_maps(1, TOKENS, seed) for seed in (1, 2, 3)]
    for residual in (0.5, 0.2):
        expected = reference.rollout(layers, residual)
        matrix = maps.rollout(layers, residual)
        close(matrix, expected)
        np.testing.assert_allclose(matrix.sum(axis=-1), 1, atol=1e-6)
        close(maps.mean_of_rollout(layers[::-1], residual), expected.mean(axis=1, keepdims=True))


def check_received() -> None:
    close(forms.received(MAPS, SPECIAL), reference.received(MAPS, SPECIAL.tolist()), 1e-6)
    close(forms.received(MAPS, None), reference.received(MAPS, [False] * TOKENS), 1e-6)


def check_entropy() -> None:
    assert (MAPS == 0).any()
    close(forms.entropy(MAPS), reference.entropy(MAPS), 1e-6)
    certain = forms.entropy(np.eye(4, dtype=np.float32)[np.newaxis])
    np.testing.assert_array_equal(certain, np.zeros((1, 4)))
    assert not np.signbit(certain).any()


def check_top() -> None:
    for k in (1, 3, TOKENS, 40):
        found = forms.top_weights(MAPS, k)
        assert found.indices.dtype == np.int32
        assert found.indices.shape == found.values.shape == (HEADS, TOKENS, min(k, TOKENS))
        for head, query in np.ndindex(HEADS, TOKENS):
            columns, rest = reference.top(MAPS[head, query].tolist(), k)
            assert found.indices[head, query].tolist() == columns
            np.testing.assert_allclose(found.remaining_mass[head, query], rest, atol=1e-7)
        np.testing.assert_array_equal(found.values, np.take_along_axis(MAPS, found.indices, -1))
        np.testing.assert_allclose(found.values.sum(axis=-1) + found.remaining_mass, 1, atol=1e-6)


def check_threshold() -> None:
    for threshold in (1e-9, 0.1, float(MAPS[0, 0].max()), 1.0):
        found = forms.weights_from(MAPS, threshold)
        starts, columns, values, kept = reference.compressed(MAPS, threshold)
        assert found.indptr.dtype == found.indices.dtype == np.int32
        assert (found.indptr.tolist(), found.indices.tolist()) == (starts, columns)
        np.testing.assert_array_equal(found.values, np.array(values, dtype=np.float32))
        np.testing.assert_allclose(found.kept_mass.reshape(-1), kept, atol=1e-7)


def check_sqrt_uint8() -> None:
    weights = np.array([0, 1e-6, 0.5 / 255**2, 0.25, 0.999, 1, 1 + 1e-7, -1e-9], dtype=np.float32)
    levels = forms.to_levels(weights)
    assert levels.dtype == np.uint8
    assert levels.tolist() == [0, 0, 1, 128, 255, 255, 255, 0]
    back = forms.from_levels(forms.to_levels(MAPS))
    assert np.abs(back - MAPS).max() < 1 / 255


def check_means() -> None:
    close(maps.mean_of_heads(MAPS), MAPS.astype(np.float64).mean(axis=0, keepdims=True))
    layers = [reference.random_maps(HEADS, TOKENS, seed) for seed in (4, 5, 6)]
    close(maps.mean_of_layers(layers), np.mean(np.array(layers, np.float64), axis=0))
    close(maps.mean_over_rows(MAPS), MAPS.astype(np.float64).mean(axis=1, keepdims=True))


CHECKS = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_a_reduction_is_what_its_definition_says(check: Callable[[], None]) -> None:
    check()


# --- mistakes -------------------------------------------------------------------------------------

right_words, right_without, right_top = maps.word_level, maps.drop_units, forms.top_weights
right_rows, right_rollout = forms.weights_from, maps.rollout


def mean_of_keys(weights: Any, words: Any) -> Any:
    return right_words(weights, words) / np.bincount(words).astype(np.float32)


def sum_of_queries(weights: Any, words: Any) -> Any:
    return right_words(weights, words) * np.bincount(words).astype(np.float32)[:, np.newaxis]


def without_scaling(weights: Any, dropped: Any) -> Any:
    return weights[:, ~dropped][:, :, ~dropped], right_without(weights, dropped)[1]


def without_the_mass(weights: Any, dropped: Any) -> Any:
    left, lost = right_without(weights, dropped)
    return left, np.zeros_like(lost)


def without_the_rest(weights: Any, k: int) -> Any:
    found = right_top(weights, k)
    return forms.TopKWeights(found.indices, found.values, np.zeros_like(found.remaining_mass))


def higher_column_of_equals(weights: Any, k: int) -> Any:
    found = right_top(weights[..., ::-1], k)
    return forms.TopKWeights(weights.shape[-1] - 1 - found.indices, found.values, found.remaining_mass)


def levels_cut_off(weights: Any) -> Any:
    return (255 * np.sqrt(np.abs(weights))).astype(np.uint8)


def only_larger(weights: Any, threshold: float) -> Any:
    return right_rows(weights, float(np.nextafter(np.float32(threshold), np.float32(2))))


MISTAKES: dict[str, tuple[ModuleType, str, Any, str]] = {
    "words: mean over the tokens of a key": (maps, "word_level", mean_of_keys, "words"),
    "words: sum over the tokens of a query": (maps, "word_level", sum_of_queries, "words"),
    "words: transposed": (
        maps, "word_level", lambda weights, words: right_words(weights.swapaxes(1, 2), words), "words",
    ),
    "special tokens: rows are not scaled": (maps, "drop_units", without_scaling, "without"),
    "special tokens: the mass is not told": (maps, "drop_units", without_the_mass, "without"),
    "top-k: without the rest": (forms, "top_weights", without_the_rest, "top"),
    "top-k: the higher of equal columns": (forms, "top_weights", higher_column_of_equals, "top"),
    "threshold: not the weight itself": (forms, "weights_from", only_larger, "threshold"),
    "rollout: later layers on the right": (
        maps, "rollout", lambda layers, residual: right_rollout(layers[::-1], residual), "rollout",
    ),
    "rollout: the residual is the other share": (
        maps, "rollout", lambda layers, residual: right_rollout(layers, 1 - residual), "rollout",
    ),
    "received: by all rows": (
        forms, "received", lambda weights, _: weights.sum(axis=1), "received",
    ),
    "received: of a row": (
        forms, "received", lambda weights, _: weights.sum(axis=2), "received",
    ),
    "entropy: in bits": (
        forms, "entropy", lambda weights: -(weights * np.log2(weights + 1e-30)).sum(axis=-1), "entropy",
    ),
    "8 bits: cut off": (
        forms, "to_levels", levels_cut_off, "sqrt_uint8",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("module", "name", "mistake", "check"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_noticed(
    module: ModuleType, name: str, mistake: Any, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, mistake)
    with pytest.raises(AssertionError):
        CHECKS[check]()


# --- properties -----------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(0, 99))
def test_words_keep_what_a_row_sums_to_and_what_the_keys_receive(words: list[int], seed: int) -> None:
    numbers = number_words(words, [False] * len(words))
    weights = reference.random_maps(2, len(words), seed)
    by_word = maps.word_level(weights, numbers)
    close(by_word, reference.word_level(weights, numbers.tolist()), 1e-6)
    np.testing.assert_allclose(by_word.sum(axis=-1), 1, atol=1e-6)


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.integers(0, 99))
def test_what_is_left_of_a_row_sums_to_1_and_the_mass_is_the_rest(dropped: list[bool], seed: int) -> None:
    weights = reference.random_maps(2, len(dropped), seed)
    left, lost = maps.drop_units(weights, np.array(dropped))
    expected, expected_lost = reference.without(weights, dropped)
    close(left, expected, 1e-6)
    close(lost, expected_lost, 1e-6)
    empty = lost > 1 - 1e-6
    np.testing.assert_allclose(left.sum(axis=-1)[~empty], 1, atol=1e-6)
    assert not left[empty].any()


numbers = st.floats(-2, 2, width=32) | st.sampled_from([0.0, -0.0, 0.25])


@given(st.lists(numbers, min_size=1, max_size=9), st.integers(1, 10))
def test_the_largest_are_found_among_equal_and_negative_ones(row: list[float], k: int) -> None:
    weights = np.array(row, dtype=np.float32)[np.newaxis, np.newaxis]
    found = forms.top_weights(weights, k)
    columns, rest = reference.top(row, k)
    assert found.indices[0, 0].tolist() == columns
    np.testing.assert_allclose(found.remaining_mass[0, 0], rest, atol=1e-6)


@given(st.lists(st.tuples(st.none() | st.integers(0, 3), st.booleans()), min_size=1))
def test_words_are_counted_from_0_in_the_order_of_their_first_tokens(tokens: list[tuple[Any, bool]]) -> None:
    words = number_words([word for word, _ in tokens], [second for _, second in tokens]).tolist()
    firsts = [word for place, word in enumerate(words) if word not in words[:place]]
    assert firsts == list(range(len(firsts)))
    for place, other in np.ndindex(len(tokens), len(tokens)):
        are_one = place == other or (tokens[place] == tokens[other] and tokens[place][0] is not None)
        assert (words[place] == words[other]) == are_one


def test_a_special_token_is_a_word_of_its_own_whatever_its_number() -> None:
    text = TextUnits.of([0, 0, 0], [True, False, False], [False, False, True])
    assert text.words.tolist() == [0, 1, 2]
