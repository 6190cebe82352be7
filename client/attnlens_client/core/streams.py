"""Replies of a stream: each text comes in parts, a head and then its layers.

Letters: T tokens of a text, L' and H' the chosen layers and heads.
"""

from dataclasses import replace

import numpy as np

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens_client.core.checks import check_count, check_presence, wrong_reply
from attnlens_client.core.replies import EncodeReader
from attnlens_client.results import Array, EncodedText, HeadPart, LayerPart


class StreamReader:
    """Reads the messages of one streaming call: text by text, a head and then its layers.

    Args:
        texts: the reader of the whole method.
        first, count: the number of the call's first text, and how many it has.
    """

    def __init__(self, texts: EncodeReader, first: int, count: int) -> None:
        self._texts = texts
        self._first, self._end = first, first + count
        self._index = first - 1  # the text whose parts come
        self._num_tokens = 0
        self._num_received = 0  # layers of it
        self._num_layers = 0  # that it has

    def part(self, response: pb.EncodeStreamResponse) -> HeadPart | LayerPart:
        """Read one message.

        Raises:
            BadReplyError: it is not what was asked for, or does not follow the one before.
        """
        index = self._first + response.input_index
        self._texts.check_model(response.model, f"texts[{index}]")
        if response.HasField("head"):
            self._end_text()
            if index != self._index + 1 or index >= self._end:
                raise wrong_reply(f"the stream has texts[{index}] where texts[{self._index + 1}] is due")
            text = self._texts.head(index, response.head)
            check_presence("attention weights", index, has=response.head.HasField("attention"), wants=False)
            self._index, self._num_tokens, self._num_received = index, text.num_tokens, 0
            self._num_layers = self._announced(response.num_attention_parts)
            return HeadPart(index, text, self._num_layers)
        layers, heads = tuple(response.attention.layers), tuple(response.attention.heads)
        if index != self._index or self._num_received == self._num_layers:
            raise wrong_reply(f"the stream has layers {layers} of texts[{index}] out of order")
        check_count(len(layers), 1, f"layers in one part of texts[{index}]")
        self._texts.check_layer(self._num_received, layers[0], index)
        self._num_received += 1
        [weights] = self._texts.weights(index, response.attention, self._num_tokens)  # (H', T, T)
        return LayerPart(index, layers[0], heads, weights)

    def finish(self) -> None:
        """Check that everything has come, once the stream has ended.

        Raises:
            BadReplyError: a text is missing, or a part of the last one.
        """
        self._end_text()
        if self._index + 1 != self._end:
            done = self._index + 1 - self._first
            raise wrong_reply(f"the stream ends after {done} of {self._end - self._first} texts")

    def _announced(self, num_layers: int) -> int:
        """Return how many layers follow a head."""
        if self._texts.wants_attention:
            self._texts.check_num_layers(num_layers, self._index)
        else:
            check_count(num_layers, 0, f"layers for texts[{self._index}]")
        return num_layers

    def _end_text(self) -> None:
        check_count(self._num_received, self._num_layers, f"layers for texts[{self._index}]")


class Assembler:
    """Puts the parts of a stream together again, one text at a time."""

    def __init__(self) -> None:
        self._head: HeadPart | None = None
        self._layers: list[LayerPart] = []

    def add(self, part: HeadPart | LayerPart) -> list[EncodedText]:
        """Take the next part, and return its text if that is complete now, else nothing."""
        if isinstance(part, HeadPart):
            self._head, self._layers = part, []
        else:
            self._layers.append(part)
        if self._head is None or len(self._layers) < self._head.num_layers:
            return []
        text, layers = self._head.text, self._layers
        self._head = None
        if not layers:
            return [text]
        numbers, weights = tuple(layer.layer for layer in layers), _stacked(layers)
        return [replace(text, attentions=weights, layers=numbers, heads=layers[0].heads)]


def _stacked(layers: list[LayerPart]) -> Array:
    weights = np.stack([layer.weights for layer in layers])  # (L', H', T, T)
    weights.flags.writeable = False  # like the arrays of `encode`
    return weights
