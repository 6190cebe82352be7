"""Conversion of results to serialized response messages."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from google.protobuf.duration_pb2 import Duration

from attnlens.patterns import Band, BlockTable
from attnlens.pooling import FloatArray
from attnlens.reductions import RowStatistics, SparseWeights, TopKWeights
from attnlens.tensors import fill_stacked, fill_tensor
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1 import explanation_pb2
from attnlens.v1.manifest_pb2 import Activation, OutputRole
from attnlens.v1.manifest_pb2 import RowSum as RowSumNumber
from attnlens.v1.manifest_pb2 import Similarity as SimilarityNumber
from attnlens.v1.tensor_pb2 import DataType as DataTypeNumber
from attnlens.v1.tensor_pb2 import Tensor
from attnlens_server.bundle import Layout, RowSum
from attnlens_server.bundle.manifest import PRECISIONS
from attnlens_server.config import Precision
from attnlens_server.core.reply_costs import ReplyCosts
from attnlens_server.core.usage import Timings, Usage
from attnlens_server.operations.attention import AttentionResult, ReducedAttention
from attnlens_server.operations.classify import ClassifyResult
from attnlens_server.operations.compare import CompareResult, PairMatrixResult
from attnlens_server.operations.embed import EmbedResult
from attnlens_server.operations.encode import EncodedText, EncodeResult
from attnlens_server.operations.encode_stream import StreamAttention, StreamText
from attnlens_server.operations.explain import ExplainResult
from attnlens_server.operations.explanations import Explanation
from attnlens_server.operations.score import ScoreResult
from attnlens_server.operations.tokenize import TokenizedText
from attnlens_server.operations.values import FLOAT16, DataType, check_range
from attnlens_server.text import Tokens

if TYPE_CHECKING:
    from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

_Fill: TypeAlias = Callable[[Tensor, Sequence[FloatArray]], None]

TEXT_OVERHEAD_BYTES = 128  # field tags, lengths, usage, layer and head numbers
SERIALIZATION_COPIES = 3  # the message, the serialization buffer, and the bytes
SENDING_COPIES = 2  # the bytes and gRPC's copy
_EMBEDDING_DATA_TYPES = {
    np.dtype(np.float32): DataTypeNumber.DATA_TYPE_FLOAT32,
    np.dtype(np.float16): DataTypeNumber.DATA_TYPE_FLOAT16,
    np.dtype(np.int8): DataTypeNumber.DATA_TYPE_INT8,
    np.dtype(np.uint8): DataTypeNumber.DATA_TYPE_UINT8,
}


def reply_costs(max_response_bytes: int) -> ReplyCosts:
    """Return the memory costs of replies over gRPC."""
    return ReplyCosts(
        max_response_bytes, TEXT_OVERHEAD_BYTES, tokens_bytes, SERIALIZATION_COPIES, SENDING_COPIES
    )


def tokens_bytes(tokens: Tokens) -> int:
    """Return an upper bound on the serialized size of tokens, in bytes."""
    max_byte_offset = max((end for _, end in tokens.bytes), default=0)
    max_word = max((word for word in tokens.words if word is not None), default=0)
    fields = ((1, max(tokens.ids, default=0)), (1, max_word), (4, max_byte_offset))
    widths = sum(count * (1 + _varint_bytes(number)) for count, number in fields)
    overhead = 3 + 3 + 2  # tags and lengths of the token and its text, and the source
    return len(tokens.ids) * (overhead + widths) + len("".join(tokens.texts).encode()) + TEXT_OVERHEAD_BYTES


def _varint_bytes(number: int) -> int:
    return max(1, -(-number.bit_length() // 7))


class Responses:
    """Serializes the results of one model.

    Args:
        model: Model name.
        version: Model version.
        engine: Name of the runtime.
        precision: Precision of embeddings, or of the logits of a classifier. Other results are in fp32.
        is_classifier: Whether the model is a classifier.
    """

    def __init__(
        self, model: str, version: str, engine: str, precision: Precision, *, is_classifier: bool = False
    ) -> None:
        self._model = model
        self._version = version
        self._is_classifier = is_classifier
        self._computation = pb.Computation(engine=engine, precision=PRECISIONS[precision])
        self._fp32_computation = pb.Computation(engine=engine, precision=PRECISIONS["fp32"])
        self._embed_head = pb.EmbedResponse(
            model=model, model_version=version, computation=self._computation
        ).SerializeToString()

    def embed(self, result: EmbedResult) -> bytes:
        """Serialize an EmbedResponse."""
        response = pb.EmbedResponse()
        fill_tensor(response.embeddings, result.embeddings, _EMBEDDING_DATA_TYPES[result.embeddings.dtype])
        for usage in result.usages:
            _fill_usage(response.usages.add(), usage)
        _fill_timings(response.timings, result.timings)
        if result.ranges is not None:
            fill_tensor(response.ranges, result.ranges, DataTypeNumber.DATA_TYPE_FLOAT32)
        return self._embed_head + response.SerializeToString()  # concatenated messages are a valid message

    def score(self, result: ScoreResult) -> bytes:
        """Serialize a ScoreResponse."""
        response = pb.ScoreResponse(
            model=self._model,
            model_version=self._version,
            activation=Activation.ValueType(result.activation),
            computation=self._computation,
        )
        for usage in result.usages:
            _fill_usage(response.usages.add(), usage)
        _fill_timings(response.timings, result.timings)
        for score in result.scores:
            message = response.results.add(
                index=score.index,
                score=score.score,
                logit=score.logit,
                num_parts=score.num_parts,
                part=score.part,
            )
            if score.explanation is not None:
                _fill_explanation(message.explanation, score.explanation)
        return response.SerializeToString()

    def classify(self, result: ClassifyResult) -> bytes:
        """Serialize a ClassifyResponse."""
        response = pb.ClassifyResponse(
            model=self._model,
            model_version=self._version,
            labels=result.labels,
            activation=Activation.ValueType(result.activation),
            computation=self._computation,
        )
        fill_tensor(response.logits, result.logits, DataTypeNumber.DATA_TYPE_FLOAT32)
        fill_tensor(response.scores, result.scores, DataTypeNumber.DATA_TYPE_FLOAT32)
        for usage in result.usages:
            _fill_usage(response.usages.add(), usage)
        _fill_timings(response.timings, result.timings)
        return response.SerializeToString()

    def encode(self, result: EncodeResult, data_type: DataType) -> bytes:
        """Serialize an EncodeResponse.

        Texts are removed from `result.texts` once they are serialized, to free memory early.

        Each text is serialized on its own, since serialization does not release the GIL. Concatenated
        messages are a valid message.

        Raises:
            InvalidFieldsError: A value exceeds the range of `data_type`.
        """
        has_attention = any(text.attention for text in result.texts)
        head = pb.EncodeResponse(
            model=self._model,
            model_version=self._version,
            computation=self._encode_computation(has_attention=has_attention),
        )
        _fill_timings(head.timings, result.timings)
        serialized = [head.SerializeToString()]
        result.texts.reverse()
        while result.texts:
            part = pb.EncodeResponse()
            _fill_text(part.results.add(), result.texts.pop(), data_type)
            serialized.append(part.SerializeToString())
        return b"".join(serialized)

    def stream_part(self, part: StreamText | StreamAttention, data_type: DataType) -> bytes:
        """Serialize an EncodeStreamResponse.

        Raises:
            InvalidFieldsError: A value exceeds the range of `data_type`.
        """
        message = pb.EncodeStreamResponse(model=self._model, input_index=part.input_index)
        if isinstance(part, StreamText):
            message.model_version = self._version
            message.num_attention_parts = part.num_attention_parts
            _fill_timings(message.timings, part.timings)
            message.computation.CopyFrom(self._encode_computation(has_attention=part.num_attention_parts > 0))
            _fill_text(message.text, part.text, data_type)
        else:
            _fill_attention(message.attention, part.attention, data_type)
        return message.SerializeToString()

    def _encode_computation(self, *, has_attention: bool) -> pb.Computation:
        """Return how token vectors were computed: by a graph in fp32 with attention and for classifiers."""
        return self._fp32_computation if has_attention or self._is_classifier else self._computation

    def tokenize_head(self) -> bytes:
        """Serialize the fields of a TokenizeResponse other than `results`."""
        return pb.TokenizeResponse(model=self._model, model_version=self._version).SerializeToString()

    def tokenize(self, texts: Iterable[TokenizedText]) -> bytes:
        """Serialize `results` of a TokenizeResponse, to be appended to `tokenize_head()`."""
        response = pb.TokenizeResponse()
        for text in texts:
            _fill_tokens(response.results.add(exceeds_max_tokens=text.exceeds_max_tokens).tokens, text.tokens)
        return response.SerializeToString()

    def explain(self, result: ExplainResult) -> bytes:
        """Serialize an ExplainResponse."""
        message = pb.ExplainResponse(
            model=self._model,
            model_version=self._version,
            computation=self._fp32_computation,
        )
        _fill_timings(message.timings, result.timings)
        for text in result.texts:
            _fill_explanation(message.results.add(), text)
        return message.SerializeToString()

    def compare(self, result: CompareResult) -> bytes:
        """Serialize a CompareResponse."""
        message = pb.CompareResponse(
            model=self._model,
            model_version=self._version,
            computation=self._fp32_computation,
            similarity=SimilarityNumber.ValueType(result.similarity),
        )
        _fill_timings(message.timings, result.timings)
        for pair in result.pairs:
            comparison = message.results.add(similarity=pair.similarity)
            _fill_explanation(comparison.a, pair.a)
            _fill_explanation(comparison.b, pair.b)
            if pair.matrix is not None:
                _fill_pair_matrix(comparison, pair.matrix)
        return message.SerializeToString()


def _fill_text(message: pb.EncodedText, text: EncodedText, data_type: DataType) -> None:
    _fill_tokens(message.tokens, text.tokens)
    _fill_usage(message.usage, text.usage)
    if text.last_hidden_state is not None:
        check_range(text.last_hidden_state, data_type)
        fill_tensor(message.last_hidden_state, text.last_hidden_state, _data_type_number(data_type))
    for attention in text.attention:
        _fill_attention(message.attention.add(), attention, data_type)


def _fill_attention(
    message: pb.AttentionResult,
    attention: AttentionResult | ReducedAttention,
    data_type: DataType,
) -> None:
    query = attention.query
    message.query_index = query.index
    message.role = OutputRole.ValueType(query.role)
    message.view = pb.AttentionView.ValueType(query.view)
    message.layers.extend(attention.layers)
    message.heads.extend(query.heads)
    message.row_sum = RowSumNumber.ValueType(query.row_sum)

    def fill(tensor: Tensor, arrays: Sequence[FloatArray]) -> None:
        # Weights in rows that sum to 1 are at most 1, and sums of them at most T, within the range of fp16.
        if query.row_sum is not RowSum.ONE:
            for array in arrays:
                check_range(array, data_type)
        fill_stacked(tensor, arrays, _data_type_number(data_type))

    if isinstance(attention, ReducedAttention):
        _fill_reduced(message, attention, fill)
    else:
        fill(_attention_tensor(message, query.layout), attention.arrays)
        _fill_pattern(message, attention)


def _attention_tensor(message: pb.AttentionResult, layout: Layout) -> Tensor:
    match layout:
        case Layout.DENSE:
            return message.dense
        case Layout.BAND:
            return message.band
        case Layout.BLOCKS:
            return message.blocks
    return message.per_token


def _fill_pattern(message: pb.AttentionResult, attention: AttentionResult) -> None:
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


def _fill_reduced(message: pb.AttentionResult, attention: ReducedAttention, fill: _Fill) -> None:
    parts = [part.data for part in attention.parts]  # all parts have the same form
    if top_k := [part for part in parts if isinstance(part, TopKWeights)]:
        _fill_top_k(message.top_k, top_k, fill)
    elif sparse := [part for part in parts if isinstance(part, SparseWeights)]:
        _fill_sparse(message.sparse, SparseWeights.joined(sparse), fill)
    elif statistics := [part for part in parts if isinstance(part, RowStatistics)]:
        _fill_statistics(message.statistics, statistics, fill)
    elif maps := [part for part in parts if isinstance(part, np.ndarray)]:
        if maps[0].dtype == np.uint8:
            fill_stacked(message.sqrt_uint8, maps, DataTypeNumber.DATA_TYPE_UINT8)
        else:
            fill(message.dense, [np.asarray(each, np.float32) for each in maps])
    if (unit_ids := attention.parts[0].unit_ids) is not None:  # the same in all parts
        message.unit_ids.extend(unit_ids.tolist())
    masses = [part.special_token_mass for part in attention.parts if part.special_token_mass is not None]
    if masses:
        fill(message.special_token_mass, masses)


def _fill_top_k(message: pb.TopKWeights, parts: Sequence[TopKWeights], fill: _Fill) -> None:
    fill_stacked(message.indices, [part.indices for part in parts], DataTypeNumber.DATA_TYPE_INT32)
    fill(message.values, [part.values for part in parts])
    fill(message.remaining_mass, [part.remaining_mass for part in parts])


def _fill_sparse(message: pb.SparseWeights, rows: SparseWeights, fill: _Fill) -> None:
    fill_tensor(message.indptr, rows.indptr, DataTypeNumber.DATA_TYPE_INT32)
    fill_tensor(message.indices, rows.indices, DataTypeNumber.DATA_TYPE_INT32)
    fill(message.values, [rows.values])
    message.values.shape[:] = rows.values.shape  # without the axis of stacked layers
    fill(message.kept_mass, list(rows.kept_mass))


def _fill_statistics(message: pb.AttentionStatistics, parts: Sequence[RowStatistics], fill: _Fill) -> None:
    if received := [part.received for part in parts if part.received is not None]:
        fill(message.received, received)
    if entropy := [part.entropy for part in parts if part.entropy is not None]:
        fill(message.entropy, entropy)


def _fill_explanation(message: pb.Explanation, text: Explanation) -> None:
    _fill_tokens(message.tokens, text.tokens)
    _fill_usage(message.usage, text.usage)
    message.unit_ids.extend(text.unit_ids)
    message.target_value = text.target_value
    for scores in text.scores:
        token_scores = message.scores.add(
            method=explanation_pb2.ExplainMethod.ValueType(scores.method),
            baseline=scores.baseline,
            sum=scores.sum,
            expected_sum=scores.expected_sum,
            faithfulness=scores.faithfulness,
        )
        fill_tensor(token_scores.values, scores.values, DataTypeNumber.DATA_TYPE_FLOAT32)
    if text.head_contributions is not None:
        fill_tensor(message.head_contributions, text.head_contributions, DataTypeNumber.DATA_TYPE_FLOAT32)
    if text.sums_by_source is not None:
        message.sums_by_source.CopyFrom(pb.SourceSums(**asdict(text.sums_by_source)))


def _fill_pair_matrix(message: pb.Comparison, matrix: PairMatrixResult) -> None:
    fill_tensor(message.matrix, matrix.values, DataTypeNumber.DATA_TYPE_FLOAT32)
    if matrix.baseline_row is not None and matrix.baseline_column is not None:
        fill_tensor(message.baseline_row, matrix.baseline_row, DataTypeNumber.DATA_TYPE_FLOAT32)
        fill_tensor(message.baseline_column, matrix.baseline_column, DataTypeNumber.DATA_TYPE_FLOAT32)
    if matrix.baseline is not None:
        message.baseline = matrix.baseline


def _fill_tokens(messages: "RepeatedCompositeFieldContainer[pb.Token]", tokens: Tokens) -> None:
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


def _data_type_number(data_type: DataType) -> DataTypeNumber.ValueType:
    return DataTypeNumber.DATA_TYPE_FLOAT16 if data_type == FLOAT16 else DataTypeNumber.DATA_TYPE_FLOAT32


def _fill_usage(message: pb.Usage, usage: Usage) -> None:
    message.num_tokens = usage.num_tokens
    message.num_tokens_total = usage.num_tokens_total
    message.truncated = usage.truncated


def _fill_timings(message: pb.Timings, timings: Timings) -> None:
    _fill_duration(message.tokenize, timings.tokenize_s)
    _fill_duration(message.queue, timings.queue_s)
    _fill_duration(message.compute, timings.compute_s)


def _fill_duration(message: Duration, seconds: float) -> None:
    message.seconds, message.nanos = divmod(int(seconds * 1e9), 10**9)
