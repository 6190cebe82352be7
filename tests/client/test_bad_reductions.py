"""Clients reject replies whose reductions do not match the request."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from attnlens.reductions import SparseWeights, TextUnits, TopKWeights, reduce
from attnlens.tensors import fill_tensor, from_tensor, to_tensor
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.manifest_pb2 import OutputRole, RowSum
from attnlens.v1.tensor_pb2 import DataType, Tensor
from attnlens_client import (
    AttentionQuery,
    AttentionReduction,
    BadReplyError,
    SqrtUint8,
    Statistics,
    Threshold,
    TopK,
)
from attnlens_client.core.attention import QueryReader
from attnlens_client.core.replies import Consistency
from attnlens_client.results import Attention, Token
from reduction_reference import random_maps

FLOAT32, INT32, UINT8 = DataType.DATA_TYPE_FLOAT32, DataType.DATA_TYPE_INT32, DataType.DATA_TYPE_UINT8
TOKENS = tuple(
    Token(id=1, text="a", source=source, byte_start=0, byte_end=0, char_start=0, char_end=0, word_index=word)
    for source, word in (("special", None), ("text", 0), ("text", 0), ("text", 1), ("special", None))
)
UNITS = TextUnits.of(
    [token.word_index for token in TOKENS], [token.is_special for token in TOKENS], [False] * len(TOKENS)
)
LAYERS = [random_maps(2, len(TOKENS), seed) for seed in range(2)]

Change = Callable[[pb.AttentionResult], object]


def reply(reduction: AttentionReduction) -> pb.AttentionResult:
    """Reply of a server with two layers and two heads."""
    message = pb.AttentionResult(
        role=OutputRole.OUTPUT_ROLE_ATTENTION_WEIGHTS,
        view=pb.ATTENTION_VIEW_FULL,
        layers=[0, 1],
        heads=[0, 1],
        row_sum=RowSum.ROW_SUM_ONE,
    )
    results = reduce(LAYERS, reduction, UNITS, is_mean_of_heads=False)
    data: list[Any] = [result.data for result in results]
    match data[0]:
        case TopKWeights():
            _fill(message.top_k.indices, [top.indices for top in data], INT32)
            _fill(message.top_k.values, [top.values for top in data], FLOAT32)
            _fill(message.top_k.remaining_mass, [top.remaining_mass for top in data], FLOAT32)
        case SparseWeights():
            rows = SparseWeights.joined(data)
            fill_tensor(message.sparse.indptr, rows.indptr, INT32)
            fill_tensor(message.sparse.indices, rows.indices, INT32)
            fill_tensor(message.sparse.values, rows.values, FLOAT32)
            fill_tensor(message.sparse.kept_mass, rows.kept_mass, FLOAT32)
        case np.ndarray(dtype=np.uint8):
            _fill(message.sqrt_uint8, data, UINT8)
        case np.ndarray():
            _fill(message.dense, data, FLOAT32)
        case _:
            _fill(message.statistics.received, [each.received for each in data], FLOAT32)
    if results[0].unit_ids is not None:
        message.unit_ids.extend(results[0].unit_ids.tolist())
    if results[0].special_token_mass is not None:
        _fill(message.special_token_mass, [result.special_token_mass for result in results], FLOAT32)
    return message


def _fill(tensor: Tensor, arrays: list[Any], data_type: DataType.ValueType) -> None:
    fill_tensor(tensor, np.stack(arrays), data_type)


def read(reduction: AttentionReduction, message: pb.AttentionResult) -> Attention:
    reader = QueryReader(0, AttentionQuery(reduction=reduction), FLOAT32, Consistency())
    return reader.read(0, TOKENS, message)


def put(tensor: Tensor, place: int, value: float) -> None:
    """Return a change that sets one element."""
    array = from_tensor(tensor).copy()
    array.reshape(-1)[place] = value
    tensor.CopyFrom(to_tensor(array, tensor.data_type))


TOP, ROWS = AttentionReduction(form=TopK(2)), AttentionReduction(form=Threshold(0.1))
DROP, LEVELS = AttentionReduction(special_tokens="drop"), AttentionReduction(form=SqrtUint8())
RECEIVED = AttentionReduction(form=Statistics(received=True))
GOOD = [
    TOP,
    ROWS,
    DROP,
    LEVELS,
    RECEIVED,
    AttentionReduction(level="words"),
    AttentionReduction(rows=[1]),
    AttentionReduction(layers="mean"),
]


def leave_out_reduction(it: pb.AttentionResult) -> None:
    it.CopyFrom(reply(AttentionReduction()))


BAD: dict[str, tuple[AttentionReduction, Change, str]] = {
    "the full maps of an older server": (
        TOP, leave_out_reduction, "is dense, expected top_k: the server may be too old",
    ),
    "all layers by themselves": (
        AttentionReduction(layers="mean"), leave_out_reduction, ", expected",
    ),
    "all rows": (AttentionReduction(rows=[1]), leave_out_reduction, ", expected"),
    "tokens for words": (
        AttentionReduction(level="words"), leave_out_reduction, "unit ids in .* do not match",
    ),
    "units unasked": (TOP, lambda it: it.unit_ids.extend(range(5)), "unit ids in .* do not match"),
    "other units": (DROP, lambda it: it.unit_ids.__setitem__(1, 1), "unit ids in .* do not match"),
    "no special token mass": (DROP, lambda it: it.ClearField("special_token_mass"), "kept or dropped"),
    "special token mass unasked": (TOP, lambda it: it.special_token_mass.shape.append(1), "kept or dropped"),
    "special token mass of other rows": (
        DROP, lambda it: it.special_token_mass.shape.append(1), "special token mass of",
    ),
    "non-finite mass": (DROP, lambda it: put(it.special_token_mass, 0, np.nan), "not finite"),
    "non-finite weights": (DROP, lambda it: put(it.dense, 0, np.inf), "not finite"),
    "levels in fp32": (LEVELS, lambda it: setattr(it.sqrt_uint8, "data_type", 1), "of float32 do not fill"),
    "a column too many": (TOP, lambda it: put(it.top_k.indices, 0, 5), "indices out of range"),
    "a column below 0": (TOP, lambda it: put(it.top_k.indices, 0, -1), "indices out of range"),
    "a column twice": (
        TOP, lambda it: put(it.top_k.indices, 0, from_tensor(it.top_k.indices)[0, 0, 0, 1]), "repeated",
    ),
    "not in descending order": (TOP, lambda it: put(it.top_k.values, 1, 2), "not in descending order"),
    "a remaining mass of other rows": (
        TOP, lambda it: it.top_k.remaining_mass.shape.append(1), "remaining mass of",
    ),
    "non-finite remaining mass": (
        TOP, lambda it: put(it.top_k.remaining_mass, 0, np.nan), "not finite",
    ),
    "rows that do not start at 0": (ROWS, lambda it: put(it.sparse.indptr, 0, 1), "indptr of"),
    "rows that go back": (ROWS, lambda it: put(it.sparse.indptr, 1, 99), "indptr of"),
    "rows that end early": (ROWS, lambda it: put(it.sparse.indptr, -1, 3), "indptr of"),
    "a row start too few": (ROWS, lambda it: it.sparse.indptr.shape.__setitem__(0, 20), "indptr of"),
    "an entry of no column": (ROWS, lambda it: put(it.sparse.indices, 0, 5), "indices out of range"),
    "entries out of order": (
        ROWS, lambda it: put(it.sparse.indices, 1, from_tensor(it.sparse.indices)[0]), "ascending order",
    ),
    "a value too few": (ROWS, lambda it: it.sparse.values.shape.__setitem__(0, 1), "values of"),
    "non-finite entry": (ROWS, lambda it: put(it.sparse.values, 0, np.inf), "not finite"),
    "kept mass of other rows": (ROWS, lambda it: it.sparse.kept_mass.shape.append(1), "kept mass of"),
    "no statistics": (RECEIVED, lambda it: it.statistics.ClearField("received"), "differ from"),
    "statistics unasked": (RECEIVED, lambda it: it.statistics.entropy.SetInParent(), "differ from"),
    "statistics of other tokens": (RECEIVED, lambda it: it.statistics.received.shape.append(1), "received"),
}  # fmt: skip


@pytest.mark.parametrize("reduction", GOOD)
def test_valid_reduction_is_converted(reduction: AttentionReduction) -> None:
    attention = read(reduction, reply(reduction))
    [first, *_] = reduce(LAYERS, reduction, UNITS, is_mean_of_heads=False)
    if isinstance(first.data, np.ndarray):
        np.testing.assert_array_equal(attention.weights[0], first.data)
        assert attention.dense().shape == attention.weights.shape
    else:
        with pytest.raises(ValueError, match="has no dense weights: see"):
            attention.dense()
    for name in {"top_k", "sparse", "statistics"} - {attention.layout}:
        with pytest.raises(
            ValueError, match=rf"the layout is {attention.layout}: request AttentionReduction\(form="
        ):
            getattr(attention, name)


@pytest.mark.parametrize(("reduction", "change", "message"), BAD.values(), ids=BAD)
def test_invalid_reduction_is_rejected(reduction: AttentionReduction, change: Change, message: str) -> None:
    changed = reply(reduction)
    change(changed)
    with pytest.raises(BadReplyError, match=message):
        read(reduction, changed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "sentences"}, r"reduction.level is 'sentences': choose one of tokens, words"),
        ({"rollout_residual": 0.5}, "reduction.rollout_residual is only used for a rollout"),
        ({"form": TopK(0)}, "reduction.top_k.k is 0: use 1 to 2147483647"),
        ({"form": Threshold(float("nan"))}, "reduction.threshold.threshold is nan: it must be greater"),
        ({"rows": [0, 0]}, "reduction.rows contains a row twice"),
        ({"rows": [2**40]}, "reduction.rows contains an index beyond 2147483647"),
    ],
)
def test_invalid_query_is_not_sent(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionQuery(reduction=AttentionReduction(**options))


def test_rows_must_be_integers_and_a_rollout_requires_the_mean() -> None:
    with pytest.raises(TypeError):
        AttentionReduction(rows=[0.5])  # type: ignore[list-item]
    assert AttentionQuery(reduction=AttentionReduction(layers="rollout")).view == "head_mean"
    with pytest.raises(ValueError, match="omit the view"):
        AttentionQuery(view="dense", reduction=AttentionReduction(layers="rollout"))
