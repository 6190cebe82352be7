"""Readers of Encode replies, and of EncodeStream messages: a text part per text, then its attention parts."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens_client.arguments import AttentionQuery
from attnlens_client.core.attention import QueryReader, stacked, with_layers, without_layers
from attnlens_client.core.replies import (
    Consistency,
    Reply,
    check_count,
    check_finite,
    check_presence,
    checked_array,
    checked_usage,
    invalid_reply,
    invalid_text,
    precision_of,
    tokens_of,
)
from attnlens_client.results import Attention, AttentionPart, EncodedText, TextPart, Token


class EncodeReader:
    """Reads all replies of one `encode` or `encode_stream`. Arrays are views of the messages' bytes.

    Args:
        request: Request without inputs.
        inputs: Texts of all calls.
        queries: Attention queries of the request.
    """

    def __init__(
        self, request: pb.EncodeRequest, inputs: Sequence[pb.Input], queries: Sequence[AttentionQuery]
    ) -> None:
        self._inputs = inputs
        self.consistency = Consistency(model=request.model)
        self.queries = [
            QueryReader(number, query, request.data_type, self.consistency)
            for number, query in enumerate(queries)
        ]
        self._request = request

    def texts(self, replies: Iterable[Reply[pb.EncodeResponse]]) -> list[EncodedText]:
        """Concatenate the results of all calls.

        Raises:
            BadReplyError: A reply is invalid or inconsistent.
        """
        texts: list[EncodedText] = []
        for first, count, response in replies:
            where = f"texts[{first}:{first + count}]"
            self.consistency.check_model(response.model, response.model_version, where)
            self.consistency.check_computation(response.computation, where)
            check_count(len(response.results), count, f"results for {where}")
            texts += [
                self._text(index, result, response) for index, result in enumerate(response.results, first)
            ]
        return texts

    def _text(self, index: int, message: pb.EncodedText, response: pb.EncodeResponse) -> EncodedText:
        text = self.without_attention(index, message, response)
        if len(message.attention) != len(self.queries):
            raise invalid_text(
                index, f"has {len(message.attention)} attention results, expected {len(self.queries)}"
            )
        attention = []
        for query, result in zip(self.queries, message.attention, strict=True):
            query.check_layers(index, result.layers)
            attention.append(query.read(index, text.tokens, result))
        return replace(text, attention=tuple(attention))

    def without_attention(
        self, index: int, message: pb.EncodedText, response: pb.EncodeResponse | pb.EncodeStreamResponse
    ) -> EncodedText:
        """Return a text without its attention."""
        tokens = tokens_of(message.tokens, index, self._inputs[index])
        usage = checked_usage(message.usage, index, may_truncate=self._request.truncate)
        if len(tokens) != usage.num_tokens:
            raise invalid_text(index, f"has {len(tokens)} tokens, expected {usage.num_tokens}")
        has_hidden_state = message.HasField("last_hidden_state")
        check_presence(
            "token vectors", index, is_present=has_hidden_state, is_requested=self._request.last_hidden_state
        )
        last_hidden_state = None
        if has_hidden_state:
            name, shape = f"token vectors of texts[{index}]", (len(tokens), None)
            last_hidden_state = checked_array(message.last_hidden_state, self._request.data_type, shape, name)
            self.consistency.check("width", last_hidden_state.shape[1], f"texts[{index}]")
            check_finite(last_hidden_state, "token vectors", index)
        return EncodedText(
            tokens=tokens,
            last_hidden_state=last_hidden_state,
            attention=(),
            num_tokens=usage.num_tokens,
            num_tokens_total=usage.num_tokens_total,
            truncated=usage.truncated,
            model=response.model,
            model_version=response.model_version,
            engine=response.computation.engine,
            precision=precision_of(response.computation),
        )


class StreamReader:
    """Reads the messages of one streaming call.

    Args:
        texts: Reader of the whole method.
        first: Index of the first text of the call.
        count: Number of texts of the call.
    """

    def __init__(self, texts: EncodeReader, first: int, count: int) -> None:
        self._texts = texts
        self.first, self.count = first, count
        self._end = first + count
        self._index = first - 1  # current text
        self._tokens: tuple[Token, ...] = ()
        self._num_parts = 0  # announced attention parts of the current text
        self._num_received = 0  # received attention parts
        self._layers: list[list[int]] = []  # received layers by query

    def part(self, response: pb.EncodeStreamResponse) -> TextPart | AttentionPart:
        """Convert one message.

        Raises:
            BadReplyError: The message is invalid or out of order.
        """
        index = self.first + response.input_index
        self._texts.consistency.check("model", response.model, f"texts[{index}]")
        match response.WhichOneof("part"):
            case "text":
                return self._text(index, response)
            case "attention":
                return self._attention(index, response.attention)
            case _:
                raise invalid_text(index, "has a part that is neither text nor attention")

    @property
    def is_complete(self) -> bool:
        """Whether all parts of all texts have been received."""
        return self._index + 1 == self._end and not self.num_unfinished_parts

    @property
    def num_unfinished_parts(self) -> int:
        """Number of parts received of a text that is not complete."""
        is_finished = self._index < self.first or self._num_received == self._num_parts
        return 0 if is_finished else 1 + self._num_received

    def rest(self) -> "StreamReader":
        """Return a reader for another call with the texts that are not complete."""
        first = self._index + (0 if self.num_unfinished_parts else 1)
        return StreamReader(self._texts, first, self._end - first)

    def finish(self) -> None:
        """Check that the stream is complete.

        Raises:
            BadReplyError: A text or a part is missing.
        """
        self._end_text()
        if self._index + 1 != self._end:
            done = self._index + 1 - self.first
            raise invalid_reply(f"the stream ends after {done} of {self._end - self.first} texts")

    def _text(self, index: int, response: pb.EncodeStreamResponse) -> TextPart:
        self._end_text()
        if index != self._index + 1 or index >= self._end:
            raise invalid_reply(f"the stream has texts[{index}], expected texts[{self._index + 1}]")
        self._texts.consistency.check("model version", response.model_version, f"texts[{index}]")
        self._texts.consistency.check_computation(response.computation, f"texts[{index}]")
        check_presence(
            "attention in its first part", index, is_present=bool(response.text.attention), is_requested=False
        )
        text = self._texts.without_attention(index, response.text, response)
        self._index, self._tokens, self._layers = index, text.tokens, []
        self._num_received = 0
        self._num_parts = response.num_attention_parts
        if self._num_parts < len(self._texts.queries) or (self._num_parts and not self._texts.queries):
            raise invalid_text(
                index, f"has {self._num_parts} attention parts for {len(self._texts.queries)} queries"
            )
        self._texts.consistency.check("number of attention parts", self._num_parts, f"texts[{index}]")
        return TextPart(index, text, self._num_parts)

    def _attention(self, index: int, message: pb.AttentionResult) -> AttentionPart:
        number, layers = message.query_index, tuple(message.layers)
        if index != self._index or self._num_received >= self._num_parts:
            raise invalid_text(index, f"has layers {layers} out of order")
        if number == len(self._layers) < len(self._texts.queries):
            self._end_query()
            self._layers.append([])
        if number != len(self._layers) - 1:
            raise invalid_text(index, f"has a part of query {number} out of order")
        query = self._texts.queries[number]
        received = self._layers[-1]
        if query.joins_layers:
            if received:
                raise invalid_text(index, f"has a second part of query {number}, out of order")
            query.check_layers(index, layers)
        elif len(layers) != 1:
            raise invalid_text(index, f"has a part with {len(layers)} layers, expected 1")
        else:
            query.check_layer(index, len(received), layers[0], received[-1] if received else -1)
        attention = query.read(index, self._tokens, message)
        received.extend(layers)
        self._num_received += 1
        if self._num_received == self._num_parts:
            self._check_queries()
        return _attention_part(index, number, attention)

    def _end_query(self) -> None:
        if self._layers:
            self._texts.queries[len(self._layers) - 1].check_layers(self._index, self._layers[-1])

    def _end_text(self) -> None:
        if self._num_received != self._num_parts:
            raise invalid_text(
                self._index, f"has {self._num_received} attention parts, expected {self._num_parts}"
            )

    def _check_queries(self) -> None:
        """Check the queries of a complete text."""
        self._end_query()
        if len(self._layers) != len(self._texts.queries):
            raise invalid_text(
                self._index,
                f"has attention of {len(self._layers)} queries, expected {len(self._texts.queries)}",
            )


def _attention_part(index: int, number: int, attention: Attention) -> AttentionPart:
    """Return the part of one layer, or of joined layers."""
    weights, special_token_mass = attention.weights, attention.special_token_mass
    return AttentionPart(
        input_index=index,
        query_index=number,
        layer=attention.layers[-1],
        heads=attention.heads,
        layout=attention.layout,
        row_sum=attention.row_sum,
        weights=weights if attention.reduced is not None else weights[0],  # (H', T, T), (T, H') or (H', T, W)
        pattern=attention.patterns[0] if attention.patterns else None,
        reduced=without_layers(attention.reduced),
        special_token_mass=None if special_token_mass is None else special_token_mass[0],
        unit_ids=attention.unit_ids,
        layers=attention.layers,
    )


class Assembler:
    """Assembles texts from the parts of a stream.

    Args:
        queries: Requested queries.
    """

    def __init__(self, queries: Sequence[AttentionQuery]) -> None:
        self._queries = queries
        self._text: TextPart | None = None
        self._layers: list[AttentionPart] = []

    def add(self, part: TextPart | AttentionPart) -> list[EncodedText]:
        """Add a part. Return its text if it is complete, else an empty list."""
        if isinstance(part, TextPart):
            self._text, self._layers = part, []
        else:
            self._layers.append(part)
        if self._text is None or len(self._layers) < self._text.num_attention_parts:
            return []
        text, self._text = self._text.text, None
        attention = tuple(
            _joined(query, [layer for layer in self._layers if layer.query_index == number])
            for number, query in enumerate(self._queries)
        )
        return [replace(text, attention=attention)]


def _joined(query: AttentionQuery, layers: Sequence[AttentionPart]) -> Attention:
    first = layers[0]
    masses = [layer.special_token_mass for layer in layers if layer.special_token_mass is not None]
    return Attention(
        query=query,
        layers=tuple(number for layer in layers for number in layer.layers),
        heads=first.heads,
        layout=first.layout,
        row_sum=first.row_sum,
        weights=first.weights if first.reduced is not None else stacked([layer.weights for layer in layers]),
        patterns=tuple(layer.pattern for layer in layers if layer.pattern is not None),
        reduced=with_layers([layer.reduced for layer in layers]),
        special_token_mass=stacked(masses) if masses else None,
        unit_ids=first.unit_ids,
    )
