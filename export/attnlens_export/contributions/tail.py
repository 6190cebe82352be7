"""Pooling, dense layers and the explained target, with the gradient at which the sweep starts.

    pooled    = sum over t of weight[t] h[t], or the maximum over tokens
    p         = dense(pooled), truncated to the first components
    direction = input `direction` + input `towards_itself` * p / |p|
    target    = direction . p / |p|

B batch, T tokens, D hidden size, E embedding size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attnlens.v1.manifest_pb2 import Activation
from attnlens_export.contributions.writer import GraphWriter
from attnlens_export.graph.names import (
    BATCH_AXIS,
    DIRECTION,
    EMBEDDING_OUTPUT,
    HIDDEN_OUTPUT,
    LENGTH_AXIS,
    NUM_DIMENSIONS,
    POOLING_WEIGHTS,
    TAKES_MAXIMUM,
    TOWARDS_ITSELF,
)

# Exact in fp16 and bf16, and far larger than any hidden state, so that excluded tokens are never the maximum.
_BELOW_ALL = 2.0**15
_TINY = 1e-24

Weight = npt.NDArray[np.float32]


@dataclass(frozen=True)
class DenseWeights:
    """Dense layer between pooling and embedding: y = activation(W x + b).

    Attributes:
        weight: W, (O, I).
        bias: b, (O,), or None.
        activation: Elementwise activation.
        normalize_input: Whether x is normalized to unit length first.
        norm: Weight (O,) and bias (O,) of a layer normalization of y, or None.
        norm_epsilon: Its epsilon.
    """

    weight: Weight
    bias: Weight | None
    activation: Activation.ValueType
    normalize_input: bool
    norm: tuple[Weight, Weight] | None = None
    norm_epsilon: float = 0.0


def add_pooling(writer: GraphWriter) -> str:
    """Pool the last hidden states and return the name of the result (B, D)."""
    weights, hidden = POOLING_WEIGHTS, HIDDEN_OUTPUT
    _, num_tokens, width = writer.shape(hidden)
    if num_tokens == 1:
        return _weigh(writer, writer.reshape(hidden, [0, int(width)], (BATCH_AXIS, width)))
    tokens, rows = (BATCH_AXIS, LENGTH_AXIS, 1), (BATCH_AXIS, LENGTH_AXIS, width)
    one, last = writer.constant(1.0), writer.constant([2])
    weights = writer.add("Unsqueeze", weights, last, shape=tokens)
    counts = writer.add("Sign", weights, shape=tokens)
    below = writer.add("Sub", counts, one, shape=tokens)
    below = writer.add("Mul", below, writer.constant(_BELOW_ALL), shape=tokens)
    candidates = writer.add("Add", hidden, below, shape=rows)
    maximum = writer.add("ReduceMax", candidates, axes=[1], keepdims=1, shape=(BATCH_AXIS, 1, width))
    # 1 at the maximum, divided among equal maxima.
    distance = writer.add("Sign", writer.add("Sub", maximum, candidates, shape=rows), shape=rows)
    is_maximum = writer.add("Sub", one, distance, shape=rows)
    is_maximum = writer.add("Mul", is_maximum, counts, shape=rows)
    number = writer.sum(is_maximum, [1], keepdims=True)
    none = writer.add(
        "Sub", one, writer.add("Sign", number, shape=writer.shape(number)), shape=writer.shape(number)
    )
    share = writer.add(
        "Div", is_maximum, writer.add("Add", number, none, shape=writer.shape(number)), shape=rows
    )
    takes = writer.add("Unsqueeze", TAKES_MAXIMUM, writer.constant([1, 2]), shape=(BATCH_AXIS, 1, 1))
    means = writer.add("Sub", one, takes, shape=(BATCH_AXIS, 1, 1))
    weights = writer.add("Mul", weights, means, shape=tokens)
    weights = writer.add("Add", writer.add("Mul", share, takes, shape=rows), weights, shape=rows)
    return writer.sum(writer.add("Mul", weights, hidden, shape=rows), [1])


def _weigh(writer: GraphWriter, vector: str) -> str:
    """Multiply the only token vector (B, D) by its weight, which counts as 1 for the maximum.

    The weight is 0 for a text without tokens, so its padding has no contributions.
    """
    column = (BATCH_AXIS, 1)
    weight = writer.add("ReduceSum", POOLING_WEIGHTS, writer.constant([1]), keepdims=1, shape=column)
    takes = writer.add("Unsqueeze", TAKES_MAXIMUM, writer.constant([1]), shape=column)
    change = writer.add("Sub", writer.add("Sign", weight, shape=column), weight, shape=column)
    weight = writer.add("Add", weight, writer.add("Mul", change, takes, shape=column), shape=column)
    return writer.add("Mul", vector, weight, shape=writer.shape(vector))


def add_dense(writer: GraphWriter, pooled: str, layers: Sequence[DenseWeights]) -> str:
    """Apply dense layers to pooled vectors and return the name of the result (B, E)."""
    for number, layer in enumerate(layers):
        outputs, inputs = layer.weight.shape
        if layer.normalize_input:
            pooled = writer.add("Div", pooled, _length(writer, pooled), shape=(BATCH_AXIS, inputs))
        weight = writer.constant(np.ascontiguousarray(layer.weight.T), name=f"dense.{number}.weight.T")
        shape = (BATCH_AXIS, outputs)
        pooled = writer.add("MatMul", pooled, weight, shape=shape)
        if layer.bias is not None:
            pooled = writer.add(
                "Add", pooled, writer.constant(layer.bias, name=f"dense.{number}.bias"), shape=shape
            )
        pooled = _activate(writer, pooled, layer.activation)
        if layer.norm is not None:
            scale, shift = (
                writer.constant(array, name=f"dense.{number}.norm.{name}")
                for name, array in zip(("weight", "bias"), layer.norm, strict=True)
            )
            pooled = writer.add(
                "LayerNormalization", pooled, scale, shift, axis=-1, epsilon=layer.norm_epsilon, shape=shape
            )
    return pooled


def add_target(writer: GraphWriter, vector: str) -> str:
    """Add the embedding as an output and return the name of the gradient of the target (B, E)."""
    shape = writer.shape(vector)
    column = (BATCH_AXIS, 1)
    numbers = writer.constant(np.arange(int(shape[-1]), dtype=np.float32))
    count = writer.add("Cast", NUM_DIMENSIONS, to=1, shape=(BATCH_AXIS,))
    count = writer.add("Unsqueeze", count, writer.constant([1]), shape=column)
    beyond = writer.add("Sub", count, numbers, shape=shape)
    kept = writer.add("Clip", beyond, writer.constant(0.0), writer.constant(1.0), shape=shape)
    cut = writer.add("Mul", vector, kept, name=EMBEDDING_OUTPUT, shape=shape)
    length = _length(writer, cut)
    itself = writer.add("Unsqueeze", TOWARDS_ITSELF, writer.constant([1]), shape=column)
    unit = writer.add("Div", cut, length, shape=shape)
    direction = writer.add("Add", DIRECTION, writer.add("Mul", unit, itself, shape=shape), shape=shape)
    direction = writer.add("Mul", direction, kept, shape=shape)
    return writer.add("Div", direction, length, shape=shape)


def _length(writer: GraphWriter, vector: str) -> str:
    """Return the name of the Euclidean norm: (B, N) -> (B, 1)."""
    squares = writer.add("Mul", vector, vector, shape=writer.shape(vector))
    summed = writer.sum(squares, [1], keepdims=True)
    summed = writer.add("Add", summed, writer.constant(_TINY), shape=writer.shape(summed))
    return writer.add("Sqrt", summed, shape=writer.shape(summed))


def _activate(  # noqa: PLR0911 - one for each activation
    writer: GraphWriter, value: str, activation: Activation.ValueType
) -> str:
    """Apply an activation, written as a product of its input and a ratio that the sweep holds constant.

    A sigmoid is 1/2 + tanh(x / 2) / 2. The constant is part of the baseline.
    """
    shape = writer.shape(value)
    half, one = writer.constant(0.5), writer.constant(1.0)
    match activation:
        case Activation.ACTIVATION_TANH:
            return writer.add("Tanh", value, shape=shape)
        case Activation.ACTIVATION_RELU:
            return writer.add("Relu", value, shape=shape)
        case Activation.ACTIVATION_GELU:
            scaled = writer.add("Mul", value, writer.constant(0.5**0.5), shape=shape)
            grown = writer.add("Add", writer.add("Erf", scaled, shape=shape), one, shape=shape)
            return writer.add("Mul", writer.add("Mul", value, half, shape=shape), grown, shape=shape)
        case Activation.ACTIVATION_GELU_TANH:
            cube = writer.add("Mul", writer.add("Mul", value, value, shape=shape), value, shape=shape)
            cube = writer.add("Mul", cube, writer.constant(0.044715), shape=shape)
            inner = writer.add("Add", value, cube, shape=shape)
            inner = writer.add("Mul", inner, writer.constant((2 / np.pi) ** 0.5), shape=shape)
            grown = writer.add("Add", writer.add("Tanh", inner, shape=shape), one, shape=shape)
            return writer.add("Mul", writer.add("Mul", value, half, shape=shape), grown, shape=shape)
        case Activation.ACTIVATION_SILU:
            return writer.add("Mul", value, writer.add("Sigmoid", value, shape=shape), shape=shape)
        case Activation.ACTIVATION_SIGMOID:
            bent = writer.add("Tanh", writer.add("Mul", value, half, shape=shape), shape=shape)
            return writer.add("Add", writer.add("Mul", bent, half, shape=shape), half, shape=shape)
    return value
