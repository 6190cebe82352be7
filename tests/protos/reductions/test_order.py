"""Order of the steps of a reduction, their results, and bounds on size and memory."""

import itertools
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import reduction_reference as reference
from attnlens.reductions import (
    AttentionReduction,
    LayerChoice,
    Level,
    Reduced,
    RowStatistics,
    SparseWeights,
    SpecialTokens,
    SqrtUint8,
    Statistics,
    TextUnits,
    Threshold,
    TopK,
    TopKWeights,
    reduce,
    resolve_rows,
    sizes,
)

TEXT = TextUnits.of(
    [None, 0, 0, 1, None, 0, 1, 1, None],
    [True, False, False, False, True, False, False, False, True],
    [False] * 5 + [True] * 4,
)
TOKENS, HEADS = TEXT.num_tokens, 2
LAYERS = [reference.random_maps(HEADS, TOKENS, seed) for seed in range(3)]
FORMS = [None, TopK(2), Threshold(0.2), Statistics(received=True, entropy=True), SqrtUint8()]
LEVELS: tuple[Level, ...] = ("tokens", "words")
SPECIAL: tuple[SpecialTokens, ...] = ("keep", "drop")
CHOICES: tuple[LayerChoice, ...] = ("none", "mean", "rollout")
REDUCTIONS = [
    AttentionReduction(
        level=level, special_tokens=special, layers=layers, mean_over_rows=is_mean, rows=rows, form=form
    )
    for level, special, layers, is_mean, rows, form in itertools.product(
        LEVELS,
        SPECIAL,
        CHOICES,
        (False, True),
        ((), (2, -1)),
        FORMS,
    )
]
ALLOWED = [reduction for reduction in REDUCTIONS if not list(reduction.problems())]


def expected_maps(
    reduction: AttentionReduction, layers: list[Any], *, is_mean_of_heads: bool
) -> tuple[list[Any], list[Any]]:
    """Dense weights before the form is applied, and special token mass, in float64."""
    words, special = TEXT.words.tolist(), TEXT.is_special.tolist()
    maps, masses = [np.asarray(layer, np.float64) for layer in layers], []
    if reduction.level == "words":
        maps = [reference.word_level(each, words) for each in maps]
        special = [special[words.index(word)] for word in range(max(words) + 1)]
    if reduction.special_tokens == "drop":
        results = [reference.without(array, special) for array in maps]
        maps, masses = [kept for kept, _ in results], [mass for _, mass in results]
    if is_mean_of_heads:
        maps = [each.mean(axis=0, keepdims=True) for each in maps]
        masses = [each.mean(axis=0, keepdims=True) for each in masses]
    if reduction.layers == "mean":
        maps = [np.mean(maps, axis=0)]
    elif reduction.layers == "rollout":
        maps = [reference.rollout(maps, 0.5)]
    if reduction.joins_layers and masses:
        masses = [np.mean(masses, axis=0)]
    if reduction.mean_over_rows:
        maps = [each.mean(axis=1, keepdims=True) for each in maps]
        masses = [each.mean(axis=1, keepdims=True) for each in masses]
    return maps, masses


def test_most_combinations_are_defined() -> None:
    assert (len(REDUCTIONS), len(ALLOWED)) == (240, 156)


@pytest.mark.parametrize("is_mean_of_heads", [False, True], ids=["heads", "mean of heads"])
@pytest.mark.parametrize("reduction", [each for each in ALLOWED if not isinstance(each.form, Statistics)])
def test_steps_run_in_the_documented_order(reduction: AttentionReduction, is_mean_of_heads: bool) -> None:
    is_mean = is_mean_of_heads or reduction.layers == "rollout"
    maps, masses = expected_maps(reduction, LAYERS, is_mean_of_heads=is_mean)
    results = reduce(LAYERS, reduction, TEXT, is_mean_of_heads=is_mean_of_heads)
    assert len(results) == len(maps)
    for index, (result, expected) in enumerate(zip(results, maps, strict=True)):
        rows = [2, expected.shape[1] - 1] if reduction.rows else list(range(expected.shape[1]))
        expected = expected[:, rows]  # noqa: PLW2901 - step 5
        _check_form(result, expected)
        if reduction.special_tokens == "drop":
            assert result.special_token_mass is not None
            np.testing.assert_allclose(result.special_token_mass, masses[index][:, rows], atol=1e-6)
        else:
            assert result.special_token_mass is None


def _check_form(result: Reduced, expected: Any) -> None:
    match result.data:
        case TopKWeights() as top:
            np.testing.assert_allclose(
                top.values, -np.sort(-expected, axis=-1)[..., : top.values.shape[-1]], atol=1e-6
            )
            np.testing.assert_allclose(np.take_along_axis(expected, top.indices, -1), top.values, atol=1e-6)
            np.testing.assert_allclose(top.values.sum(-1) + top.remaining_mass, 1, atol=1e-6)
        case SparseWeights() as sparse:
            dense = np.zeros((expected.shape[0] * expected.shape[1], expected.shape[2]))
            for row in range(len(dense)):
                entries = slice(sparse.indptr[row], sparse.indptr[row + 1])
                dense[row, sparse.indices[entries]] = sparse.values[entries]
            kept = np.where(dense > 0, expected.reshape(dense.shape), 0)
            np.testing.assert_allclose(dense, kept, atol=1e-6)
            assert (expected.reshape(dense.shape)[dense == 0] < 0.2 + 1e-6).all()
            np.testing.assert_allclose(sparse.kept_mass.reshape(-1), dense.sum(axis=-1), atol=1e-6)
        case np.ndarray(dtype=np.uint8) as levels:
            np.testing.assert_allclose(levels, 255 * np.sqrt(expected), atol=0.501)
        case np.ndarray() as dense_maps:
            np.testing.assert_allclose(dense_maps, expected, atol=1e-6)
            np.testing.assert_allclose(dense_maps.sum(axis=-1), 1, atol=1e-6)
        case _:
            pytest.fail(f"{result.data} is not a form of weights")


