"""Head importance: the effect of each head on embeddings and on a task, and its contribution.

A head is disabled by a gate of 0 on its output, before the output projection (Michel et al., "Are Sixteen
Heads Really Better than One?", https://arxiv.org/abs/1905.10650). The bundle's graph
`onnx/model_contributions.onnx` has these gates and also returns contributions.

Shapes: B batch, T tokens, L layers, H heads per layer, N measured heads of all layers, E embedding size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from attnlens.explanations import pooling_weights, spearman
from attnlens.pooling import Pooling
from attnlens.v1.manifest_pb2 import GraphPurpose
from attnlens_analysis.heads.maps import EncodedText, Head, MapSource, Progress, graph_inputs
from attnlens_server.bundle import Bundle
from attnlens_server.engine.runtimes.onnx_session import open_graph

T = TypeVar("T")
Values = npt.NDArray[np.float64]
Run = Callable[[npt.NDArray[np.int64], npt.NDArray[np.float32]], "GatedOutputs"]

NUM_TEXTS = 25
_MAX_BATCH_TOKENS = 2048


class GatedOutputs(NamedTuple):
    """Graph outputs for one text with B different gates."""

    embedding: npt.NDArray[np.float32]
    """(B, E)."""
    head_contributions: npt.NDArray[np.float32]
    """(B, L, H) contribution of each head to the text's similarity to itself."""


@dataclass(frozen=True, slots=True)
class Importance:
    """Importance of each head.

    Attributes:
        num_texts: Number of texts.
        ablation: (N,) mean of 1 - cosine similarity of the embeddings with and without the head.
        contribution: (N,) mean absolute contribution of the head to the text's similarity to itself.
    """

    num_texts: int
    ablation: Values
    contribution: Values

    @property
    def agreement(self) -> float:
        """Spearman correlation of ablation and contribution over the heads."""
        return spearman(self.ablation, self.contribution)


@dataclass(frozen=True, slots=True)
class TaskEffect:
    """Effect of each head on a similarity task.

    Attributes:
        num_pairs: Number of text pairs.
        spearman: Spearman correlation of cosine similarities and human scores with all heads.
        change: (N,) change of the correlation without each head. Negative if the head helps.
    """

    num_pairs: int
    spearman: float
    change: Values


class ScoredPair(NamedTuple):
    """Two texts and their similarity according to human raters."""

    first: str
    second: str
    score: float


def open_contributions(bundle: Bundle, threads: int = 0) -> Run | None:
    """Open the contributions graph.

    Returns:
        A function of token ids (T,) and gates (B, L, H), with 1 for enabled heads. None if the bundle lacks
        the graph.

    Raises:
        StartupError: ONNX Runtime cannot open the graph.
    """
    purpose = GraphPurpose.GRAPH_PURPOSE_CONTRIBUTIONS
    paths = [graph.path for graph in bundle.manifest.graphs if graph.purpose == purpose]
    if not paths:
        return None
    session = open_graph(bundle.directory / paths[0], "cpu", threads, 0)
    num_components = next(value.shape[1] for value in session.get_inputs() if value.name == "direction")
    is_max = bundle.model.pooling is Pooling.MAX

    def run(ids: npt.NDArray[np.int64], gates: npt.NDArray[np.float32]) -> GatedOutputs:
        batch_size = len(gates)
        feed = graph_inputs([ids] * batch_size, bundle) | {
            "head_gates": gates,
            "pooling_weights": np.tile(pooling_weights(bundle.model.pooling, len(ids)), (batch_size, 1)),
            "takes_maximum": np.full(batch_size, is_max, dtype=np.float32),
            "direction": np.zeros((batch_size, num_components), dtype=np.float32),
            "towards_itself": np.ones(batch_size, dtype=np.float32),
            "num_dimensions": np.full(batch_size, bundle.model.embedding_size, dtype=np.int64),
        }
        return GatedOutputs(*session.run(["embedding", "head_contributions"], feed))

    return run


def measure_importance(
    run: Run, source: MapSource, texts: Sequence[EncodedText], progress: Progress
) -> Importance:
    """Measure head importance on one or more texts."""
    ablation, contribution = np.zeros(len(source.heads)), np.zeros(len(source.heads))
    layers, heads = _indices(source.heads)
    for done, text in enumerate(texts):
        progress("head ablation", done, len(texts))
        embeddings, contributions = _ablate_heads(run, source, text)
        ablation += 1 - cosines(embeddings[1:], embeddings[:1])
        contribution += np.abs(contributions[layers, heads])
    return Importance(len(texts), ablation / len(texts), contribution / len(texts))


def measure_task(
    run: Run, source: MapSource, pairs: Sequence[ScoredPair], progress: Progress
) -> TaskEffect | None:
    """Correlate cosine similarities and scores without each head. Return None if all scores are equal."""
    similarities, scores = [], []
    for done, pair in enumerate(pairs):
        progress("head ablation on text pairs", done, len(pairs))
        first, second = source.encode([pair.first, pair.second])
        if first is not None and second is not None:
            left, right = (_ablate_heads(run, source, text)[0] for text in (first, second))
            similarities.append(cosines(left, right))  # (1 + N,)
            scores.append(pair.score)
    if len(set(scores)) < 2:  # noqa: PLR2004 - a rank correlation needs two ranks
        return None
    correlations = [spearman(column, np.array(scores)) for column in np.transpose(similarities)]
    return TaskEffect(len(scores), correlations[0], np.array(correlations[1:]) - correlations[0])


def _ablate_heads(run: Run, source: MapSource, text: EncodedText) -> tuple[Values, Values]:
    """Return the embeddings with all heads and without each head, (1 + N, E), and contributions (L, H)."""
    sizes = source.bundle.manifest.architecture
    layers, heads = _indices(source.heads)
    max_heads = max([sizes.num_heads, *(layer.num_heads for layer in sizes.layers)])
    gates = np.ones((1 + len(layers), sizes.num_layers, max_heads), dtype=np.float32)
    gates[1 + np.arange(len(layers)), layers, heads] = 0
    outputs = [run(text.input_ids, part) for part in _batches(gates, len(text.input_ids))]
    embeddings = np.concatenate([output.embedding for output in outputs])
    return embeddings.astype(np.float64), outputs[0].head_contributions[0].astype(np.float64)


def _batches(gates: npt.NDArray[np.float32], num_tokens: int) -> Iterator[npt.NDArray[np.float32]]:
    size = max(1, _MAX_BATCH_TOKENS // num_tokens)
    for start in range(0, len(gates), size):
        yield gates[start : start + size]


def _indices(heads: Sequence[Head]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    return np.array([head.layer for head in heads]), np.array([head.head for head in heads])


def spread(items: Sequence[T], number: int) -> list[T]:
    """Return up to `number` evenly spaced items."""
    indices = np.linspace(0, len(items), min(number, len(items)), endpoint=False).astype(int)
    return [items[index] for index in indices]


def cosines(left: Values, right: Values) -> Values:
    """Return the cosine similarity of the rows of `left` (B, E) and `right`, (B, E) or (1, E)."""
    lengths = np.linalg.norm(left, axis=-1) * np.linalg.norm(right, axis=-1)
    result: Values = (left * right).sum(axis=-1) / lengths
    return result
