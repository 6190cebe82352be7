"""Reduction functions, compared with float64 loops. Deliberate mistakes verify that the checks can fail."""

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


# --- checks, which fail with each of the mistakes below -------------------------------------------


def check_words() -> None:
    words = maps.word_level(MAPS, WORDS)
    close(words, reference.word_level(MAPS, WORDS.tolist()))
    np.testing.assert_allclose(words.sum(axis=-1), 1, atol=1e-6)


def check_nonadjacent_words() -> None:
    words = np.array([0, 1, 2, 1, 3, 0, 3, 4], dtype=np.int32)
    close(maps.word_level(MAPS, words), reference.word_level(MAPS, words.tolist()))


def check_drop_units() -> None:
    kept, mass = maps.drop_units(MAPS, SPECIAL)
    expected, expected_mass = reference.without(MAPS, SPECIAL.tolist())
    close(kept, expected)
    close(mass, expected_mass)
    np.testing.assert_allclose(kept.sum(axis=-1), 1, atol=1e-6)
    assert (mass > 0.01).any()


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
    one_hot = forms.entropy(np.eye(4, dtype=np.float32)[np.newaxis])
    np.testing.assert_array_equal(one_hot, np.zeros((1, 4)))
    assert not np.signbit(one_hot).any()


def check_top() -> None:
    for k in (1, 3, TOKENS, 40):
        result = forms.top_weights(MAPS, k)
        assert result.indices.dtype == np.int32
        assert result.indices.shape == result.values.shape == (HEADS, TOKENS, min(k, TOKENS))
        for head, query in np.ndindex(HEADS, TOKENS):
            columns, remaining = reference.top(MAPS[head, query].tolist(), k)
            assert result.indices[head, query].tolist() == columns
            np.testing.assert_allclose(result.remaining_mass[head, query], remaining, atol=1e-7)
        np.testing.assert_array_equal(result.values, np.take_along_axis(MAPS, result.indices, -1))
        np.testing.assert_allclose(result.values.sum(axis=-1) + result.remaining_mass, 1, atol=1e-6)


def check_threshold() -> None:
    for threshold in (1e-9, 0.1, float(MAPS[0, 0].max()), 1.0):
        result = forms.weights_from(MAPS, threshold)
        starts, columns, values, kept = reference.compressed(MAPS, threshold)
        assert result.indptr.dtype == result.indices.dtype == np.int32
        assert (result.indptr.tolist(), result.indices.tolist()) == (starts, columns)
        np.testing.assert_array_equal(result.values, np.array(values, dtype=np.float32))
        np.testing.assert_allclose(result.kept_mass.reshape(-1), kept, atol=1e-7)


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
def test_reduction_equals_its_definition(check: Callable[[], None]) -> None:
    check()


# --- mistakes -------------------------------------------------------------------------------------

correct_words, correct_drop, correct_top = maps.word_level, maps.drop_units, forms.top_weights
correct_threshold, correct_rollout = forms.weights_from, maps.rollout


def mean_of_keys(weights: Any, words: Any) -> Any:
    return correct_words(weights, words) / np.bincount(words).astype(np.float32)


def sum_of_queries(weights: Any, words: Any) -> Any:
    return correct_words(weights, words) * np.bincount(words).astype(np.float32)[:, np.newaxis]


def drop_without_rescaling(weights: Any, dropped: Any) -> Any:
    return weights[:, ~dropped][:, :, ~dropped], correct_drop(weights, dropped)[1]


def drop_with_zero_mass(weights: Any, dropped: Any) -> Any:
    kept, mass = correct_drop(weights, dropped)
    return kept, np.zeros_like(mass)


def top_with_zero_remaining_mass(weights: Any, k: int) -> Any:
    result = correct_top(weights, k)
    return forms.TopKWeights(result.indices, result.values, np.zeros_like(result.remaining_mass))


def top_with_highest_tied_column(weights: Any, k: int) -> Any:
    result = correct_top(weights[..., ::-1], k)
    return forms.TopKWeights(weights.shape[-1] - 1 - result.indices, result.values, result.remaining_mass)


def levels_rounded_down(weights: Any) -> Any:
    return (255 * np.sqrt(np.abs(weights))).astype(np.uint8)


def exclusive_threshold(weights: Any, threshold: float) -> Any:
    return correct_threshold(weights, float(np.nextafter(np.float32(threshold), np.float32(2))))