@pytest.mark.parametrize("reduction", [each for each in ALLOWED if isinstance(each.form, Statistics)])
def test_statistics_are_computed_from_the_previous_steps(reduction: AttentionReduction) -> None:
    is_mean = reduction.layers == "rollout"
    maps, _ = expected_maps(reduction, LAYERS, is_mean_of_heads=is_mean)
    special = [bool(each) for each in TEXT.is_special]
    if reduction.level == "words":
        special = [special[TEXT.words.tolist().index(word)] for word in range(maps[0].shape[-1])]
    for result, expected in zip(reduce(LAYERS, reduction, TEXT, is_mean_of_heads=False), maps, strict=True):
        assert isinstance(result.data, RowStatistics)
        assert result.data.received is not None
        assert result.data.entropy is not None
        not_special = [False] * expected.shape[-1]
        is_special = not_special if reduction.special_tokens == "drop" else special
        np.testing.assert_allclose(result.data.received, reference.received(expected, is_special), atol=1e-5)
        np.testing.assert_allclose(result.data.entropy, reference.entropy(expected), atol=1e-5)


@pytest.mark.parametrize(
    ("level", "special", "units"),
    [
        ("tokens", "keep", None),
        ("words", "keep", [0, 1, 1, 2, 3, 4, 5, 5, 6]),
        ("tokens", "drop", [-1, 0, 1, 2, -1, 3, 4, 5, -1]),
        ("words", "drop", [-1, 0, 0, 1, -1, 2, 3, 3, -1]),
    ],
)
def test_unit_ids_map_tokens_to_units(level: Any, special: Any, units: list[int] | None) -> None:
    [result] = reduce(
        LAYERS[:1], AttentionReduction(level=level, special_tokens=special), TEXT, is_mean_of_heads=False
    )
    unit_ids = None if result.unit_ids is None else result.unit_ids.tolist()
    assert unit_ids == units


def test_text_of_only_special_tokens_has_no_units_left() -> None:
    text = TextUnits.of([None, None], [True, True], [False, False])
    layers = [reference.random_maps(HEADS, 2)] * 2
    for layers_choice, is_mean, form in itertools.product(CHOICES, (False, True), FORMS):
        reduction = AttentionReduction(
            special_tokens="drop",
            layers=layers_choice,
            mean_over_rows=is_mean,
            form=form,
        )
        if not list(reduction.problems()):
            result = reduce(layers, reduction, text, is_mean_of_heads=False)[0]
            assert result.special_token_mass is not None
            assert result.special_token_mass.shape[1] == int(is_mean)


def test_negative_rows_count_from_the_end() -> None:
    assert resolve_rows([0, -1, 2], 4) == (0, 3, 2)
    assert resolve_rows([3, -1], 4) == (3, 3)
    for rows, position in (([0, 4], 1), ([-5], 0)):
        with pytest.raises(IndexError) as caught:
            resolve_rows(rows, 4)
        assert caught.value.args == (position,)


def test_missing_and_mismatched_text_units_are_errors() -> None:
    for reduction in (AttentionReduction(level="words"), AttentionReduction(form=Statistics(received=True))):
        with pytest.raises(ValueError, match="needs the words and special tokens"):
            reduce(LAYERS, reduction, None, is_mean_of_heads=False)
    with pytest.raises(ValueError, match="9 tokens instead of 4"):
        reduce([reference.random_maps(1, 4)], AttentionReduction(level="words"), TEXT, is_mean_of_heads=False)


@pytest.mark.parametrize("reduction", ALLOWED)
def test_size_of_a_result_is_known_in_advance(reduction: AttentionReduction) -> None:
    for result in reduce(LAYERS, reduction, TEXT, is_mean_of_heads=False):
        num_units = TOKENS
        if result.unit_ids is not None:
            num_units = int(result.unit_ids.max()) + 1
        size = sizes.data_bytes(
            reduction,
            1 if reduction.layers == "rollout" else HEADS,
            num_units,
            value_bytes=4,
            is_distribution=True,
        )
        assert result.size_bytes <= size + 4  # an indptr has one entry more than there are rows
        if not isinstance(reduction.form, Threshold):
            assert result.size_bytes == size


LARGE = TextUnits.of(
    [None, *(index // 2 for index in range(158)), None], [True, *[False] * 158, True], [False] * 160
)


class Copies(list[Any]):
    """Layers that return new arrays at each access, like the layers of a batch."""

    def __iter__(self) -> Iterator[Any]:
        return (each.copy() for each in super().__iter__())

    def __reversed__(self) -> Iterator[Any]:
        return (each.copy() for each in super().__reversed__())


@pytest.mark.parametrize("form", [*FORMS, Threshold(1e-6)], ids=str)
def test_memory_of_a_reduction_is_bounded_in_advance(form: Any) -> None:
    layers = Copies([reference.random_maps(4, LARGE.num_tokens)] * 2)
    for level, special, layer_choice in itertools.product(LEVELS, SPECIAL, CHOICES):
        reduction = AttentionReduction(level=level, special_tokens=special, layers=layer_choice, form=form)
        tracemalloc.start()
        results = reduce(layers, reduction, LARGE, is_mean_of_heads=False)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        working = peak - sum(result.size_bytes for result in results)
        assert working <= sizes.working_bytes(reduction, 4, LARGE.num_tokens) + (1 << 16), reduction
