"""The graphs of a bundle as functions of one text: embeddings with tokens left out, contributions, attention.

T tokens, N variants of a text, E components of an embedding, L layers, H heads.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from attnlens.bundle import BundleError
from attnlens.explanations import pooling_weights, unit, without_token
from attnlens.patterns import Band
from attnlens.pooling import FloatArray, Pooling
from attnlens.v1.manifest_pb2 import Manifest
from attnlens_export.graph.names import (
    ATTENTIONS_PATH,
    BASELINE,
    CONTRIBUTIONS_PATH,
    DIRECTION,
    EMBEDDING_OUTPUT,
    HEAD_GATES,
    HIDDEN_OUTPUT,
    NUM_DIMENSIONS,
    POOLING_WEIGHTS,
    TAKES_MAXIMUM,
    TOKEN_CONTRIBUTIONS,
    TOWARDS_ITSELF,
    contribution_inputs,
    layer_outputs,
)
from attnlens_export.parity.grid import Inputs
from attnlens_export.parity.measure import Graph
from attnlens_export.parity.reference import Tensors
from attnlens_export.published.pooling import read_embedding_size
from attnlens_model import ATTENTION_WEIGHTS, EncoderConfig

Float64Array = npt.NDArray[np.float64]


class ExplainedModel:
    """A bundle's graphs, and how it embeds."""

    def __init__(self, directory: Path, manifest: Manifest, config: EncoderConfig) -> None:
        """Open the graphs.

        Raises:
            BundleError: the bundle has no graph of contributions.
        """
        if not (directory / CONTRIBUTIONS_PATH).is_file():
            raise BundleError(
                f"{directory / CONTRIBUTIONS_PATH} is absent, without which nothing explains an embedding: "
                "export the bundle again"
            )
        self.config = config
        self.pooling = Pooling(manifest.pooling.pooling)
        self.is_linear = self.pooling is not Pooling.MAX and not manifest.pooling.dense
        """Whether an embedding is a weighted sum of token vectors."""
        self._size = read_embedding_size(directory, config.hidden_size)
        self.num_dimensions = manifest.pooling.truncate_dim or self._size
        self._contributions = Graph(directory, CONTRIBUTIONS_PATH)
        self._attentions = Graph(directory, ATTENTIONS_PATH)

    def weights(self, num_tokens: int, left_out: Sequence[int] = ()) -> FloatArray:
        """Return the weights (T,) of token vectors without some of them; there must be one that counts."""
        weights = pooling_weights(self.pooling, num_tokens)
        for token in left_out:
            fewer = without_token(weights, self.pooling, token)
            weights = weights if fewer is None else fewer
        return weights

    def embed(self, ids: npt.NDArray[np.int64], left_out: Sequence[Sequence[int]]) -> Float64Array:
        """Return the embedding of a text without some of its tokens, for each of N choices: (N, E), length 1.

        A token that is left out keeps its place, and nothing attends to it.
        """
        mask = np.ones((len(left_out), len(ids)), dtype=np.int64)
        for row, tokens in enumerate(left_out):
            mask[row, list(tokens)] = 0
        weights = np.stack([self.weights(len(ids), tokens) for tokens in left_out])
        return unit(self._run(ids, mask, weights)[EMBEDDING_OUTPUT])

    def contributions(self, ids: npt.NDArray[np.int64]) -> tuple[Float64Array, float]:
        """Return the contributions (T,) of a text's tokens to itself, and the baseline."""
        mask = np.ones((1, len(ids)), dtype=np.int64)
        found = self._run(ids, mask, self.weights(len(ids))[None])
        return found[TOKEN_CONTRIBUTIONS][0].astype(np.float64), float(found[BASELINE][0])

    def hidden_and_attention(self, ids: npt.NDArray[np.int64]) -> tuple[FloatArray, list[Float64Array]]:
        """Return the token vectors (T, D), and of each layer the mean over heads of its weights (T, T)."""
        found = self._attentions.run(self._inputs(ids, np.ones((1, len(ids)), dtype=np.int64)))
        maps = [
            self._dense(name, found[name][0]).mean(axis=0, dtype=np.float64)
            for name, (_, output) in layer_outputs(self.config).items()
            if output.role == ATTENTION_WEIGHTS
        ]
        return found[HIDDEN_OUTPUT][0], maps

    def _dense(self, name: str, weights: FloatArray) -> FloatArray:
        """(H, T, T) or rows of a pattern -> (H, T, T)."""
        pattern = layer_outputs(self.config)[name][1].pattern
        if pattern is None:
            return weights
        return (
            pattern.dense(weights)
            if isinstance(pattern, Band)
            else pattern.at(weights.shape[1]).dense(weights)
        )

    def _inputs(self, ids: npt.NDArray[np.int64], mask: npt.NDArray[np.int64]) -> Inputs:
        rows = np.broadcast_to(ids, mask.shape).copy()
        return Inputs(rows, mask, np.zeros_like(rows) if self.config.embeddings.type_vocab_size > 1 else None)

    def _run(self, ids: npt.NDArray[np.int64], mask: npt.NDArray[np.int64], weights: FloatArray) -> Tensors:
        count = len(mask)
        gates = contribution_inputs(self.config, self._size)[HEAD_GATES][1:]
        return self._contributions.run_feed(
            {
                **self._inputs(ids, mask).feed(),
                POOLING_WEIGHTS: weights,
                TAKES_MAXIMUM: np.full(count, self.pooling is Pooling.MAX, dtype=np.float32),
                DIRECTION: np.zeros((count, self._size), dtype=np.float32),
                TOWARDS_ITSELF: np.ones(count, dtype=np.float32),
                NUM_DIMENSIONS: np.full(count, self.num_dimensions, dtype=np.int64),
                HEAD_GATES: np.ones((count, *(int(axis) for axis in gates)), dtype=np.float32),
            }
        )
