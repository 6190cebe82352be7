"""Kinds of vectors: one embedding per text, or one vector per token of each text.

Shapes: N texts, T tokens of a text, S tokens of all texts, D components (bytes for binary embeddings).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from attnlens_client import Embeddings, EncodedText, Usage
from attnlens_client.client import BlockingMethods

VectorKind: TypeAlias = Literal["embeddings", "tokens"]
Array: TypeAlias = npt.NDArray[Any]

TOKEN_OPTIONS = ("dtype", "model", "prompt", "prompt_name", "truncate")
"""Arguments of `Client.embed` that also apply to token vectors."""


class TokensOfText(NamedTuple):
    """Ids (T,) and vectors (T, D) of the tokens of a text."""

    ids: npt.NDArray[np.int32]
    vectors: Array


TextVectors: TypeAlias = Array | TokensOfText
"""Embedding (D,) or token vectors of a text."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenVectors:
    """Token vectors of N texts, concatenated.

    Attributes:
        offsets: Index of the first token of each text, then S (N + 1,).
        ids: Token ids (S,).
        vectors: Token vectors (S, D).
    """

    offsets: npt.NDArray[np.int32]
    ids: npt.NDArray[np.int32]
    vectors: Array


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """Vectors of N texts.

    Attributes:
        texts: Embedding or token vectors of each text.
        usages: Number of tokens of each text.
        identity: Properties of the model in which comparable vectors are equal.
        ranges: See `Embeddings.ranges`.
    """

    texts: Sequence[TextVectors]
    usages: Sequence[Usage]
    identity: dict[str, str]
    ranges: Array | None = None


def compute(
    model: BlockingMethods, kind: VectorKind, texts: Sequence[str], options: Mapping[str, Any]
) -> Result:
    """Compute the vectors of at least one text.

    Args:
        model: Client or local model.
        kind: Kind of vectors.
        texts: Texts.
        options: Arguments of `Client.embed`, or `TOKEN_OPTIONS` of them for token vectors.

    Raises:
        TypeError, ValueError, AttnlensError: See `Client.embed` and `Client.encode`.
    """
    if kind == "embeddings":
        result = model.embed_with_usage(texts, **options)
        return Result(list(result), result.usages, _identity(result), result.ranges)
    encoded = model.encode(texts, **options)
    return Result(
        [
            TokensOfText(
                np.array([token.id for token in text.tokens], np.int32), cast("Array", text.last_hidden_state)
            )
            for text in encoded
        ],
        [Usage(text.num_tokens, text.num_tokens_total, text.truncated) for text in encoded],
        _identity(encoded[0]),
    )


def joined(texts: Sequence[TextVectors], like: TextVectors) -> Array | TokenVectors:
    """Concatenate the vectors of texts: embeddings (N, D) or `TokenVectors`.

    Args:
        texts: Vectors of each text.
        like: Vectors of another text, whose data type and size the result has if there are no texts.
    """
    if isinstance(like, TokensOfText):
        tokens = cast("Sequence[TokensOfText]", texts)
        offsets = np.zeros(len(tokens) + 1, np.int32)
        np.cumsum([len(text.ids) for text in tokens], out=offsets[1:])
        ids = np.concatenate([like.ids[:0], *(text.ids for text in tokens)])
        return TokenVectors(
            offsets, ids, np.concatenate([like.vectors[:0], *(text.vectors for text in tokens)])
        )
    return np.stack(cast("Sequence[Array]", texts)) if texts else np.empty((0, like.size), like.dtype)


def _identity(result: Embeddings | EncodedText) -> dict[str, str]:
    return {
        "name": result.model,
        "version": result.model_version,
        "engine": result.engine,
        "precision": result.precision,
    }
