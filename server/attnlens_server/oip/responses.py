"""Serialization of results to ModelInfer responses.

Shapes: B texts, T tokens of the longest text, H heads, D hidden size, E components of an embedding.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from attnlens.oip import open_inference_pb2 as pb
from attnlens.wire import start_field
from attnlens_server.core.usage import Usage
from attnlens_server.oip.models import (
    ATTENTION_MASK,
    CONTRIBUTIONS,
    EMBEDDING,
    EMBEDDING_ALIAS,
    FP32,
    INT64,
    VERSION,
)
from attnlens_server.oip.requests import InferRequest
from attnlens_server.operations.attention import AttentionResult
from attnlens_server.operations.encode import EncodedText
from attnlens_server.operations.explanations import Explanation

FloatArray = npt.NDArray[np.floating]

NUM_TRUNCATED = "num_truncated"
_RAW_OUTPUT_CONTENTS = pb.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER
_OUTPUTS = pb.ModelInferResponse.OUTPUTS_FIELD_NUMBER
_CONTENTS = pb.ModelInferResponse.InferOutputTensor.CONTENTS_FIELD_NUMBER
_FP32_CONTENTS = pb.InferTensorContents.FP32_CONTENTS_FIELD_NUMBER
_INT64_CONTENTS = pb.InferTensorContents.INT64_CONTENTS_FIELD_NUMBER


class Tensor(NamedTuple):
    """An output tensor, whose rows are not padded yet. FP32 except for the mask, which is INT64."""

    name: str
    rows: Sequence[npt.NDArray[np.generic]] | FloatArray
    shape: tuple[int, ...]

    @property
    def datatype(self) -> str:
        """Data type in the protocol."""
        return INT64 if self.name == ATTENTION_MASK else FP32

    @property
    def nbytes(self) -> int:
        """Size with padding."""
        return prod(self.shape) * (8 if self.datatype == INT64 else 4)

    def elements(self, mask_type: str = "<i8") -> memoryview:
        """Return the elements with zeros as padding."""
        array = np.zeros(self.shape, mask_type if self.datatype == INT64 else "<f4")
        for padded, row in zip(array, self.rows, strict=True):
            padded[tuple(map(slice, row.shape))] = row
        return array.data

    def message(self) -> pb.ModelInferResponse.InferOutputTensor:
        """Return the message without elements."""
        return pb.ModelInferResponse.InferOutputTensor(
            name=self.name, datatype=self.datatype, shape=self.shape
        )


@dataclass(slots=True)
class InferResults:
    """Results of an `InferRequest`. Fields without a request are empty."""

    usages: Sequence[Usage] = ()
    embeddings: Sequence[FloatArray] | FloatArray = ()  # (B, E)
    logits: Sequence[FloatArray] | FloatArray = ()  # (B, C)
    texts: Sequence[EncodedText] = ()
    explanations: Sequence[Explanation] = ()

    @property
    def num_truncated(self) -> int:
        """Number of truncated texts."""
        return sum(usage.truncated for usage in self.usages)

    def tensor(self, name: str, width: int, layer: int | None, logits_name: str = "") -> Tensor:
        """Return an output.

        Args:
            name: Name of the output.
            width: Number of tokens T. If 0, the length of the longest text.
            layer: Layer, if the output is attention weights.
            logits_name: Name of the output with the logits of a classifier. Empty for other models.
        """
        lengths = [usage.num_tokens for usage in self.usages]
        batch, width = len(lengths), width or max(lengths)
        if layer is not None:
            weights = [_weights(text.attention, layer) for text in self.texts]  # each (H, T, T)
            return Tensor(name, weights, (batch, weights[0].shape[0], width, width))
        if name in (EMBEDDING, EMBEDDING_ALIAS):
            return Tensor(name, self.embeddings, (batch, len(self.embeddings[0])))
        if name == logits_name:
            return Tensor(name, self.logits, (batch, len(self.logits[0])))
        if name == ATTENTION_MASK:
            return Tensor(name, [np.ones(length) for length in lengths], (batch, width))
        if name == CONTRIBUTIONS:
            return Tensor(name, [text.scores[0].values for text in self.explanations], (batch, width))
        vectors = [text.last_hidden_state for text in self.texts if text.last_hidden_state is not None]
        return Tensor(name, vectors, (batch, width, vectors[0].shape[1]))


def _weights(results: Iterable[object], layer: int) -> FloatArray:
    return next(
        array
        for result in results
        if isinstance(result, AttentionResult)
        for number, array in zip(result.layers, result.arrays, strict=True)
        if number == layer
    )


def serialize(request: InferRequest, tensors: Sequence[Tensor], num_truncated: int) -> bytes:
    """Return a serialized ModelInferResponse.

    Elements are copied only once, when the chunks are joined: concatenated messages are a valid message.
    """
    head = pb.ModelInferResponse(model_name=request.model, model_version=VERSION, id=request.id)
    if num_truncated:
        head.parameters[NUM_TRUNCATED].int64_param = num_truncated
    chunks: list[bytes | memoryview] = []
    for tensor in tensors:
        message = tensor.message()
        if request.is_raw:
            head.outputs.append(message)
            chunks += [start_field(_RAW_OUTPUT_CONTENTS, tensor.nbytes), tensor.elements()]
            continue
        # Packed fields: floats are little-endian, and 0 and 1 are one byte each.
        number = _FP32_CONTENTS if tensor.datatype == FP32 else _INT64_CONTENTS
        elements = tensor.elements(mask_type="u1")
        packed = start_field(number, elements.nbytes)
        contents = start_field(_CONTENTS, len(packed) + elements.nbytes)
        described = message.SerializeToString() + contents + packed
        chunks += [start_field(_OUTPUTS, len(described) + elements.nbytes), described, elements]
    return b"".join([head.SerializeToString(), *chunks])
