"""What an attention mechanism is to the encoder: a configuration that makes its modules.

A mechanism is a module of this package with a subclass of `AttentionConfig`, and a line in `kinds`. Its parts
are of two kinds. A layer's own module turns the hidden states into the layer's context and outputs by role. A
module that layers of equal configuration share computes, once for each batch, what these need beside the
hidden states: masks, rotations, biases.

Letters in shapes: B batch, T tokens, D width, H heads.
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
"""What a layer's output is, in lower case with underscores. A mechanism names further roles beside itself."""

ATTENTION_WEIGHTS = OutputRole("attention_weights")
"""Weights after softmax: what each token takes from each."""

Layout = Literal["dense", "per_token", "band", "blocks"]
"""The axes of an output: (B, H, T, T), query by key; (B, T, H); or rows as `attnlens.patterns` has them, of
a band (B, H, T, 2G + 2w + 1) or of blocks (B, H, T, S * b + 2b)."""

RowSum = Literal["one", "gate", "unbounded"]
"""What the numbers of one query (or token) sum to: 1; a gate of the mechanism; anything, of either sign."""

Outputs = Mapping[OutputRole, Tensor]
"""What a layer returns beside its context."""


class AttentionOutput(NamedTuple):
    """The description of one output of a layer."""

    role: OutputRole
    layout: Layout
    num_heads: int
    row_sum: RowSum
    pattern: Band | BlockTable | None = None
    """Of a band, or of blocks."""


class EncoderSizes(NamedTuple):
    """What a mechanism must know of the encoder around it."""

    hidden_size: int
    max_tokens: int
    is_causal: bool
    hidden_dropout: float
    layer_norm_eps: float


class BatchInputs(NamedTuple):
    """What the encoder was given, as modules that layers share need it."""

    attention_mask: Tensor
    """(B, T) int64, 1 for a token and 0 for padding."""
    keep: Tensor
    """(B, 1, 1, T), or (B, 1, T, T) in a causal encoder: 1 where a query may attend to a key, else 0."""


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(ConfigPart, ABC, path="attention"):
    """Base of the configurations of all mechanisms.

    Attributes:
        kind: the mechanism; its name in `attnlens_model.attention.kinds`.
        num_heads: H.
        dropout: probability of dropping an attention weight, in training.
    """

    kind: str
    num_heads: int
    dropout: float = 0.1

    def _check(self) -> None:
        self.require("num_heads", self.num_heads >= 1, "must be at least 1")
        self.require("dropout", 0 <= self.dropout < 1, "must be at least 0 and less than 1")

    def check_sizes(self, sizes: EncoderSizes) -> None:
        """Check what depends on the encoder: by default, that heads divide its width.

        Raises:
            ConfigError: the mechanism does not fit.
        """
        if sizes.hidden_size % self.num_heads:
            widths = range(1, sizes.hidden_size + 1)
            divisors = [heads for heads in widths if sizes.hidden_size % heads == 0]
            closest = min(divisors, key=lambda heads: abs(heads - self.num_heads))
            raise ConfigError(
                f"{self.path}.num_heads={self.num_heads} does not divide hidden_size={sizes.hidden_size}: "
                f"the nearest that does is {closest}"
            )

    def head_dim(self, hidden_size: int) -> int:
        """Return K, the width of one head."""
        return hidden_size // self.num_heads

    @property
    def num_shared_heads(self) -> int:
        """How many heads keys and values have."""
        return self.num_heads

    @property
    def reach(self) -> int | None:
        """How many places away a token sees a key at most; None: as far as there are keys."""
        return None

    @property
    def edges(self) -> tuple[int, ...]:
        """Lengths at which its computation changes, such as a window's: parity looks there, and 1 beyond."""
        return ()

    @property
    def operators(self) -> frozenset[str]:
        """The operators of ONNX that the modules need beside those of BERT; the exporter refuses others."""
        return frozenset()

    def outputs(self) -> tuple[AttentionOutput, ...]:
        """Return what a layer returns, in order: by default the weights of all heads."""
        return (AttentionOutput(ATTENTION_WEIGHTS, "dense", self.num_heads, "one"),)

    @abstractmethod
    def make_layer(self, sizes: EncoderSizes) -> nn.Module:
        """Return a fresh module of one layer.

        Its `forward` takes hidden states (B, T, D) and then what the shared module returns, and returns the
        context (B, T, D) and the `Outputs`.
        """

    def make_shared(self, sizes: EncoderSizes) -> nn.Module:  # noqa: ARG002 - others need them
        """Return the module that layers of this configuration share: by default it prepares the mask alone.

        Its `forward` takes `BatchInputs` and returns the tuple of what each layer needs beside hidden states.
        """
        return SharedMask()


class ChoosingModule(nn.Module, ABC):
    """A module that decides between whole things by comparing numbers, as a router does between heads.

    Where two numbers are nearly equal, rounding decides: two exact programs may choose differently, and what
    follows differs altogether. Parity compares texts in which nothing is so close.
    """

    @abstractmethod
    def margins(self, output: Any) -> Tensor:  # noqa: ANN401 - whatever `forward` returns
        """Return how far apart the chosen and the next are, (B, T), on a scale of about 1.

        `output` is what `forward` has returned.
        """


class SharedMask(nn.Module):
    """The mask of padding, and of what comes later in a causal encoder, in the forms that attention needs."""

    def forward(self, inputs: BatchInputs) -> tuple[AttentionMask]:
        """Return the mask, broadcastable to (B, H, T, T)."""
        return (prepare_mask(inputs.keep, inputs.keep.dtype),)
