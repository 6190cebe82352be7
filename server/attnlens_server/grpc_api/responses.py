"""From results to messages."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from google.protobuf.duration_pb2 import Duration

from attnlens.patterns import Band, BlockTable
from attnlens.tensors import fill_stacked, fill_tensor, to_tensor
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.manifest_pb2 import OutputRole
from attnlens.v1.manifest_pb2 import RowSum as RowSumNumber
from attnlens.v1.tensor_pb2 import DataType as DataTypeNumber
from attnlens.v1.tensor_pb2 import Tensor
from attnlens_server.bundle import Layout, RowSum
from attnlens_server.bundle.manifest import PRECISIONS
from attnlens_server.config import Precision
from attnlens_server.grpc_api.reduced_attention import data_type_number, fill_reduced
from attnlens_server.serving import results
from attnlens_server.serving.jobs import DataType
from attnlens_server.serving.sizes import ReplyCosts
from attnlens_server.serving.spent import Timings
from attnlens_server.text import Tokens

if TYPE_CHECKING:
    from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

TEXT_OVERHEAD_BYTES = 128  # of a message: field tags, lengths, usage, numbers of layers and heads
MAKING_COPIES = 3  # of a reply that is being made: the message, what it is written to, and its bytes
SENDING_COPIES = 2  # of one that is not read yet: its bytes, and gRPC's copy of them


def reply_costs(max_response_bytes: int) -> ReplyCosts:
    """Return what replies take over gRPC."""
    return ReplyCosts(max_response_bytes, TEXT_OVERHEAD_BYTES, tokens_bytes, MAKING_COPIES, SENDING_COPIES)


class Responses:
    """Makes messages that name one model, and what computed it.

    Attributes:
        model: its name.
        version: which bundle of that name.
        fp32_computation: of attention and explanations, whatever embeddings are computed in.
    """

    def __init__(self, model: str, version: str, engine: str, precision: Precision) -> None:
        self.model = model
        self.version = version
        self._computation = pb.Computation(engine=engine, precision=PRECISIONS[precision])
        self.fp32_computation = pb.Computation(engine=engine, precision=PRECISIONS["fp32"])

    def embed(self, result: results.EmbedResult, data_type: DataType) -> bytes:
        """Pack embeddings."""
        response = pb.EmbedResponse(
            model=self.model,
            model_version=self.version,
            embeddings=to_tensor(result.embeddings, data_type_number(data_type)),
            usages=[usage_message(usage) for usage in result.usages],
            timings=timings_message(result.timings),
            computation=self._computation,
        )
        return response.SerializeToString()

    def encode(self, result: results.EncodeResult, data_type: DataType) -> bytes:
        """Pack texts.

        Messages are joined by joining their bytes. So each text is serialized by itself: all of them at once
        would keep every other thread waiting. The list of texts is emptied on the way, so that nothing is in
        memory twice.

        Raises:
            InvalidFieldsError: a value is beyond the range of the chosen element type.
        """
        has_attention = any(text.attention for text in result.texts)
        head = pb.EncodeResponse(
            model=self.model,
            model_version=self.version,
            timings=timings_message(result.timings),
            computation=self._of_texts(has_attention=has_attention),
        )
        serialized = [head.SerializeToString()]
        result.texts.reverse()
        while result.texts:
            part = pb.EncodeResponse()
            _fill_text(part.results.add(), result.texts.pop(), data_type)
            serialized.append(part.SerializeToString())
        return b"".join(serialized)

    def stream_part(self, part: results.StreamText | results.StreamAttention, data_type: DataType) -> bytes:
        """Pack a part of a stream.

        Raises:
            InvalidFieldsError: as `encode`.
        """
        message = pb.EncodeStreamResponse(model=self.model, input_index=part.input_index)
        if isinstance(part, results.StreamText):
            message.model_version = self.version
            message.num_attention_parts = part.num_attention_parts
            message.timings.CopyFrom(timings_message(part.timings))
            message.computation.CopyFrom(self._of_texts(has_attention=part.num_attention_parts > 0))
            _fill_text(message.text, part.text, data_type)
        else:
            _fill_attention(message.attention, part.attention, data_type)
        return message.SerializeToString()

    def _of_texts(self, *, has_attention: bool) -> pb.Computation:
        """Return what computed token vectors: with attention, they come from its graph."""
        return self.fp32_computation if has_attention else self._computation

    def tokenize(self, texts: Iterable[results.TokenizedText]) -> bytes:
        """Pack the tokens of some texts; what `tokenize_head` returns comes before the first ones."""
        response = pb.TokenizeResponse()
        for text in texts:
            fill_tokens(response.results.add(exceeds_max_tokens=text.exceeds_max_tokens).tokens, text.tokens)
        return response.SerializeToString()

    def tokenize_head(self) -> bytes:
        """Pack what a response has beside the texts."""
        return pb.TokenizeResponse(model=self.model, model_version=self.version).SerializeToString()


def tokens_bytes(tokens: Tokens) -> int:
    """Return the bytes of tokens in a message, or a little more."""
    most_bytes = max((end for _, end in tokens.bytes), default=0)
    most_words = max((word for word in tokens.words if word is not None), default=0)
    numbers = ((1, max(tokens.ids, default=0)), (1, most_words), (4, most_bytes))
    widths = sum(times * (1 + _varint_bytes(number)) for times, number in numbers)
    overhead = 3 + 3 + 2  # of the token, its spelling and its source
    return len(tokens.ids) * (overhead + widths) + len("".join(tokens.texts).encode()) + TEXT_OVERHEAD_BYTES


def _varint_bytes(number: int) -> int:
    return max(1, -(-number.bit_length() // 7))


def _fill_text(message: pb.EncodedText, text: results.EncodedText, data_type: DataType) -> None:
    fill_tokens(message.tokens, text.tokens)
    message.usage.CopyFrom(usage_message(text.usage))
    if text.last_hidden_state is not None:
        results.check_range(text.last_hidden_state, data_type)
        fill_tensor(message.last_hidden_state, text.last_hidden_state, data_type_number(data_type))
    for attention in text.attention:
        _fill_attention(message.attention.add(), attention, data_type)


def _fill_attention(
    message: pb.AttentionResult,
    attention: results.AttentionResult | results.ReducedAttention,
    data_type: DataType,
) -> None:
    query = attention.query
    message.query_index = query.index
    message.role = OutputRole.ValueType(query.role)
    message.view = pb.AttentionView.ValueType(query.view)
    message.layers.extend(attention.layers)
    message.heads.extend(query.heads)
    message.row_sum = RowSumNumber.ValueType(query.row_sum)
    if isinstance(attention, results.ReducedAttention):
        fill_reduced(message, attention, data_type)
        return
    tensor = _tensor(message, query.layout)
    if query.row_sum is not RowSum.ONE:  # weights are at most 1
        for array in attention.arrays:
            results.check_range(array, data_type)
    fill_stacked(tensor, attention.arrays, data_type_number(data_type))
    _fill_pattern(message, attention)


def _tensor(message: pb.AttentionResult, layout: Layout) -> Tensor:
    """Return the field for numbers in a layout."""
    match layout:
        case Layout.DENSE:
            return message.dense
        case Layout.BAND:
            return message.band
        case Layout.BLOCKS:
            return message.blocks
    return message.per_token


def _fill_pattern(message: pb.AttentionResult, attention: results.AttentionResult) -> None:
    tables = [pattern for pattern in attention.patterns if isinstance(pattern, BlockTable)]
    bands = [pattern for pattern in attention.patterns if isinstance(pattern, Band)]
    if tables:
        num_tokens = attention.arrays[0].shape[1]
        message.block_pattern.block_size = tables[0].block_size
        key_blocks = [table.at(num_tokens).key_blocks for table in tables]
        fill_stacked(message.block_pattern.key_blocks, key_blocks, DataTypeNumber.DATA_TYPE_INT32)
    elif bands:
        message.band_pattern.window_radius = bands[0].window_radius
        message.band_pattern.num_global_tokens = bands[0].num_global_tokens


def fill_tokens(messages: "RepeatedCompositeFieldContainer[pb.Token]", tokens: Tokens) -> None:
    """Add a message for each token."""
    for token_id, text, source, (char_start, char_end), (byte_start, byte_end), word in zip(
        tokens.ids, tokens.texts, tokens.sources, tokens.chars, tokens.bytes, tokens.words, strict=True
    ):
        messages.add(
            id=token_id,
            text=text,
            source=source,  # the numbers are the same
            char_start=char_start,
            char_end=char_end,
            byte_start=byte_start,
            byte_end=byte_end,
            word_index=word,
        )


def usage_message(usage: results.Usage) -> pb.Usage:
    """Pack how much of a text was used."""
    return pb.Usage(
        num_tokens=usage.num_tokens, num_tokens_total=usage.num_tokens_total, truncated=usage.truncated
    )


def timings_message(timings: Timings) -> pb.Timings:
    """Pack where the time went."""
    return pb.Timings(
        tokenize=_duration(timings.tokenize_s),
        queue=_duration(timings.queue_s),
        compute=_duration(timings.compute_s),
    )


def _duration(seconds: float) -> Duration:
    whole, nanos = divmod(int(seconds * 1e9), 10**9)
    return Duration(seconds=whole, nanos=nanos)
