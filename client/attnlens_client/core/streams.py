"""Replies of a stream: each text comes in parts, a head and then query by query its layers.

Letters: T tokens of a text, L' and H' the chosen layers and heads.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens_client.arguments import AttentionQuery
from attnlens_client.core.checks import check_presence, wrong_reply, wrong_text
from attnlens_client.core.replies import EncodeReader
from attnlens_client.results import Array, Attention, EncodedText, HeadPart, LayerPart


class StreamReader:
    """Reads the messages of one streaming call.

    Args:
        texts: the reader of the whole method.
        first, count: the number of the call's first text, and how many it has.
    """

    def __init__(self, texts: EncodeReader, first: int, count: int) -> None:
        self._texts = texts
        self._first, self._end = first, first + count
        self._index = first - 1  # the text whose parts come
        self._num_tokens = 0
        self._num_parts = 0  # with a layer, that the text has
        self._layers: list[list[int]] = []  # those that have come, by query

    def part(self, response: pb.EncodeStreamResponse) -> HeadPart | LayerPart:
        """Read one message.

        Raises:
            BadReplyError: it is not what was asked for, or does not follow the one before.
        """
        index = self._first + response.input_index
        self._texts.agreed.check("model", response.model, f"texts[{index}]")
        match response.WhichOneof("part"):
            case "head":
                return self._head(index, response)
            case "attention":
                return self._layer(index, response.attention)
            case _:
                raise wrong_text(index, "has a part that is neither a head nor a layer")

    def finish(self) -> None:
        """Check that everything has come, once the stream has ended.

        Raises:
            BadReplyError: a text is missing, or a part of the last one.
        """
        self._end_text()
        if self._index + 1 != self._end:
            done = self._index + 1 - self._first
            raise wrong_reply(f"the stream ends after {done} of {self._end - self._first} texts")

    def _head(self, index: int, response: pb.EncodeStreamResponse) -> HeadPart:
        self._end_text()
        if index != self._index + 1 or index >= self._end:
            raise wrong_reply(f"the stream has texts[{index}] where texts[{self._index + 1}] is due")
        self._texts.agreed.check("model version", response.model_version, f"texts[{index}]")
        check_presence("attention in its head", index, has=bool(response.head.attention), wants=False)
        text = self._texts.head(index, response.head, response.model, response.model_version)
        self._index, self._num_tokens, self._layers = index, text.num_tokens, []
        self._num_parts = response.num_attention_parts
        if self._num_parts < len(self._texts.queries) or (self._num_parts and not self._texts.queries):
            raise wrong_text(
                index, f"announces {self._num_parts} layers for {len(self._texts.queries)} queries"
            )
        self._texts.agreed.check("number of attention parts", self._num_parts, f"texts[{index}]")
        return HeadPart(index, text, self._num_parts)

    def _layer(self, index: int, message: pb.AttentionResult) -> LayerPart:
        number, layers = message.query_index, tuple(message.layers)
        if index != self._index or sum(map(len, self._layers)) >= self._num_parts:
            raise wrong_text(index, f"has layers {layers} out of order")
        if number == len(self._layers) < len(self._texts.queries):
            self._end_query()
            self._layers.append([])
        if number != len(self._layers) - 1:
            raise wrong_text(index, f"has a part of query {number} out of order")
        if len(layers) != 1:
            raise wrong_text(index, f"has a part with {len(layers)} instead of 1 layers")
        query = self._texts.queries[number]
        before = self._layers[-1]
        query.check_layer(index, len(before), layers[0], before[-1] if before else -1)
        attention = query.read(index, self._num_tokens, message)
        before.append(layers[0])
        if sum(map(len, self._layers)) == self._num_parts:
            self._check_queries()
        return LayerPart(
            input_index=index,
            query_index=number,
            layer=layers[0],
            heads=attention.heads,
            layout=attention.layout,
            row_sum=attention.row_sum,
            weights=attention.weights[0],  # (H', T, T), (T, H') or (H', T, W)
            pattern=attention.patterns[0] if attention.patterns else None,
        )

    def _end_query(self) -> None:
        if self._layers:
            self._texts.queries[len(self._layers) - 1].check_layers(self._index, self._layers[-1])

    def _end_text(self) -> None:
        num_received = sum(map(len, self._layers))
        if num_received != self._num_parts:
            raise wrong_text(self._index, f"has {num_received} instead of {self._num_parts} layers")

    def _check_queries(self) -> None:
        """Check what has come of a text, now that it is complete."""
        self._end_query()
        if len(self._layers) != len(self._texts.queries):
            raise wrong_text(
                self._index,
                f"has layers of {len(self._layers)} instead of {len(self._texts.queries)} queries",
            )


class Assembler:
    """Puts the parts of a stream together again, one text at a time.

    Args:
        queries: those that were asked for.
    """

    def __init__(self, queries: Sequence[AttentionQuery]) -> None:
        self._queries = queries
        self._head: HeadPart | None = None
        self._layers: list[LayerPart] = []

    def add(self, part: HeadPart | LayerPart) -> list[EncodedText]:
        """Take the next part, and return its text if that is complete now, else nothing."""
        if isinstance(part, HeadPart):
            self._head, self._layers = part, []
        else:
            self._layers.append(part)
        if self._head is None or len(self._layers) < self._head.num_layer_parts:
            return []
        text, self._head = self._head.text, None
        attention = tuple(
            _joined(query, [layer for layer in self._layers if layer.query_index == number])
            for number, query in enumerate(self._queries)
        )
        return [replace(text, attention=attention)]


def _joined(query: AttentionQuery, layers: Sequence[LayerPart]) -> Attention:
    weights: Array = np.stack([layer.weights for layer in layers])  # with an axis of L' first
    weights.flags.writeable = False  # like the arrays of `encode`
    return Attention(
        query=query,
        layers=tuple(layer.layer for layer in layers),
        heads=layers[0].heads,
        layout=layers[0].layout,
        row_sum=layers[0].row_sum,
        weights=weights,
        patterns=tuple(layer.pattern for layer in layers if layer.pattern is not None),
    )
