"""Both clients reject replies whose attention does not match the request."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.tensor_pb2 import DataType, Tensor
from attnlens_client import AttentionQuery, BadReplyError
from bad_replies import only, put, second_text
from scripted import NAME, ScriptedServer, streamed

FLOAT32 = DataType.DATA_TYPE_FLOAT32

Call = Callable[..., Any]
Change = Callable[[Any], object]


# Changes to the second query of the second result.
ATTENTION: dict[str, tuple[dict[str, Any], Change, str]] = {
    "not finite": ({}, lambda it: put(it.dense, 3, np.inf), r"has attention\[1\] with .* not finite"),
    "other sizes": ({}, lambda it: it.dense.shape.append(1), ", expected"),
    "too few bytes": ({}, lambda it: setattr(it.dense, "data", b""), "0 bytes of float32 do not fill"),
    "other heads": ({"heads": [1]}, lambda it: it.heads.__setitem__(0, 0), "0 among .*, expected 1"),
    "fewer heads": ({"heads": [1, 0]}, lambda it: it.heads.pop(), "1 heads.*, expected 2"),
    "heads out of order": ({}, lambda it: it.heads.reverse(), "1 among the heads .*, expected 0"),
    "no heads": ({}, lambda it: it.ClearField("heads"), "no heads"),
    "a negative head": ({"heads": [-1]}, lambda it: it.heads.__setitem__(0, -1), "among the heads"),
    "the mean unasked": ({}, lambda it: setattr(it, "view", 2), "has attention_weights, head_mean, of"),
    "not the mean": ({"view": "head_mean"}, lambda it: setattr(it, "view", 1), "attention_weights, full"),
    "a view of the future": ({}, lambda it: setattr(it, "view", 99), r"weights, unknown \(99\)"),
    "another role": ({}, lambda it: setattr(it, "role", 5), "has head_gates, full, of query 1"),
    "a role of the future": ({}, lambda it: setattr(it, "role", 77), r"has unknown \(77\), full"),
    "another query": ({}, lambda it: setattr(it, "query_index", 0), "of query 0|more than 1 layers"),
    "a query unasked": ({}, lambda it: setattr(it, "query_index", 2), "of query 2"),
    "another row sum": ({}, lambda it: setattr(it, "row_sum", 3), r"row sum of .* is 'unbounded'"),
    "a layout of the future": ({}, lambda it: it.ClearField("dense"), "an unknown layout"),
    "another layout": (
        {},
        lambda it: it.per_token.CopyFrom(
            Tensor(data_type=FLOAT32, shape=[len(it.layers), 3, 2], data=bytes(24 * len(it.layers)))
        ),
        r"layout of attention\[1\] of texts\[1\] is 'per_token'",
    ),
    "fp16": ({}, lambda it: setattr(it.dense, "data_type", 2), "of float16 do not fill"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "change", "message"), ATTENTION.values(), ids=ATTENTION)
def test_invalid_attention_is_rejected(
    server: ScriptedServer, connect: Call, options: dict[str, Any], change: Change, message: str
) -> None:
    attention = [AttentionQuery(layers=[0]), AttentionQuery(**options)]
    server.change = second_text(lambda text: change(text.attention[1]))
    with connect(server.address) as call, pytest.raises(BadReplyError, match=message):
        call("encode", ["ab", "cde"], attention=attention)
    server.change = only(
        pb.EncodeStreamResponse,
        lambda part: (
            change(part.attention) if part.input_index == 1 and part.attention.query_index == 1 else None
        ),
    )
    for method in ("encode_stream", "encode_stream_parts"):
        with connect(server.address) as call, pytest.raises(BadReplyError, match=message):
            call(method, ["ab", "cde"], attention=attention)


def test_number_of_results_must_match_the_queries(server: ScriptedServer, connect: Call) -> None:
    queries = [AttentionQuery(), AttentionQuery(role="head_gates")]
    with connect(server.address) as call:
        for change, message in (
            (lambda text: text.attention.pop(), r"texts\[1\] has 1 attention results, expected 2"),
            (lambda text: text.attention.add(), r"texts\[1\] has 3 attention results, expected 2"),
        ):
            server.change = second_text(change)
            with pytest.raises(BadReplyError, match=message):
                call("encode", ["ab", "cde"], attention=queries)
        server.change = second_text(lambda text: text.attention.add())
        with pytest.raises(BadReplyError, match=r"texts\[1\] has 1 attention results, expected 0"):
            call("encode", ["ab", "cde"])


LAYERS: dict[str, tuple[list[int] | None, list[int], str]] = {
    "another": ([1], [0], "0 among the layers .*, expected 1"),
    "out of order": (None, [1, 0], "layer 0 after layer 1"),
    "a layer twice": (None, [0, 0], "layer 0 after layer 0"),
    "too many": ([1], [1, 0], "more than 1 layers"),
    "too few": ([0, 1], [0], "1 .*, expected 2"),
    "none": (None, [], "no layers"),
    "negative": ([-1], [-1], "among the layers"),
    "not the last": ([-1, -2], [1, 1], "number of layers of .* is 3, expected 2"),
}  # fmt: skip


@pytest.mark.parametrize(("asked", "layers", "message"), LAYERS.values(), ids=LAYERS)
def test_invalid_layers_are_rejected(
    server: ScriptedServer, connect: Call, asked: list[int] | None, layers: list[int], message: str
) -> None:
    server.change = second_text(lambda text: text.attention[0].layers.__setitem__(slice(None), layers))
    with connect(server.address) as call, pytest.raises(BadReplyError, match=message):
        call("encode", ["ab", "cde"], attention=AttentionQuery(layers=asked))


def test_texts_with_different_layers_are_rejected(server: ScriptedServer, connect: Call) -> None:
    def cut(text: pb.EncodedText) -> None:
        attention = text.attention[0]
        del attention.layers[1:]
        attention.dense.shape[0] = 1
        attention.dense.data = attention.dense.data[: len(attention.dense.data) // 2]

    server.change = second_text(cut)
    message = r"layers in attention\[0\] of texts\[1\] is \(0,\), expected \(0, 1\)"
    with connect(server.address) as call, pytest.raises(BadReplyError, match=message):
        call("encode", ["ab", "cde"], attention=AttentionQuery())


STREAMS: dict[str, tuple[Callable[[list[Any]], list[Any]], str]] = {
    "nothing": (lambda parts: parts[:0], "ends after 0 of 2 texts"),
    "the last text missing": (lambda parts: parts[:4], "ends after 1 of 2 texts"),
    "the last layer missing": (lambda parts: parts[:-1], r"texts\[1\] has 2 .*, expected 3"),
    "the first head missing": (lambda parts: parts[1:], "out of order"),
    "the second head missing": (lambda parts: parts[:4] + parts[5:], "out of order"),
    "a layer missing": (lambda parts: [parts[0], *parts[2:]], "layers in attention|2 .*, expected 3"),
    "a query missing": (lambda parts: [*parts[:3], *parts[4:]], "2 .*, expected 3"),
    "a layer twice": (lambda parts: [*parts[:2], parts[1], *parts[3:]], "layer 0 after layer 0"),
    "queries swapped": (lambda parts: [parts[0], parts[3], *parts[1:3], *parts[4:]], "query 1 out of order"),
    "a query twice": (lambda parts: [*parts[:4], parts[1], *parts[4:]], "out of order"),
    "texts swapped": (lambda parts: parts[4:] + parts[:4], r"has texts\[1\], expected texts\[0\]"),
    "a text twice": (lambda parts: parts + parts[4:], "expected texts"),
    "an empty message": (
        lambda parts: [*parts[:1], pb.EncodeStreamResponse(model=NAME)],
        "neither text nor attention",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), STREAMS.values(), ids=STREAMS)
def test_out_of_order_stream_messages_are_rejected(
    server: ScriptedServer, connect: Call, change: Callable[[list[Any]], list[Any]], message: str
) -> None:
    server.encode_stream = lambda request: change(streamed(request))
    attention = [AttentionQuery(), AttentionQuery(layers=[1], view="head_mean")]
    for method in ("encode_stream", "encode_stream_parts"):
        with connect(server.address) as call, pytest.raises(BadReplyError, match=message):
            call(method, ["ab", "cde"], attention=attention)


@pytest.mark.parametrize(
    ("attention", "announced", "message"),
    [
        (AttentionQuery(), 1, "out of order"),
        (AttentionQuery(), 3, "2 .*, expected 3"),
        (AttentionQuery(), -1, "-1 attention parts for 1 queries"),
        (AttentionQuery(), 0, "0 attention parts for 1 queries"),
        (AttentionQuery(layers=[0]), 2, "1 .*, expected 2"),
        ([AttentionQuery(layers=[0])] * 2, 1, "1 attention parts for 2 queries"),
        ([AttentionQuery(), AttentionQuery(layers=[0])], 2, "1 queries, expected 2"),
        (None, 1, "1 attention parts for 0 queries"),
    ],
)
def test_invalid_announced_layer_count_is_rejected(
    server: ScriptedServer, connect: Call, attention: Any, announced: int, message: str
) -> None:
    server.change = only(
        pb.EncodeStreamResponse,
        lambda part: setattr(part, "num_attention_parts", announced) if part.HasField("text") else None,
    )
    for method in ("encode_stream", "encode_stream_parts"):
        with connect(server.address) as call, pytest.raises(BadReplyError, match=message):
            call(method, ["ab"], attention=attention)