MISTAKES: dict[str, tuple[ModuleType, str, Any, str]] = {
    "words: mean over the tokens of a key": (maps, "word_level", mean_of_keys, "words"),
    "words: sum over the tokens of a query": (maps, "word_level", sum_of_queries, "words"),
    "words: transposed": (
        maps, "word_level", lambda weights, words: correct_words(weights.swapaxes(1, 2), words), "words",
    ),
    "special tokens: rows are not rescaled": (maps, "drop_units", drop_without_rescaling, "drop_units"),
    "special tokens: zero mass": (maps, "drop_units", drop_with_zero_mass, "drop_units"),
    "top-k: zero remaining mass": (forms, "top_weights", top_with_zero_remaining_mass, "top"),
    "top-k: highest tied column": (forms, "top_weights", top_with_highest_tied_column, "top"),
    "threshold: exclusive": (forms, "weights_from", exclusive_threshold, "threshold"),
    "rollout: later layers on the right": (
        maps, "rollout", lambda layers, residual: correct_rollout(layers[::-1], residual), "rollout",
    ),
    "rollout: residual and weight swapped": (
        maps, "rollout", lambda layers, residual: correct_rollout(layers, 1 - residual), "rollout",
    ),
    "received: special rows included": (
        forms, "received", lambda weights, _: weights.sum(axis=1), "received",
    ),
    "received: row sums": (
        forms, "received", lambda weights, _: weights.sum(axis=2), "received",
    ),
    "entropy: in bits": (
        forms, "entropy", lambda weights: -(weights * np.log2(weights + 1e-30)).sum(axis=-1), "entropy",
    ),
    "8 bits: rounded down": (
        forms, "to_levels", levels_rounded_down, "sqrt_uint8",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("module", "name", "mistake", "check"), MISTAKES.values(), ids=MISTAKES)
def test_mistake_is_detected(
    module: ModuleType, name: str, mistake: Any, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, mistake)
    with pytest.raises(AssertionError):
        CHECKS[check]()


# --- properties -----------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(0, 99))
def test_words_preserve_row_sums(words: list[int], seed: int) -> None:
    numbers = number_words(words, [False] * len(words))
    weights = reference.random_maps(2, len(words), seed)
    by_word = maps.word_level(weights, numbers)
    close(by_word, reference.word_level(weights, numbers.tolist()), 1e-6)
    np.testing.assert_allclose(by_word.sum(axis=-1), 1, atol=1e-6)


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.integers(0, 99))
def test_remaining_rows_sum_to_1_and_the_mass_is_the_dropped_weight(dropped: list[bool], seed: int) -> None:
    weights = reference.random_maps(2, len(dropped), seed)
    kept, mass = maps.drop_units(weights, np.array(dropped))
    expected, expected_mass = reference.without(weights, dropped)
    close(kept, expected, 1e-6)
    close(mass, expected_mass, 1e-6)
    empty = mass > 1 - 1e-6
    np.testing.assert_allclose(kept.sum(axis=-1)[~empty], 1, atol=1e-6)
    assert not kept[empty].any()


numbers = st.floats(-2, 2, width=32) | st.sampled_from([0.0, -0.0, 0.25])


@given(st.lists(numbers, min_size=1, max_size=9), st.integers(1, 10))
def test_top_weights_are_correct_for_tied_and_negative_values(row: list[float], k: int) -> None:
    weights = np.array(row, dtype=np.float32)[np.newaxis, np.newaxis]
    result = forms.top_weights(weights, k)
    columns, remaining = reference.top(row, k)
    assert result.indices[0, 0].tolist() == columns
    np.testing.assert_allclose(result.remaining_mass[0, 0], remaining, atol=1e-6)


@given(st.lists(st.tuples(st.none() | st.integers(0, 3), st.booleans()), min_size=1))
def test_words_are_numbered_from_0_in_the_order_of_their_first_tokens(tokens: list[tuple[Any, bool]]) -> None:
    words = number_words([word for word, _ in tokens], [second for _, second in tokens]).tolist()
    distinct = [word for index, word in enumerate(words) if word not in words[:index]]
    assert distinct == list(range(len(distinct)))
    for index, other in np.ndindex(len(tokens), len(tokens)):
        is_same_word = index == other or (tokens[index] == tokens[other] and tokens[index][0] is not None)
        assert (words[index] == words[other]) == is_same_word


def test_special_token_is_a_separate_word_with_any_word_index() -> None:
    text = TextUnits.of([0, 0, 0], [True, False, False], [False, False, True])
    assert text.words.tolist() == [0, 1, 2]
