"""Runs the graphs of a bundle on one text: embeddings with tokens removed, contributions, attention.

Shapes: T tokens, N variants of a text or directions, D hidden size, E embedding size, H heads.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from attnlens.bundle import BundleError
from attnlens.dense import open_layers
from attnlens.explanations import exclude_token, pool_weighted, pooling_weights, to_unit_length
from attnlens.patterns import Band
from attnlens.pooling import FloatArray, Pooling, finish
from attnlens.v1.manifest_pb2 import Manifest
from attnlens_export.graph.names import (
    ATTENTIONS_PATH,
    BASELINE,
    CONTRIBUTIONS_PATH,
    DIRECTION,
    HEAD_GATES,
    HIDDEN_OUTPUT,
    NUM_DIMENSIONS,
    POOLING_WEIGHTS,
    TAKES_MAXIMUM,
    TOKEN_CONTRIBUTIONS,
    TOWARDS_ITSELF,
    contribution_inputs,
    embeddings_path,
    layer_outputs,
)
from attnlens_export.parity.grid import Inputs
from attnlens_export.parity.sessions import Graph
from attnlens_export.published.pooling import read_embedding_size
from attnlens_model import ATTENTION_WEIGHTS, EncoderConfig

Float64Array = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

# Maximum number of variants of a text, or of directions, in one run.
_MAX_BATCH = 64


class ExplainedModel:
    """The graphs and the pooling of a bundle. Only one graph is open at a time.

    Attributes:
        is_logit: Whether an "embedding" is the logits of a classifier, which are not normalized.
        takes_pairs: Whether the model is a reranker, whose texts are pairs.
        is_linear: Whether an embedding is a weighted sum of token vectors.
        num_dimensions: Number of embedding components after truncation.
        has_distributions: Whether the attention weights of every layer sum to 1.
    """

    def __init__(self, directory: Path, manifest: Manifest, config: EncoderConfig) -> None:
        """Read the pooling of a bundle.

        Raises:
            BundleError: The bundle has no contribution graph.
        """
        if not (directory / CONTRIBUTIONS_PATH).is_file():
            raise BundleError(
                f"{directory / CONTRIBUTIONS_PATH} does not exist, but explanations need it: export the "
                "bundle again"
            )
        self.config = config
        self.is_logit = manifest.HasField("classifier")
        self.takes_pairs = self.is_logit and len(manifest.classifier.labels) == 1
        self.pooling = Pooling(manifest.pooling.pooling)
        self.is_linear = self.pooling is not Pooling.MAX and not manifest.pooling.dense
        self._directory = directory
        self._dense = open_layers(directory, manifest.pooling.dense, config.vector_size)
        self._size = read_embedding_size(directory, config.vector_size)
        self.num_dimensions = manifest.pooling.truncate_dim or self._size
        self._maps = {
            name: output
            for name, (_, output) in layer_outputs(config).items()
            if output.role == ATTENTION_WEIGHTS
        }
        self.has_distributions = len(self._maps) == config.num_layers and all(
            output.row_sum == "one" for output in self._maps.values()
        )
        self._graph: tuple[str, Graph] | None = None

    def weights(self, num_tokens: int, removed: Sequence[int] = ()) -> FloatArray:
        """Return the pooling weights (T,) with some tokens removed. At least one token must remain."""
        weights = pooling_weights(self.pooling, num_tokens)
        for token in removed:
            reduced = exclude_token(weights, self.pooling, token)
            weights = weights if reduced is None else reduced
        return weights

    def embed(self, ids: Ids, removed: Sequence[Sequence[int]], types: Ids | None = None) -> Float64Array:
        """Return the embeddings (N, E) of length 1 of a text with some tokens removed, for N selections.

        For a classifier, return its logits. A removed token keeps its position, and no token attends to it.
        """
        pooled = []
        for start in range(0, len(removed), _MAX_BATCH):
            selections = removed[start : start + _MAX_BATCH]
            mask = np.ones((len(selections), len(ids)), dtype=np.int64)
            for row, tokens in enumerate(selections):
                mask[row, list(tokens)] = 0
            graph = self._open(embeddings_path(self._directory))
            hidden = graph.run(self._inputs(ids, mask, types))[HIDDEN_OUTPUT]
            pooled += [
                pool_weighted(vectors, self.weights(len(ids), tokens), self.pooling)
                for vectors, tokens in zip(hidden, selections, strict=True)
            ]
        finished = finish(np.stack(pooled), self._dense, dimensions=self.num_dimensions)
        return finished.astype(np.float64) if self.is_logit else to_unit_length(finished)

    def contributions(
        self, ids: Ids, types: Ids | None = None, direction: Float64Array | None = None
    ) -> tuple[Float64Array, float]:
        """Return the contributions (T,) of the tokens to the text's own embedding, and the baseline.

        For a direction (E,), the target is that of the graph. It has the sign of a logit, but not its size.
        """
        given = np.zeros((1, self._size)) if direction is None else direction[None]
        scores, baselines = self._sweep(
            ids, given.astype(np.float32), types, towards_itself=direction is None
        )
        return scores[0], float(baselines[0])

    def contribution_norms(self, ids: Ids) -> Float64Array:
        """Return |c(t)| / |p| of each token t, (T,), with one sweep per embedding component."""
        directions = np.eye(self.num_dimensions, self._size, dtype=np.float32)
        squares = np.zeros(len(ids))
        for start in range(0, len(directions), _MAX_BATCH):
            batch = directions[start : start + _MAX_BATCH]
            squares += np.square(self._sweep(ids, batch, towards_itself=False)[0]).sum(axis=0)
        return np.sqrt(squares)

    def hidden_and_attention(
        self, ids: Ids, types: Ids | None = None
    ) -> tuple[FloatArray, list[Float64Array]]:
        """Return the token vectors (T, D), and the mean over heads of the weights (T, T) of each layer."""
        mask = np.ones((1, len(ids)), dtype=np.int64)
        outputs = self._open(ATTENTIONS_PATH).run(self._inputs(ids, mask, types))
        maps = [self._to_dense(name, outputs[name][0]).mean(axis=0, dtype=np.float64) for name in self._maps]
        return outputs[HIDDEN_OUTPUT][0], maps

    def _open(self, path: str) -> Graph:
        """Return an open graph. Closes the previous graph, because each session holds the weights."""
        if self._graph is None or self._graph[0] != path:
            self._graph = None
            self._graph = (path, Graph(self._directory, path))
        return self._graph[1]

    def _to_dense(self, name: str, weights: FloatArray) -> FloatArray:
        """Convert weights (H, T, T), or those of a band or blocks, to (H, T, T)."""
        pattern = self._maps[name].pattern
        if pattern is None:
            return weights
        return (
            pattern.dense(weights)
            if isinstance(pattern, Band)
            else pattern.at(weights.shape[1]).dense(weights)
        )

    def _inputs(self, ids: Ids, mask: Ids, types: Ids | None = None) -> Inputs:
        rows = np.broadcast_to(ids, mask.shape).copy()
        if self.config.embeddings.type_vocab_size <= 1:
            return Inputs(rows, mask, None)
        return Inputs(rows, mask, np.zeros_like(rows) + (0 if types is None else types))

    def _sweep(
        self, ids: Ids, directions: FloatArray, types: Ids | None = None, *, towards_itself: bool
    ) -> tuple[Float64Array, Float64Array]:
        """Return the contributions (N, T) towards directions (N, E), and the baselines (N,)."""
        count = len(directions)
        mask = np.ones((count, len(ids)), dtype=np.int64)
        gates = contribution_inputs(self.config, self._size)[HEAD_GATES][1:]
        outputs = self._open(CONTRIBUTIONS_PATH).run_feed(
            {
                **self._inputs(ids, mask, types).feed(),
                POOLING_WEIGHTS: np.tile(self.weights(len(ids)), (count, 1)),
                TAKES_MAXIMUM: np.full(count, self.pooling is Pooling.MAX, dtype=np.float32),
                DIRECTION: directions,
                TOWARDS_ITSELF: np.full(count, towards_itself, dtype=np.float32),
                NUM_DIMENSIONS: np.full(count, self.num_dimensions, dtype=np.int64),
                HEAD_GATES: np.ones((count, *(int(axis) for axis in gates)), dtype=np.float32),
            }
        )
        return outputs[TOKEN_CONTRIBUTIONS].astype(np.float64), outputs[BASELINE].astype(np.float64)
