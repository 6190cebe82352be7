"""Results of `embed`, `encode` and `tokenize`.

Shapes: N texts, T tokens of a text, D hidden size, L' and H' requested layers and heads, R rows, U units
    (tokens or
words).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from attnlens.patterns import Band, Blocks
from attnlens.reductions import RowStatistics, SparseWeights, TopKWeights
from attnlens.reductions.forms import from_levels
from attnlens.short_repr import short_repr
from attnlens_client import colored_text
from attnlens_client.arguments import AttentionQuery
from attnlens_client.colored_text import printable

Array: TypeAlias = npt.NDArray[Any]
LayerPattern: TypeAlias = Band | Blocks
ReducedData: TypeAlias = TopKWeights | SparseWeights | RowStatistics

_VERSION_CHARS = 12
_MAX_TOKENS = 12


@short_repr
@dataclass(frozen=True, slots=True)
class Token:
    """A token with its offsets.

    Attributes:
        id: Index in the vocabulary.
        text: Token as the tokenizer spells it, such as `##ing`.
        source: `text` (also the first of a pair), `second_text`, `prompt`, `special` for special tokens such
            as `[CLS]`, or `ids` for a token whose id was given.
        byte_start: Start in the UTF-8 bytes of the source. Offsets of special tokens and given ids are 0.
        byte_end: End in the UTF-8 bytes of the source.
        char_start: Start in the characters of the source: the token is `text[char_start:char_end]`.
        char_end: End in the characters of the source.
        word_index: Index of the word, from 0 in each text of a pair. None for special tokens and given ids.
    """

    id: int
    text: str
    source: str
    byte_start: int
    byte_end: int
    char_start: int
    char_end: int
    word_index: int | None

    @property
    def is_special(self) -> bool:
        """Whether it is a special token."""
        return self.source == "special"


@dataclass(frozen=True, slots=True)
class Usage:
    """Number of tokens of a text, including special tokens, after and before truncation."""

    num_tokens: int
    num_tokens_total: int
    truncated: bool


@short_repr
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Embeddings:
    """Embeddings with the number of tokens of each text and the model. Iteration yields vectors (D,).

    Vectors are comparable if `model_version`, `engine` and `precision` are equal.

    Attributes:
        vectors: Embeddings (N, D).
        usages: Number of tokens of each text.
        model: Model name.
        model_version: Model version, see `ModelInfo.version`.
        engine: Runtime, see `ModelInfo.engine`.
        precision: Precision of the computation.
        ranges: Minimum and maximum (2, D) of each component, in float32, for "int8" and "uint8". Only vectors
            with the same ranges are comparable. None for other types, and if there are no texts.
    """

    vectors: Array
    usages: tuple[Usage, ...]
    model: str
    model_version: str
    engine: str = ""
    precision: str = ""
    ranges: Array | None = None

    def __len__(self) -> int:
        return len(self.vectors)

    def __iter__(self) -> Iterator[Array]:
        return iter(self.vectors)

    def __repr__(self) -> str:
        return f"Embeddings({describe(self.vectors)}, {describe_model(self.model, self.model_version)})"


@short_repr
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Attention:
    """Result of one query for one text. Arrays are read-only.

    Attributes:
        query: The query.
        layers: Layers of the first axis. For a mean over layers or a rollout, all layers that it joins.
        heads: Heads. With the view "head_mean", all heads of the mean.
        layout: Layout of `weights`, see there.
        row_sum: Sum of each row: `one`, `gate`, `unbounded` or `unspecified`. For `band` and `blocks`, of the
            rows of `dense()`.
        weights: An array that depends on the layout:

            - `dense`: (L', H', T, T). [l, h, i, j] is the weight of token j for token i. With a reduction,
              (L', H', R, U).
            - `sqrt_uint8`: as `dense`, in uint8. `dense()` decodes it.
            - `per_token`: (L', T, H'). [l, i, h] is the value of head h for token i.
            - `band`: (L', H', T, 2G + 2w + 1), see `attnlens.patterns.Band`.
            - `blocks`: (L', H', T, S * b + 2b), see `attnlens.patterns.Blocks`.
            - `top_k`, `sparse`, `statistics`: empty. See the properties with these names.
        patterns: Pattern of each layer for `band` and `blocks`, else empty.
        reduced: Data of the layouts `top_k`, `sparse` and `statistics`, else None.
        special_token_mass: Weight (L', H', R) of dropped special tokens in each row. None if none was
            dropped.
        unit_ids: Index (T,) of each token's unit in int32, -1 for dropped tokens. None if units are tokens.
    """

    query: AttentionQuery
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    layout: str
    row_sum: str
    weights: Array
    patterns: tuple[LayerPattern, ...] = ()
    reduced: ReducedData | None = None
    special_token_mass: Array | None = None
    unit_ids: Array | None = None

    @property
    def top_k(self) -> TopKWeights:
        """The largest weights of each row: indices and values (L', H', R, k), remaining mass (L', H', R).

        Raises:
            ValueError: The query has no TopK reduction.
        """
        if isinstance(self.reduced, TopKWeights):
            return self.reduced
        raise ValueError(f"the layout is {self.layout}: request AttentionReduction(form=TopK(k))")

    @property
    def sparse(self) -> SparseWeights:
        """The weights above a threshold, as compressed sparse rows of (L' * H' * R, U).

        Raises:
            ValueError: The query has no Threshold reduction.
        """
        if isinstance(self.reduced, SparseWeights):
            return self.reduced
        raise ValueError(
            f"the layout is {self.layout}: request AttentionReduction(form=Threshold(threshold))"
        )

    @property
    def statistics(self) -> RowStatistics:
        """The attention received by each unit (L', H', U), and the entropy of each row (L', H', R).

        Raises:
            ValueError: The query has no Statistics reduction.
        """
        if isinstance(self.reduced, RowStatistics):
            return self.reduced
        raise ValueError(f"the layout is {self.layout}: request AttentionReduction(form=Statistics(...))")

    @property
    def selected(self) -> Array:
        """Whether each token uses each head, according to its head gates: bool (L', T, H').

        Raises:
            ValueError: The role is not `head_gates`.
        """
        if self.role != "head_gates":
            raise ValueError(f"the role is {self.role}: request head_gates")
        is_selected: Array = self.weights != 0
        return is_selected

    def dense(self) -> Array:
        """Return the weights as (L', H', T, T) or (L', H', R, U), queries by keys.

        Raises:
            ValueError: The layout is `per_token`, or a reduction has kept only some weights.
        """
        if self.reduced is not None:
            raise ValueError(f"the layout is {self.layout}, which has no dense weights: see `{self.layout}`")
        if self.layout == "sqrt_uint8":
            return from_levels(self.weights)
        if self.layout == "per_token":
            raise ValueError(f"{self.role} has values per token and no weights between tokens")
        if not self.patterns:
            return self.weights
        layers = zip(self.patterns, self.weights, strict=True)
        return np.stack([pattern.dense(rows) for pattern, rows in layers])

    @property
    def role(self) -> str:
        """Role of the query."""
        return self.query.role

    @property
    def view(self) -> str:
        """View of the query."""
        return self.query.view

    def __repr__(self) -> str:
        data = _describe_data(self.weights, self.reduced)
        return f"Attention({self.role}, {self.view}, layers={list(self.layers)}, {data})"


@short_repr
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class EncodedText:
    """Result of `encode` for one text or pair. Arrays are read-only.

    Attributes:
        tokens: Tokens after truncation.
        last_hidden_state: Token vectors (T, D) of the last layer, or None if not requested.
        attention: Result of each query.
        num_tokens: Number of tokens T after truncation.
        num_tokens_total: Number of tokens before truncation.
        truncated: Whether the text was truncated.
        model: Model name.
        model_version: Model version, see `ModelInfo.version`.
        engine: Runtime, see `ModelInfo.engine`.
        precision: Precision of the computation. Always `fp32` with attention.
    """

    tokens: tuple[Token, ...]
    last_hidden_state: Array | None
    attention: tuple[Attention, ...]
    num_tokens: int
    num_tokens_total: int
    truncated: bool
    model: str
    model_version: str
    engine: str = ""
    precision: str = ""

    @property
    def weights(self) -> Array:
        """The array of the only query, see `Attention.weights`.

        Raises:
            ValueError: There is no query, or more than one.
        """
        if len(self.attention) != 1:
            raise ValueError(f"there are {len(self.attention)} queries: use `attention[i].weights`")
        return self.attention[0].weights

    def _repr_html_(self) -> str:
        """Show the tokens and the shapes of the arrays in a notebook."""
        return _tokens_html(self.tokens, repr(self))

    def __repr__(self) -> str:
        parts = [f"{self.num_tokens} tokens"]
        if self.last_hidden_state is not None:
            parts.append(f"last_hidden_state {describe(self.last_hidden_state)}")
        parts += [repr(attention) for attention in self.attention]
        return f"EncodedText({', '.join(parts)}, {describe_model(self.model, self.model_version)})"


@short_repr
@dataclass(frozen=True, slots=True, eq=False)
class TextPart:
    """First part of a text in a stream.

    Attributes:
        input_index: Index of the text.
        text: Result without attention.
        num_attention_parts: Number of `AttentionPart`s that follow, for all queries.
    """

    input_index: int
    text: EncodedText
    num_attention_parts: int


@short_repr
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class AttentionPart:
    """Result of one query for one layer of a text. See `Attention` for attributes not described here.

    Arrays have no axis of layers: `weights` is (H', T, T), (T, H') or (H', T, W).

    Attributes:
        input_index: Index of the text.
        query_index: Index of the query.
        layer: The layer. For a mean over layers or a rollout, the last of `layers`.
        pattern: Pattern for `band` and `blocks`, else None.
        layers: The layer, or all layers that a mean or a rollout joins.
    """

    input_index: int
    query_index: int
    layer: int
    heads: tuple[int, ...]
    layout: str
    row_sum: str
    weights: Array
    pattern: LayerPattern | None = None
    reduced: ReducedData | None = None
    special_token_mass: Array | None = None
    unit_ids: Array | None = None
    layers: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return (
            f"AttentionPart(input_index={self.input_index}, query_index={self.query_index}, "
            f"layer={self.layer}, {_describe_data(self.weights, self.reduced)})"
        )


@short_repr
@dataclass(frozen=True, slots=True, repr=False)
class TokenizedText:
    """All tokens of a text or pair, including special tokens, without truncation."""

    tokens: tuple[Token, ...]
    exceeds_max_tokens: bool
    model: str
    model_version: str

    def _repr_html_(self) -> str:
        """Show the tokens in a notebook."""
        return _tokens_html(self.tokens, repr(self))

    def __repr__(self) -> str:
        words = [printable(token.text) for token in self.tokens[:_MAX_TOKENS]]
        joined = " ".join([*words, "..."] if len(self.tokens) > len(words) else words)
        parts = [f"{len(self.tokens)} tokens: {joined}"]
        parts += ["exceeds max_tokens"] if self.exceeds_max_tokens else []
        return f"TokenizedText({', '.join(parts)}, {describe_model(self.model, self.model_version)})"


def _tokens_html(tokens: tuple[Token, ...], caption: str) -> str:
    titles = [f"{place}: id {token.id}, {token.source}" for place, token in enumerate(tokens)]
    labels = [token.text for token in tokens]
    return colored_text.rows(colored_text.plain(labels, titles), colored_text.line(caption))


def describe(array: Array) -> str:
    """Return the type and the shape of an array."""
    return f"{array.dtype} {array.shape}"


def _describe_data(weights: Array, reduced: ReducedData | None) -> str:
    return describe(weights) if reduced is None else repr(reduced)


def describe_model(name: str, version: str) -> str:
    """Return the model of a result for its `repr`."""
    return f"model={name!r}, version={version[:_VERSION_CHARS]!r}"
