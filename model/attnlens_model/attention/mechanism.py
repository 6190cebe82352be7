"""The interface between an attention mechanism and the encoder.

Each mechanism is a module of this package. It defines a subclass of `AttentionConfig`, which is registered in
`kinds` and builds two kinds of torch modules:

- the layer module, one per layer, maps hidden states to the layer's context and to a dictionary of its other
outputs, keyed by role;
- the shared module runs once per batch and computes the inputs that all layers with the same configuration
  need in addition to hidden states: masks, rotations, biases.

Shape legend: B batch, T tokens, D hidden size, H heads.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NewType

from torch import Tensor, nn

from attnlens.patterns import Band, BlockTable
from attnlens_model.attention.parts.masks import AttentionMask, prepare_mask
from attnlens_model.config_part import ConfigPart
from attnlens_model.errors import ConfigError

OutputRole = NewType("OutputRole", str)
"""Name of a layer output, in snake_case. Mechanisms define additional roles in their own modules."""

ATTENTION_WEIGHTS = OutputRole("attention_weights")
"""Attention weights after the softmax."""

Layout = Literal["dense", "per_token", "band", "blocks"]
"""Axes of an output: "dense" is (B, H, T, T), query by key, and "per_token" is (B, T, H). The rows of "band",
(B, H, T, 2G + 2w + 1), and "blocks", (B, H, T, S * b + 2b), are described in `attnlens.patterns`."""

RowSum = Literal["one", "gate", "unbounded"]
"""Sum of an output over the keys of one query, or over the heads of one token: 1, a gate of the
mechanism, or unbounded."""

Outputs = Mapping[OutputRole, Tensor]
"""Outputs of a layer in addition to its context, by role."""


class AttentionOutput(NamedTuple):
    """Description of one layer output."""

    role: OutputRole
    layout: Layout
    num_heads: int
    row_sum: RowSum
    pattern: Band | BlockTable | None = None
    """Sparsity pattern, for the layouts "band" and "blocks"."""


class EncoderSizes(NamedTuple):
    """Properties of the encoder that a mechanism depends on."""

    hidden_size: int
    max_tokens: int
    is_causal: bool
    hidden_dropout: float
    layer_norm_eps: float


class BatchInputs(NamedTuple):
    """Inputs of a shared module."""

    attention_mask: Tensor
    """(B, T) int64, 1 for tokens and 0 for padding."""
    keep: Tensor
    """(B, 1, 1, T), or (B, 1, T, T) in a causal encoder, floating point: 1 if the query may attend to the
    key, otherwise 0."""


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(ConfigPart, ABC, path="attention"):
    """Base class for the configuration of a mechanism.

    Attributes:
        kind: Name of the mechanism in `attnlens_model.attention.kinds`.
        num_heads: Number of heads H.
        dropout: Dropout probability of attention weights during training.
    """

    kind: str
    num_heads: int
    dropout: float = 0.1

    def _check(self) -> None:
        self.require("num_heads", self.num_heads >= 1, "must be at least 1")
        self.require("dropout", 0 <= self.dropout < 1, "must be at least 0 and less than 1")

    def check_sizes(self, sizes: EncoderSizes) -> None:
        """Validate the configuration against the encoder.

        By default, `num_heads` must divide the hidden size.

        Raises:
            ConfigError: The mechanism does not fit the encoder.
        """
        if sizes.hidden_size % self.num_heads:
            candidates = range(1, sizes.hidden_size + 1)
            divisors = [heads for heads in candidates if sizes.hidden_size % heads == 0]
            nearest = min(divisors, key=lambda heads: abs(heads - self.num_heads))
            raise ConfigError(
                f"{self.path}.num_heads={self.num_heads} does not divide hidden_size={sizes.hidden_size}: "
                f"the nearest divisor is {nearest}"
            )

    def head_dim(self, hidden_size: int) -> int:
        """Return K, the size of one head."""
        return hidden_size // self.num_heads

    @property
    def num_shared_heads(self) -> int:
        """Number of key-value heads."""
        return self.num_heads

    @property
    def reach(self) -> int | None:
        """Maximum distance in tokens between a query and its keys. None if unlimited."""
        return None

    @property
    def edges(self) -> tuple[int, ...]:
        """Input lengths at which the computation changes, such as a window size.

        The parity check includes inputs of each of these lengths, and inputs that are one token longer.
        """
        return ()

    @property
    def operators(self) -> frozenset[str]:
        """ONNX operators that the modules use in addition to those of BERT.

        The exporter rejects all other operators.
        """
        return frozenset()

    def outputs(self) -> tuple[AttentionOutput, ...]:
        """Return the outputs of a layer, in order. By default, the attention weights of all heads."""
        return (AttentionOutput(ATTENTION_WEIGHTS, "dense", self.num_heads, "one"),)

    @abstractmethod
    def make_layer(self, sizes: EncoderSizes) -> nn.Module:
        """Return a randomly initialized layer module.

        Its `forward` takes hidden states (B, T, D) followed by the elements of the shared module's result,
        and returns the context (B, T, D) and the `Outputs`.
        """

    def make_shared(self, sizes: EncoderSizes) -> nn.Module:  # noqa: ARG002 - overrides use it
        """Return the shared module. By default, it prepares the attention mask.

        Its `forward` takes `BatchInputs` and returns a tuple of layer inputs.
        """
        return SharedMask()


class SizedHeadsConfig(AttentionConfig):
    """Base class for mechanisms whose heads may have any size, share keys and values, and have a window.

    Subclasses define the fields.
    """

    head_size: int | None
    num_key_value_heads: int | None
    window: int | None

    def head_dim(self, hidden_size: int) -> int:
        """Return K, the size of one head."""
        return self.head_size or hidden_size // self.num_heads

    @property
    def num_shared_heads(self) -> int:
        """Number of key-value heads."""
        return self.num_key_value_heads or self.num_heads

    @property
    def reach(self) -> int | None:
        """Maximum distance in tokens between a query and its keys. None if unlimited."""
        return self.window


class ChoosingModule(nn.Module, ABC):
    """Base class for modules, such as head routers, that make a discrete choice by comparing numbers.

    If the compared numbers are nearly equal, rounding decides, and two correct runtimes may return entirely
    different results. The parity check therefore excludes texts with such near-ties.
    """

    @abstractmethod
    def margins(self, output: Any) -> Tensor:  # noqa: ANN401 - any result of `forward`
        """Return the margin (B, T) between the chosen and the next-best option. Typical values are about 1.

        Args:
            output: The result of `forward`.
        """


class SharedMask(nn.Module):
    """Prepares the padding mask, combined with the causal mask in a causal encoder."""

    def forward(self, inputs: BatchInputs) -> tuple[AttentionMask]:
        """Return the mask, broadcastable to (B, H, T, T)."""
        return (prepare_mask(inputs.keep, inputs.keep.dtype),)
