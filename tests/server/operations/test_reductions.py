"""Reductions over gRPC are bit-identical to NumPy reductions of the full maps from the same server.

MiniLM; L layers, H heads, T tokens.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from attnlens.reductions import (
    AttentionReduction,
    RowStatistics,
    SparseWeights,
    SqrtUint8,
    Statistics,
    TextUnits,
    Threshold,
    TopK,
    TopKWeights,
    reduce,
)
from attnlens.tensors import from_tensor
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens.v1.error_pb2 import ErrorDetails
from attnlens.v1.tensor_pb2 import DataType
from attnlens_client import AttentionQuery, Client, EncodedText, Text
from served import ServerProcess

SENTENCE = "The animal didn't cross the street because it was too tired."
TEXTS: list[Text] = [
    SENTENCE,
    "unbelievably antidisestablishmentarianism electroencephalography",
    ("A man 😀 is playing a guitar.", "Someone plays an instrument, unbelievably 👩‍👩‍👧 loud."),
    "Zoë's café in Đà Nẵng",
    "a",
    " ".join(["word"] * 40),
]
FORMS = [None, TopK(3), Threshold(0.05), Statistics(received=True, entropy=True), SqrtUint8()]
REDUCTIONS = [
    AttentionReduction(level=level, special_tokens=special, layers=layers, mean_over_rows=is_mean, form=form)  # type: ignore[arg-type]
    for level, special, layers, is_mean, form in itertools.product(
        ("tokens", "words"), ("keep", "drop"), ("none", "mean", "rollout"), (False, True), FORMS
    )
]
VALID_REDUCTIONS = [each for each in REDUCTIONS if not list(each.problems())]
VALID_REDUCTIONS += [
    AttentionReduction(rows=[0, -1]),
    AttentionReduction(level="words", rows=[-2, 1], form=TopK(1)),
]


@pytest.fixture(scope="module")
def client(minilm_server: ServerProcess) -> Iterator[Client]:
    with Client(minilm_server.address) as client:
        yield client


@pytest.fixture(scope="module")
def stub(minilm_server: ServerProcess) -> Iterator[EncoderServiceStub]:
    with grpc.insecure_channel(minilm_server.address) as channel:
        yield EncoderServiceStub(channel)


def units_of(text: EncodedText) -> TextUnits:
    return TextUnits.of(
        [token.word_index for token in text.tokens],
        [token.source == "special" for token in text.tokens],
        [token.source == "second_text" for token in text.tokens],
    )


def expected(text: EncodedText, query: AttentionQuery) -> list[Any]:
    """Compute the arrays expected for a query from the full maps returned by the last query."""
    assert query.reduction is not None
    full = list(text.attention[-1].weights)
    results = reduce(full, query.reduction, units_of(text), is_mean_of_heads=query.view == "head_mean")
    masses = [result.special_token_mass for result in results if result.special_token_mass is not None]
    data = [result.data for result in results]
    match data[0]:
        case TopKWeights():
            tops = [each for each in data if isinstance(each, TopKWeights)]
            arrays: list[Any] = [[top.indices for top in tops], [top.values for top in tops]]
            arrays.append([top.remaining_mass for top in tops])
        case SparseWeights():
            rows = SparseWeights.joined([each for each in data if isinstance(each, SparseWeights)])
            return [rows.indptr, rows.indices, rows.values, rows.kept_mass, *([masses] if masses else [])]
        case RowStatistics():
            both = [each for each in data if isinstance(each, RowStatistics)]
            arrays = [[each.received for each in both], [each.entropy for each in both]]
        case _:
            arrays = [data]
    return arrays + ([masses] if masses else [])


def result_arrays(text: EncodedText, index: int) -> list[Any]:
    """Arrays returned for a query."""
    attention = text.attention[index]
    match attention.reduced:
        case TopKWeights(indices, values, remaining_mass):
            arrays = [indices, values, remaining_mass]
        case SparseWeights(indptr, indices, values, kept_mass):
            arrays = [indptr, indices, values, kept_mass]
        case RowStatistics(received, entropy):
            arrays = [received, entropy]  # type: ignore[list-item] # both were requested
        case None:
            arrays = [attention.weights]
    return arrays + ([attention.special_token_mass] if attention.special_token_mass is not None else [])


@pytest.mark.parametrize("method", ["encode", "encode_stream"])
@pytest.mark.parametrize("view", ["full", "head_mean"])
def test_reductions_are_bit_identical_to_numpy(client: Client, method: str, view: Any) -> None:
    """Each request has 15 reductions and the full maps, so that all of them come from the same run."""
    for start in range(0, len(VALID_REDUCTIONS), 15):
        reductions = VALID_REDUCTIONS[start : start + 15]
        queries = [AttentionQuery(view=view, reduction=reduction) for reduction in reductions]
        for text in getattr(client, method)(TEXTS, attention=[*queries, AttentionQuery()]):
            for index, query in enumerate(queries):
                arrays, requested = result_arrays(text, index), expected(text, query)
                assert len(arrays) == len(requested)
                for array, want in zip(arrays, requested, strict=True):
                    np.testing.assert_array_equal(array, np.array(want), strict=True)
                    assert not array.flags.writeable


def test_only_selected_layers_and_heads_are_reduced(client: Client) -> None:
    full, mean, rollout = client.encode(
        [SENTENCE],
        attention=[
            AttentionQuery(layers=[4, 1], heads=[3, 7]),
            AttentionQuery(
                layers=[4, 1], heads=[3, 7], view="head_mean", reduction=AttentionReduction(layers="mean")
            ),
            AttentionQuery(layers=[4, 1], heads=[3, 7], reduction=AttentionReduction(layers="rollout")),
        ],
    )[0].attention
    assert (mean.layers, mean.heads, rollout.layers) == ((4, 1), (3, 7), (4, 1))
    np.testing.assert_allclose(mean.weights[0, 0], full.weights.mean(axis=(0, 1)), atol=1e-6)
    later, earlier = (0.5 * each.mean(axis=0) + 0.5 * np.eye(16) for each in full.weights)
    np.testing.assert_allclose(rollout.weights[0, 0], later @ earlier, atol=1e-6)


def test_combined_layers_are_one_part_of_a_stream(stub: EncoderServiceStub) -> None:
    queries = [
        pb.AttentionQuery(reduction=pb.AttentionReduction(layers=pb.LAYER_REDUCTION_MEAN)),
        pb.AttentionQuery(layers=[0, 2]),
        pb.AttentionQuery(reduction=pb.AttentionReduction(layers=pb.LAYER_REDUCTION_ROLLOUT)),
        pb.AttentionQuery(reduction=pb.AttentionReduction(top_k=pb.TopK(k=2)), layers=[5, 4]),
    ]
    inputs = [pb.Input(text=SENTENCE)]
    [whole] = stub.Encode(pb.EncodeRequest(inputs=inputs, attention=queries)).results
    head, *parts = stub.EncodeStream(pb.EncodeStreamRequest(inputs=inputs, attention=queries))
    assert head.num_attention_parts == len(parts) == 1 + 2 + 1 + 2
    layers = [list(part.attention.layers) for part in parts]
    assert layers == [[*range(6)], [0], [2], [*range(6)], [5], [4]]
    assert [part.attention.query_index for part in parts] == [0, 1, 1, 2, 3, 3]
    assert parts[0].attention == whole.attention[0]
    assert parts[3].attention == whole.attention[2]
    assert whole.attention[2].view == pb.ATTENTION_VIEW_HEAD_MEAN
    assert list(whole.attention[2].dense.shape) == [1, 1, 16, 16]


def test_reductions_of_one_sentence_match_the_reference(client: Client) -> None:
    """The references were computed in float64 with an independent PyTorch encoder."""
    statistics = Statistics(received=True, all_rows=True)
    rollout, entropy, received, dropped = client.encode(
        [SENTENCE],
        attention=[
            AttentionQuery(reduction=AttentionReduction(layers="rollout", mean_over_rows=True)),
            AttentionQuery(
                layers=[3], heads=[1], reduction=AttentionReduction(form=Statistics(entropy=True))
            ),
            AttentionQuery(layers=[-1], view="head_mean", reduction=AttentionReduction(form=statistics)),
            AttentionQuery(reduction=AttentionReduction(special_tokens="drop")),
        ],
    )[0].attention
    np.testing.assert_allclose(
        rollout.weights[0, 0, 0],
        [.60106, .02934, .02315, .02290, .01693, .01317, .01987, .02203, .02182, .02380, .01699, .01827,
         .01516, .02435, .04231, .08886],
        atol=1e-5,
    )  # fmt: skip
    assert entropy.statistics.entropy is not None
    assert received.statistics.received is not None
    np.testing.assert_allclose(entropy.statistics.entropy[0, 0, 10], 1.263785, atol=1e-5)
    np.testing.assert_allclose(
        received.statistics.received[0, 0, [0, 13, 2, 8]], [5.88997, 1.77558, 1.43840, 1.17325], atol=1e-5
    )
    assert dropped.special_token_mass is not None
    by_layer = dropped.special_token_mass.mean(axis=(1, 2))
    assert (by_layer > 0.2).all()
    assert by_layer.max() > 0.5


def test_float16_applies_to_values_but_not_to_indices(stub: EncoderServiceStub) -> None:
    reductions = [
        pb.AttentionReduction(top_k=pb.TopK(k=4)),
        pb.AttentionReduction(threshold=pb.Threshold(threshold=0.1)),
        pb.AttentionReduction(sqrt_uint8=pb.SqrtUint8()),
        pb.AttentionReduction(special_tokens=pb.SPECIAL_TOKENS_DROP),
    ]
    request = pb.EncodeRequest(
        inputs=[pb.Input(text=SENTENCE)],
        attention=[pb.AttentionQuery(reduction=reduction) for reduction in reductions],
        data_type=DataType.DATA_TYPE_FLOAT16,
    )
    top, rows, levels, dropped = stub.Encode(request).results[0].attention
    tensors = (top.top_k.indices, top.top_k.values, top.top_k.remaining_mass)
    assert [from_tensor(each).dtype.name for each in tensors] == ["int32", "float16", "float16"]
    assert from_tensor(rows.sparse.indptr).dtype == np.int32
    assert from_tensor(rows.sparse.values).dtype == np.float16
    assert from_tensor(levels.sqrt_uint8).dtype == np.uint8
    assert from_tensor(dropped.special_token_mass).dtype == np.float16


DROP, WORDS = pb.SPECIAL_TOKENS_DROP, pb.ATTENTION_LEVEL_WORDS
ROLLOUT = pb.LAYER_REDUCTION_ROLLOUT
RECEIVED = pb.RowStatistics(received=True)
TEXT, IDS = pb.Input(text=SENTENCE), pb.Input(token_ids=pb.TokenIds(input_ids=[101, 2009, 102]))
PATH = "attention[1].reduction"
INVALID_REDUCTIONS: dict[str, tuple[dict[str, Any], pb.Input, str, str]] = {
    "unknown level": ({"level": 9}, TEXT, "level", "is 9: use one of ATTENTION_LEVEL_TOKENS,"),
    "unknown layer reduction": ({"layers": 9}, TEXT, "layers", "is 9: use one of LAYER_REDUCTION_NONE,"),
    "residual without rollout": (
        {"rollout_residual": 0.5}, TEXT, "rollout_residual", "is only used for a rollout: omit it, or set",
    ),
    "residual of 1": (
        {"rollout_residual": 1, "layers": ROLLOUT}, TEXT, "rollout_residual", "is 1: it must be at least 0",
    ),
    "residual of NaN": (
        {"rollout_residual": float("nan"), "layers": ROLLOUT}, TEXT, "rollout_residual", "is nan: it must be",
    ),
    "top 0": ({"top_k": pb.TopK()}, TEXT, "top_k.k", "is 0: use 1 to 2147483647"),
    "threshold 0": ({"threshold": pb.Threshold()}, TEXT, "threshold.threshold", "is 0: it must be greater"),
    "empty statistics": ({"statistics": pb.RowStatistics()}, TEXT, "statistics", "is empty: set received or"),
    "all_rows without received": (
        {"statistics": pb.RowStatistics(entropy=True, all_rows=True)}, TEXT, "statistics.all_rows", "is only",
    ),
    "rows with received": ({"statistics": RECEIVED, "rows": [1]}, TEXT, "rows", "with statistics.received"),
    "rows with mean_over_rows": ({"mean_over_rows": True, "rows": [1]}, TEXT, "rows", "with mean_over_rows"),
    "statistics with mean_over_rows": (
        {"mean_over_rows": True, "statistics": RECEIVED}, TEXT, "mean_over_rows", "with statistics: omit",
    ),
    "repeated row": ({"rows": [1, 1]}, TEXT, "rows", "contains a row twice"),
    "many rows": ({"rows": range(600)}, TEXT, "rows", "has 600 numbers, but texts have at most 512 tokens"),
    "very many rows": ({"rows": range(20000)}, TEXT, "rows", "has more than 16384 entries: omit it"),
    "row out of range": (
        {"rows": [3, 16]}, TEXT, "inputs[0]", f"has 16 rows, but {PATH}.rows[1] is 16: use 0 to 15, or",
    ),
    "word out of range": (
        {"rows": [-15], "level": WORDS, "special_tokens": DROP}, TEXT, "inputs[0]", "has 14 rows, but",
    ),
    "words without text": (
        {"level": WORDS}, IDS, "inputs[0].token_ids", f"has no known words, which {PATH}.level needs",
    ),
    "special tokens without text": (
        {"special_tokens": DROP}, IDS, "inputs[0].token_ids", f"{PATH}.special_tokens needs: send",
    ),
    "content rows without text": (
        {"statistics": RECEIVED}, IDS, "inputs[0].token_ids", "needs: send text, or set all_rows",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "given", "field", "text"), INVALID_REDUCTIONS.values(), ids=INVALID_REDUCTIONS
)
def test_invalid_reduction_is_rejected_with_the_field_and_a_remedy(
    stub: EncoderServiceStub, fields: dict[str, Any], given: pb.Input, field: str, text: str
) -> None:
    query = pb.AttentionQuery(reduction=pb.AttentionReduction(**fields))
    request = {"inputs": [given], "attention": [pb.AttentionQuery(), query]}
    for call in (
        lambda: stub.Encode(pb.EncodeRequest(**request)),  # type: ignore[arg-type]
        lambda: list(stub.EncodeStream(pb.EncodeStreamRequest(**request))),  # type: ignore[arg-type]
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        trailers: dict[str, Any] = dict(caught.value.trailing_metadata())  # type: ignore[arg-type]
        found = ErrorDetails.FromString(trailers["attnlens-error-bin"]).violations
        described = {violation.field.removeprefix(f"{PATH}."): violation.description for violation in found}
        assert text in described[field]


def test_rollout_of_each_head_is_rejected(stub: EncoderServiceStub) -> None:
    reduction = pb.AttentionReduction(layers=ROLLOUT)
    for view in (pb.ATTENTION_VIEW_FULL, pb.ATTENTION_VIEW_DENSE):
        query = pb.AttentionQuery(reduction=reduction, view=view)
        with pytest.raises(grpc.RpcError, match="rollout uses the mean over heads: omit the view"):
            stub.Encode(pb.EncodeRequest(inputs=[TEXT], attention=[query]))


def test_token_ids_allow_reductions_without_words_or_special_tokens(stub: EncoderServiceStub) -> None:
    statistics = pb.RowStatistics(received=True, all_rows=True)
    queries = [pb.AttentionQuery(reduction=pb.AttentionReduction(statistics=statistics)), pb.AttentionQuery()]
    reduced, full = stub.Encode(pb.EncodeRequest(inputs=[IDS], attention=queries)).results[0].attention
    np.testing.assert_allclose(
        from_tensor(reduced.statistics.received), from_tensor(full.dense).sum(axis=-2), atol=1e-6
    )
