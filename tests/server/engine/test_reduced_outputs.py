"""Reduced outputs of a batch: combined queries, one text of several, layers in order.

Dimensions: B texts, T tokens of a text, T' tokens of a batch row, H heads.
"""

import numpy as np
import pytest

from attnlens.patterns import Band, BlockTable, Pattern
from attnlens.reductions import AttentionReduction, TextUnits, TopK, TopKWeights, reduce
from attnlens_server.bundle import Layout, Output, OutputRole, RowSum
from attnlens_server.engine.batch import HostOutputs, Item, reduced, reductions
from attnlens_server.operations.attention import AttentionView, QueryPlan
from attnlens_server.operations.encode_costs import working_bytes

TOKENS, PADDED, HEADS = 9, 12, 3
BAND = Band(window_radius=2, num_global_tokens=1)
TABLE = BlockTable(2, 3, np.random.default_rng(0).integers(0, 6, (HEADS, 6, 1)).astype(np.int32))
UNITS = TextUnits.of([None, 0, 0, *range(1, 6), None], [True, *[False] * 7, True], [False] * TOKENS)


def outputs_of(pattern: Pattern | None) -> tuple[list[Output], HostOutputs]:
    """Two layers of a batch of two texts, the second of which has T tokens."""
    layout = {Band: Layout.BAND, BlockTable: Layout.BLOCKS}.get(type(pattern), Layout.DENSE)
    layers = [
        Output(f"layer.{layer}", OutputRole.ATTENTION_WEIGHTS, layout, layer, HEADS, 0, RowSum.ONE, pattern)
        for layer in range(2)
    ]
    width = pattern.width if pattern else PADDED
    generator = np.random.default_rng(1)
    arrays = {layer.name: generator.random((2, HEADS, PADDED, width), dtype=np.float32) for layer in layers}
    return layers, HostOutputs(arrays)


def dense(outputs: HostOutputs, layer: Output, heads: list[int]) -> np.ndarray:
    rows = outputs.arrays[layer.name][1, heads, :TOKENS]
    if isinstance(layer.pattern, Band):
        return layer.pattern.dense(rows)
    if isinstance(layer.pattern, BlockTable):
        return layer.pattern.of_heads(heads).at(TOKENS).dense(rows)
    return rows[..., :TOKENS]


@pytest.mark.parametrize("pattern", [None, BAND, TABLE], ids=["dense", "band", "blocks"])
@pytest.mark.parametrize("view", [AttentionView.FULL, AttentionView.HEAD_MEAN])
@pytest.mark.parametrize(
    "reduction",
    [
        AttentionReduction(form=TopK(2)),
        AttentionReduction(level="words", layers="mean"),
        AttentionReduction(special_tokens="drop", layers="rollout"),
        AttentionReduction(level="words", special_tokens="drop"),
    ],
)
def test_reducing_a_batch_row_matches_reducing_its_dense_weights(
    pattern: Pattern | None, view: AttentionView, reduction: AttentionReduction
) -> None:
    layers, outputs = outputs_of(pattern)
    backwards = (layers[1], layers[0])  # any order is valid in a request; a rollout sorts the layers
    plan = QueryPlan(0, OutputRole.ATTENTION_WEIGHTS, backwards, (2, 0), view, reduction)
    assert plan.layout is Layout.DENSE
    whole = [dense(outputs, layer, [2, 0]) for layer in layers]
    is_mean = view is AttentionView.HEAD_MEAN
    results = reduce(whole, reduction, UNITS, is_mean_of_heads=is_mean)
    expected = results if reduction.joins_layers else results[::-1]
    assert len(plan.parts) == len(expected)
    for part, result in zip(plan.parts, expected, strict=True):
        requested = plan.engine_reduction(part)
        assert requested is not None
        found = reduced(outputs, 1, TOKENS, requested, UNITS)
        if isinstance(result.data, TopKWeights):
            assert isinstance(found.data, TopKWeights)
            np.testing.assert_array_equal(found.data.indices, result.data.indices)
            np.testing.assert_array_equal(found.data.remaining_mass, result.data.remaining_mass)
        else:
            np.testing.assert_array_equal(found.data, result.data, strict=True)


def test_equal_reductions_of_a_text_are_computed_once() -> None:
    layers, outputs = outputs_of(None)
    forms = [TopK(2), TopK(3), TopK(2), TopK(2)]
    plans = [
        QueryPlan(
            index,
            OutputRole.ATTENTION_WEIGHTS,
            (layers[0],),
            (0,),
            AttentionView.FULL,
            AttentionReduction(form=form),
        )
        for index, form in enumerate(forms)
    ]
    requested = [plan.engine_reduction(plan.outputs) for plan in plans]
    wanted = tuple(each for each in requested if each)
    item = Item(np.zeros(TOKENS, np.int64), (), reductions=wanted, units=UNITS)
    found = reductions(outputs, 1, item)
    assert found[0] is found[2] is found[3]
    assert [each.data.values.shape[-1] for each in found if isinstance(each.data, TopKWeights)] == [
        2,
        3,
        2,
        2,
    ]


def test_combining_weights_counts_towards_the_cost() -> None:
    plans = [
        QueryPlan(
            0,
            OutputRole.ATTENTION_WEIGHTS,
            tuple(outputs_of(pattern)[0]),
            (0,),
            AttentionView.FULL,
            AttentionReduction(),
        )
        for pattern in (None, BAND)
    ]
    plain, band = (working_bytes([plan], 1000) for plan in plans)
    assert band - plain == 4 * 1000 * (BAND.width + 1000)
    assert (
        working_bytes(
            [QueryPlan(0, OutputRole.ATTENTION_WEIGHTS, plans[0].outputs, (0,), AttentionView.FULL)], 9
        )
        == 0
    )
