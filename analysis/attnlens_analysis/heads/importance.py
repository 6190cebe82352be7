"""What a head matters: the embedding without it, its part in the embedding, scores of pairs without it.

A head is switched off by a gate of 0 on its output, before the projection behind the heads (Michel et al.,
"Are Sixteen Heads Really Better than One?", https://arxiv.org/abs/1905.10650). The bundle's graph
`onnx/model_contributions.onnx` has the gates, and gives contributions in the same run.

Letters: B rows of a batch, T tokens, L layers, H heads of a layer, N heads of all layers that are measured, E
components of an embedding.
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
    """What a batch of one text with different gates has brought."""

    embedding: npt.NDArray[np.float32]
    """(B, E)."""
    head_contributions: npt.NDArray[np.float32]
    """(B, L, H): what each head adds to the text's similarity with itself."""


@dataclass(frozen=True, slots=True)
class Importance:
    """What switching a head off does, for each of N heads.

    Attributes:
        num_texts: how many texts the first two are measured on.
        ablation: mean of 1 - cosine between the embedding with all heads, and with this head off.
        contribution: mean size of what the head adds to the text's similarity with itself; no head is off.
    """

    num_texts: int
    ablation: Values
    contribution: Values

    @property
    def agreement(self) -> float:
        """Spearman correlation of the two over the heads."""
        return spearman(self.ablation, self.contribution)


@dataclass(frozen=True, slots=True)
class TaskEffect:
    """What switching a head off does to a task.

    Attributes:
        num_pairs: how many pairs of texts.
        spearman: of cosines and human scores, with all heads.
        change: of that, with one head off, (N,); below 0 the head helps.
    """

    num_pairs: int
    spearman: float
    change: Values


class ScoredPair(NamedTuple):
    """Two texts, and how alike people say they are."""

    first: str
    second: str
    score: float


def open_contributions(bundle: Bundle, threads: int = 0) -> Run | None:
    """Open the graph with gates and contributions; None: the bundle lacks it.

    Returns:
        A function of token ids (T,) and gates (B, L, H), 1 for a head that is on.

    Raises:
        StartupError: ONNX Runtime can't open it.
    """
    purpose = GraphPurpose.GRAPH_PURPOSE_CONTRIBUTIONS
    paths = [graph.path for graph in bundle.manifest.graphs if graph.purpose == purpose]
    if not paths:
        return None
    session = open_graph(bundle.directory / paths[0], "cpu", threads, 0)
    num_components = next(value.shape[1] for value in session.get_inputs() if value.name == "direction")
    is_max = bundle.model.pooling is Pooling.MAX

    def run(ids: npt.NDArray[np.int64], gates: npt.NDArray[np.float32]) -> GatedOutputs:
        number = len(gates)
        feed = graph_inputs([ids] * number, bundle) | {
            "head_gates": gates,
            "pooling_weights": np.tile(pooling_weights(bundle.model.pooling, len(ids)), (number, 1)),
            "takes_maximum": np.full(number, is_max, dtype=np.float32),
            "direction": np.zeros((number, num_components), dtype=np.float32),
            "towards_itself": np.ones(number, dtype=np.float32),
            "num_dimensions": np.full(number, bundle.model.embedding_size, dtype=np.int64),
        }
        return GatedOutputs(*session.run(["embedding", "head_contributions"], feed))

    return run


def measure_importance(
    run: Run, source: MapSource, texts: Sequence[EncodedText], progress: Progress
) -> Importance:
    """Measure on all of the texts, at least one."""
    ablation, contribution = np.zeros(len(source.heads)), np.zeros(len(source.heads))
    layers, heads = _indices(source.heads)
    for done, text in enumerate(texts):
        progress("each head off", done, len(texts))
        embeddings, contributions = _one_head_off(run, source, text)
        ablation += 1 - cosines(embeddings[1:], embeddings[:1])
        contribution += np.abs(contributions[layers, heads])
    return Importance(len(texts), ablation / len(texts), contribution / len(texts))


def measure_task(
    run: Run, source: MapSource, pairs: Sequence[ScoredPair], progress: Progress
) -> TaskEffect | None:
    """Correlate cosines and scores, with every head off in turn; None: there are no two scores."""
    found, scores = [], []
    for done, pair in enumerate(pairs):
        progress("each head off, pairs of texts", done, len(pairs))
        first, second = source.encode([pair.first, pair.second])
        if first is not None and second is not None:
            left, right = (_one_head_off(run, source, text)[0] for text in (first, second))
            found.append(cosines(left, right))  # (1 + N,)
            scores.append(pair.score)
    if len(set(scores)) < 2:  # noqa: PLR2004 - a rank correlation needs two ranks
        return None
    correlations = [spearman(column, np.array(scores)) for column in np.transpose(found)]
    return TaskEffect(len(scores), correlations[0], np.array(correlations[1:]) - correlations[0])


def _one_head_off(run: Run, source: MapSource, text: EncodedText) -> tuple[Values, Values]:
    """Return a text's embeddings (1 + N, E) with all heads, then without each, and contributions (L, H)."""
    sizes = source.bundle.manifest.architecture
    layers, heads = _indices(source.heads)
    most = max([sizes.num_heads, *(layer.num_heads for layer in sizes.layers)])
    gates = np.ones((1 + len(layers), sizes.num_layers, most), dtype=np.float32)
    gates[1 + np.arange(len(layers)), layers, heads] = 0
    outputs = [run(text.input_ids, part) for part in _portions(gates, len(text.input_ids))]
    embeddings = np.concatenate([output.embedding for output in outputs])
    return embeddings.astype(np.float64), outputs[0].head_contributions[0].astype(np.float64)


def _portions(gates: npt.NDArray[np.float32], num_tokens: int) -> Iterator[npt.NDArray[np.float32]]:
    size = max(1, _MAX_BATCH_TOKENS // num_tokens)
    for start in range(0, len(gates), size):
        yield gates[start : start + size]


def _indices(heads: Sequence[Head]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    return np.array([head.layer for head in heads]), np.array([head.head for head in heads])


def spread(items: Sequence[T], number: int) -> list[T]:
    """Return at most `number` of the items, at even distances."""
    places = np.linspace(0, len(items), min(number, len(items)), endpoint=False).astype(int)
    return [items[place] for place in places]


def cosines(left: Values, right: Values) -> Values:
    """Return the cosine of each row of `left` (B, E) with that of `right`, (B, E) or (1, E)."""
    lengths = np.linalg.norm(left, axis=-1) * np.linalg.norm(right, axis=-1)
    result: Values = (left * right).sum(axis=-1) / lengths
    return result
