"""What calls return.

Letters: N texts, T tokens of a text, D hidden size, L' and H' the chosen layers and heads.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from attnlens.patterns import Band, Blocks
from attnlens.reductions import RowStatistics, SparseWeights, TopKWeights
from attnlens.reductions.forms import from_levels
from attnlens_client import coloured_text
from attnlens_client.arguments import AttentionQuery
from attnlens_client.coloured_text import printable

Array: TypeAlias = npt.NDArray[Any]
LayerPattern: TypeAlias = Band | Blocks
ReducedData: TypeAlias = TopKWeights | SparseWeights | RowStatistics

_SHOWN_VERSION = 12
_MAX_SHOWN_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Token:
    """A token and where it stands in its source.

    Attributes:
        id: its number in the vocabulary.
        text: the tokenizer's own spelling, for instance `##ing`.
        source: where it comes from: `text`, also the first of a pair; `second_text` of a pair; `prompt`;
            `special`: the model needs it and no text holds it, like `[CLS]`; `ids`: the request gave its id.
        byte_start, byte_end: the bytes of UTF-8 in its source that it stands for; 0, 0 for special tokens and
            ids.
        char_start, char_end: the same in characters: `text[char_start:char_end]` is what it stands for.
        word_index: the number of its word, in a pair for each text from 0. None for special tokens and ids.
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
        """Whether the tokenizer has added it."""
        return self.source == "special"


@dataclass(frozen=True, slots=True)
class Usage:
    """How much of a text was used: tokens seen, tokens before truncation, special tokens included."""

    num_tokens: int
    num_tokens_total: int
    truncated: bool


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Embeddings:
    """Vectors (N, D), how much of each text they stand for, and the model that made them.

    `model_version` tells bundles of one name apart, see `ModelInfo.version`; `engine` and `precision` say
    what computed them, see `ModelInfo.engine`. Vectors belong together where all three are the same. To
    iterate over it is to iterate over the vectors, (D,) each.
    """

    vectors: Array
    usages: tuple[Usage, ...]
    model: str
    model_version: str
    engine: str = ""
    precision: str = ""

    def __len__(self) -> int:
        return len(self.vectors)

    def __iter__(self) -> Iterator[Array]:
        return iter(self.vectors)

    def __repr__(self) -> str:
        return f"Embeddings({_shown(self.vectors)}, {_shown_model(self.model, self.model_version)})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Attention:
    """What one query brought of one text. The array is read-only; `.copy()` gives one to change.

    Attributes:
        query: what was asked for.
        layers: the layer number of each entry of axis 0, from 0; of a mean or a rollout, those that were put
            together in its only entry.
        heads: the head numbers, from 0; with the view "head_mean" those that were averaged.
        layout: where the axes of `weights` are, as below.
        row_sum: what a row sums to: `one`, `gate`, `unbounded`. `unspecified`: nothing is said. Of a band and
            of blocks it is the rows of `dense()`.
        weights: `dense`: shape (L', H', T, T), [l, h, i, j] is how much token i draws from token j;
            `per_token`: shape (L', T, H'), [l, i, h] is what token i has of head h;
            `band`: shape (L', H', T, 2G + 2w + 1) and `blocks`: shape (L', H', T, S * b + 2b), as the classes
            of `patterns` say. Of a reduction `dense`: shape (L', H', R, U), R chosen rows and U tokens or
            words; `sqrt_uint8`: the same in uint8; `top_k`, `sparse` and `statistics`: no elements, see the
            properties of these names.
        patterns: between which tokens each layer has weights, for `band` and `blocks`; else empty.
        reduced: what there is instead of weights; None: they are all there.
        special_token_mass: shape (L', H', R): what each row gave to special tokens that were dropped. None:
            none was dropped.
        unit_ids: shape (T,) int32: the number of the row and column that each token became, -1 where it
            was dropped. None: that of the token.
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
            ValueError: they were not asked for.
        """
        if isinstance(self.reduced, TopKWeights):
            return self.reduced
        raise ValueError(f"the layout is {self.layout}: ask for AttentionReduction(form=TopK(k))")

    @property
    def sparse(self) -> SparseWeights:
        """The weights from a threshold on, as compressed sparse rows of L' x H' x R.

        Raises:
            ValueError: they were not asked for.
        """
        if isinstance(self.reduced, SparseWeights):
            return self.reduced
        raise ValueError(
            f"the layout is {self.layout}: ask for AttentionReduction(form=Threshold(threshold))"
        )

    @property
    def statistics(self) -> RowStatistics:
        """What each unit received (L', H', U), and the entropy of each row (L', H', R).

        Raises:
            ValueError: they were not asked for.
        """
        if isinstance(self.reduced, RowStatistics):
            return self.reduced
        raise ValueError(f"the layout is {self.layout}: ask for AttentionReduction(form=Statistics(...))")

    @property
    def selected(self) -> Array:
        """Which heads each token uses, by its head gates: bool, shape (L', T, H').

        Raises:
            ValueError: these are no gates.
        """
        if self.role != "head_gates":
            raise ValueError(f"{self.role} says nothing of heads that are selected: ask for head_gates")
        chosen: Array = self.weights != 0
        return chosen

    def dense(self) -> Array:
        """Return the weights (L', H', T, T), or (L', H', R, U), query by key; a new array but for `dense`.

        Raises:
            ValueError: the layout is `per_token`, or a reduction has left only some weights or none.
        """
        if self.reduced is not None:
            raise ValueError(f"the layout is {self.layout}: not all weights are there, see `{self.layout}`")
        if self.layout == "sqrt_uint8":
            return from_levels(self.weights)
        if self.layout == "per_token":
            raise ValueError(f"{self.role} has a row for each token, and no weights between tokens")
        if not self.patterns:
            return self.weights
        layers = zip(self.patterns, self.weights, strict=True)
        return np.stack([pattern.dense(rows) for pattern, rows in layers])

    @property
    def role(self) -> str:
        """Which output of the layers it is."""
        return self.query.role

    @property
    def view(self) -> str:
        """What was made of it."""
        return self.query.view

    def __repr__(self) -> str:
        shown = _shown_data(self.weights, self.reduced)
        return f"Attention({self.role}, {self.view}, layers={list(self.layers)}, {shown})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class EncodedText:
    """The result of one text or pair. The arrays are read-only; `.copy()` gives one to change.

    Attributes:
        tokens: the T tokens that the model saw.
        last_hidden_state: Token vectors of the last layer, shape (T, D). None if not requested.
        attention: what each query brought, in their order.
        num_tokens: T.
        num_tokens_total: the tokens before truncation.
        truncated: True where the two differ.
        model, model_version: which bundle it comes from, see `ModelInfo.version`.
        engine, precision: what computed it, see `ModelInfo.engine`; with attention always `fp32`.
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
        """The array of the only query; see `Attention.weights`.

        Raises:
            ValueError: there was no query, or several.
        """
        if len(self.attention) != 1:
            raise ValueError(f"there are {len(self.attention)} results, not one: take `attention[i].weights`")
        return self.attention[0].weights

    def _repr_html_(self) -> str:
        """Show the tokens in a notebook, with what there is of them."""
        return _shown_tokens(self.tokens, repr(self))

    def __repr__(self) -> str:
        parts = [f"{self.num_tokens} tokens"]
        if self.last_hidden_state is not None:
            parts.append(f"last_hidden_state {_shown(self.last_hidden_state)}")
        parts += [repr(attention) for attention in self.attention]
        return f"EncodedText({', '.join(parts)}, {_shown_model(self.model, self.model_version)})"


@dataclass(frozen=True, slots=True, eq=False)
class TextPart:
    """The first part of a text in a stream: its index and its result without attention.

    Attributes:
        input_index: the number of the text, from 0.
        text: the text without attention.
        num_attention_parts: Number of `AttentionPart`s that follow, for all queries together.
    """

    input_index: int
    text: EncodedText
    num_attention_parts: int


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class AttentionPart:
    """The result of one query for one layer of a text.

    Attributes:
        input_index: the number of the text, from 0.
        query_index: the number of the query, from 0.
        layer: its number, from 0; of a mean or a rollout that of the last one in `layers`.
        heads, layout, row_sum: as in `Attention`.
        weights: as in `Attention`, without the axis of layers: (H', T, T), (T, H') or (H', T, W).
        pattern: as in `Attention.patterns`; None where there is none.
        reduced, special_token_mass, unit_ids: as in `Attention`, without the axis of layers.
        layers: the layers that were put together; of a layer by itself, its number alone.
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
            f"layer={self.layer}, {_shown_data(self.weights, self.reduced)})"
        )


