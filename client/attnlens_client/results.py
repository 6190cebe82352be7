"""What calls return.

Letters: N texts, T tokens of a text, D hidden size, L' and H' the chosen layers and heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Token:
    """A token and where it stands in its text.

    Attributes:
        id: its number in the vocabulary.
        text: the tokenizer's own spelling, for instance `##ing`.
        byte_start, byte_end: the bytes of the UTF-8 text that it stands for; 0, 0 for special tokens.
        char_start, char_end: the same in characters, so that `text[char_start:char_end]` is its source.
        word_index: the number of its word. None for special tokens and for inputs given as ids.
        is_special: True for tokens that the model needs and the text does not hold, like `[CLS]`.
    """

    id: int
    text: str
    byte_start: int
    byte_end: int
    char_start: int
    char_end: int
    word_index: int | None
    is_special: bool


@dataclass(frozen=True, slots=True)
class Usage:
    """How much of a text was used: tokens seen, tokens before truncation, special tokens included."""

    num_tokens: int
    num_tokens_total: int
    truncated: bool


@dataclass(frozen=True, slots=True, eq=False)
class Embeddings:
    """Vectors (N, D) and how much of each text they stand for."""

    vectors: Array
    usages: tuple[Usage, ...]


@dataclass(frozen=True, slots=True, eq=False)
class EncodedText:
    """The result of one text. The arrays are read-only; `.copy()` gives one to change.

    Attributes:
        tokens: the T tokens that the model saw.
        hidden_states: shape (T, D), the token vectors of the last layer. None where not asked for.
        attentions: shape (L', H', T, T), weights after the softmax: [l, h, i, j] is how much token i
            draws from token j, and each row sums to 1. None where not asked for.
        layers: the layer number of each entry of axis 0, from 0.
        heads: the head number of each entry of axis 1, from 0; with `head_reduction="mean"` the heads
            that were averaged into an axis of length 1.
        num_tokens: T.
        num_tokens_total: the tokens before truncation.
        truncated: True where the two differ.
    """

    tokens: tuple[Token, ...]
    hidden_states: Array | None
    attentions: Array | None
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    num_tokens: int
    num_tokens_total: int
    truncated: bool


@dataclass(frozen=True, slots=True, eq=False)
class HeadPart:
    """The first part of a text in a stream: its number, and everything but attention.

    Attributes:
        input_index: the number of the text, from 0.
        text: the text without attention weights.
        num_layers: how many parts with a layer follow.
    """

    input_index: int
    text: EncodedText
    num_layers: int


@dataclass(frozen=True, slots=True, eq=False)
class LayerPart:
    """The attention weights of one layer of the text numbered `input_index`, shape (H', T, T)."""

    input_index: int
    layer: int
    heads: tuple[int, ...]
    weights: Array


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """All tokens of a text, special tokens included, whatever the model's limit."""

    tokens: tuple[Token, ...]
    exceeds_max_tokens: bool


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a server, 0 where it names none. The client splits requests to stay within them.

    Attributes:
        max_inputs_per_request: the most texts of a request.
        max_text_bytes: the most bytes of UTF-8 in a text, a prompt included.
        max_queue: the most texts that wait or run at a time, over all requests.
        max_batch_tokens: the most tokens that run in one batch, padding included.
        max_message_bytes: the largest response message.
        max_request_text_bytes: the most bytes of UTF-8 in all texts of a request.
        max_request_bytes: the largest request message.
    """

    max_inputs_per_request: int
    max_text_bytes: int
    max_queue: int
    max_batch_tokens: int
    max_message_bytes: int
    max_request_text_bytes: int
    max_request_bytes: int


@dataclass(frozen=True, slots=True)
class ParityFigure:
    """The worst errors of one output of one graph against the PyTorch encoder."""

    graph: str
    output: str
    max_abs_error: float
    max_abs_error_float64: float
    torch_abs_error_float64: float
    mean_abs_error: float
    p99_abs_error: float
    min_cosine: float


@dataclass(frozen=True, slots=True)
class Parity:
    """The outcome of the exporter's parity check."""

    passed: bool
    tolerance: float
    reference_error_ratio: float
    num_cases: int
    figures: tuple[ParityFigure, ...]


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A linear layer between the pooling and the embedding, and what is applied to its result."""

    in_features: int
    out_features: int
    bias: bool
    activation: str
    normalize_input: bool


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model and the server that runs it.

    Attributes:
        hidden_size: the width of a token vector.
        embedding_size: the width of what `embed` returns unless told.
        pooling: how `embed` makes one vector of those of the tokens, as in `EmbedOptions`.
        dense: the layers that pooled vectors go through.
        normalize: whether embeddings are scaled to length 1 at the end.
        exclude_prompt: whether the tokens of a prompt are left out of the pooling.
        prompts: what `embed` may put before a text, by name.
        default_prompt_name: the prompt that it uses unless told; empty: none.
        precision: `fp32`, `fp16` or `int8`: of embeddings and of token vectors without attention.
        versions: by package name.
    """

    name: str
    source: str
    weights_license: str
    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    is_causal: bool
    embedding_size: int
    pooling: str
    dense: tuple[DenseLayer, ...]
    normalize: bool
    exclude_prompt: bool
    prompts: Mapping[str, str]
    default_prompt_name: str
    max_tokens: int
    limits: Limits
    execution_providers: tuple[str, ...]
    precision: str
    parity: Parity
    versions: Mapping[str, str]

    @property
    def max_dimensions(self) -> int:
        """How many components `embed` can return; the publisher may keep fewer."""
        return self.dense[-1].out_features if self.dense else self.hidden_size