@dataclass(frozen=True, slots=True, repr=False)
class TokenizedText:
    """All tokens of a text or pair, special tokens included, whatever the model's limit."""

    tokens: tuple[Token, ...]
    exceeds_max_tokens: bool
    model: str
    model_version: str

    def _repr_html_(self) -> str:
        """Show the tokens in a notebook."""
        return _shown_tokens(self.tokens, repr(self))

    def __repr__(self) -> str:
        words = [printable(token.text) for token in self.tokens[:_MAX_SHOWN_TOKENS]]
        shown = " ".join([*words, "..."] if len(self.tokens) > len(words) else words)
        parts = [f"{len(self.tokens)} tokens: {shown}"]
        parts += ["more than the model takes"] if self.exceeds_max_tokens else []
        return f"TokenizedText({', '.join(parts)}, {_shown_model(self.model, self.model_version)})"


def _shown_tokens(tokens: tuple[Token, ...], told: str) -> str:
    """Return tokens as HTML, and a line below them."""
    titles = [f"{place}: id {token.id}, {token.source}" for place, token in enumerate(tokens)]
    labels = [token.text for token in tokens]
    return coloured_text.part(coloured_text.plain(labels, titles), coloured_text.line(told))


def _shown(array: Array) -> str:
    return f"{array.dtype} {array.shape}"


def _shown_data(weights: Array, reduced: ReducedData | None) -> str:
    return _shown(weights) if reduced is None else repr(reduced)


def _shown_model(name: str, version: str) -> str:
    return f"model={name!r}, version={version[:_SHOWN_VERSION]!r}"
