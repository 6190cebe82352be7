"""Do contributions add up? Measured on the grid of parity, with random directions.

Every text of a batch is another case: the mean and the maximum of token vectors, towards a random direction
and towards itself, all components of the embedding and half of them.

B batch, T tokens, D hidden size, E components of an embedding, L layers, H heads.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from attnlens.dense import DenseLayer, open_layers
from attnlens.explanations import pool_weighted
from attnlens.pooling import Pooling, finish
from attnlens_export.contributions.heads import limit_to_sweep
from attnlens_export.contributions.result import Completeness, ContributionsResult, HeadGates
from attnlens_export.graph.names import (
    BASELINE,
    CONTRIBUTIONS_PATH,
    DIRECTION,
    EMBEDDING_OUTPUT,
    EMBEDDINGS_PATH,
    HEAD_CONTRIBUTIONS,
    HEAD_GATES,
    HIDDEN_OUTPUT,
    NUM_DIMENSIONS,
    POOLING_WEIGHTS,
    TAKES_MAXIMUM,
    TOKEN_CONTRIBUTIONS,
    TOWARDS_ITSELF,
    contribution_inputs,
)
from attnlens_export.graph.read import read_structure
from attnlens_export.parity.compare import max_abs_difference
from attnlens_export.parity.grid import Case, Inputs, Padding, make_inputs
from attnlens_export.parity.measure import Graph, Subject
from attnlens_export.parity.reference import Tensors, run_float64, run_fp32
from attnlens_export.parity.result import allowed_error
from attnlens_export.parity.ties import make_clear_inputs
from attnlens_export.progress import StageProgress
from attnlens_export.published.pooling import read_pooling
from attnlens_model import Encoder, EncoderConfig

SEED = 20_261_122
HEADS_TOKENS = 16
Feed = dict[str, npt.NDArray[np.generic]]
Run = Callable[[Feed], Tensors]


def measure_contributions(subject: Subject, progress: StageProgress) -> ContributionsResult:
    """Run every case whose attention maps fit into memory, and one text with other gates of heads than 1.

    Args:
        subject: the bundle; its encoder helps to draw texts without near ties, and runs without some heads.
        progress: called before each case.

    Returns:
        The measurements. Nothing is raised for a graph that fails: see `ContributionsResult.failures`.
    """
    directory, config = subject.directory, subject.config
    dense = open_layers(directory, read_pooling(directory, config.vector_size).dense, config.vector_size)
    cases = [case for case in subject.cases if case.with_attentions]
    inputs = {case: make_clear_inputs(case, config, subject.encoder) for case in cases}
    # One graph after the other: two sessions would hold the weights twice.
    graph = Graph(directory, EMBEDDINGS_PATH)
    hidden = {case: graph.run(inputs[case])[HIDDEN_OUTPUT] for case in cases}
    del graph
    graph = Graph(directory, CONTRIBUTIONS_PATH)
    found = []
    for number, case in enumerate(cases):
        progress(str(case), number, len(cases))
        found.append(measure_case(graph.run_feed, case, inputs[case], config, hidden.pop(case), dense))
    progress("gates of heads", len(cases), len(cases))
    feed = _ablating_feed(config, _size(config, dense))
    found_ablated = graph.run_feed(feed)
    del graph  # PyTorch needs memory, too
    ablated = _compare_ablated(found_ablated, feed, subject, dense)
    structure = read_structure(directory / CONTRIBUTIONS_PATH)
    limit_to_sweep(structure)
    graph = Graph(directory, CONTRIBUTIONS_PATH, model=structure)
    slope_error = measure_slope(graph.run_feed, config, _size(config, dense))
    heads = HeadGates(str(_heads_case(config)), slope_error, *ablated)
    progress("", len(cases), len(cases))
    return ContributionsResult(tuple(found), heads)


def measure_slope(run: Run, config: EncoderConfig, size: int) -> float:
    """Return `HeadGates.slope_error`.

    Args:
        run: Graph of contributions whose gates are limited to the sweep, see `heads.limit_to_sweep`.
        config: Configuration of the encoder.
        size: E.
    """
    num_layers = config.num_layers
    feed = {
        name: np.repeat(array, num_layers + 1, axis=0) for name, array in _heads_feed(config, size).items()
    }
    generator = np.random.default_rng((SEED, num_layers))
    closed = np.ones(feed[HEAD_GATES].shape, dtype=np.float32)  # (L + 1, L, H)
    shape = closed.shape[-1:]
    for layer in range(num_layers):
        closed[layer + 1, layer] = generator.random(shape) * generator.integers(0, 2, shape)
    found = run(feed | {HEAD_GATES: closed})
    totals = _totals(found)
    contributed = found[HEAD_CONTRIBUTIONS][0].astype(np.float64)  # (L, H)
    changes = ((1.0 - closed.diagonal(axis1=0, axis2=1, offset=-1).T) * contributed).sum(axis=-1)  # (L,)
    return float(np.abs(totals[0] - totals[1:] - changes).max() / np.linalg.norm(feed[DIRECTION][0]))


def _ablating_feed(config: EncoderConfig, size: int) -> Feed:
    """Return the inputs of one text, with gates that remove random heads of all layers."""
    feed = _heads_feed(config, size)
    gates = np.random.default_rng(SEED).integers(0, 2, feed[HEAD_GATES].shape)
    return feed | {HEAD_GATES: gates.astype(np.float32)}


def _compare_ablated(
    found: Tensors, feed: Feed, subject: Subject, dense: Sequence[DenseLayer]
) -> tuple[float, float, float]:
    """Return the last three fields of `HeadGates`.

    Args:
        found: Outputs of the graph of contributions.
        feed: Its inputs, from `_ablating_feed`.
        subject: Bundle and reference.
        dense: Layers behind the pooling.
    """
    inputs = make_inputs(_heads_case(subject.config), subject.config)
    gates = feed[HEAD_GATES][0].astype(np.float32)
    with ablated_heads(subject.encoder, gates):
        hidden = run_fp32(subject.encoder, inputs, with_attentions=False)[HIDDEN_OUTPUT]
        exact = run_float64(subject.encoder, inputs, lambda _name, _output: None)
    everything = np.ones(feed[DIRECTION].shape[1], dtype=np.bool_)
    fp32, float64 = (_unit(_embed(feed, 0, states[0], dense, everything)) for states in (hidden, exact))
    unit = _unit(found[EMBEDDING_OUTPUT][0].astype(np.float64))
    direction = feed[DIRECTION][0].astype(np.float64)
    missed = abs(float(_totals(found)[0] - direction @ unit)) / float(np.linalg.norm(direction))
    limit = allowed_error(max_abs_difference(fp32, float64))
    return missed, max_abs_difference(unit, fp32), limit


@contextmanager
def ablated_heads(encoder: Encoder, gates: npt.NDArray[np.float32]) -> Iterator[None]:
    """Multiply the results of heads by gates (L, H) while the context is active."""
    layers = itertools.count()

    def multiply(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        layer = next(layers) % encoder.config.num_layers
        num_heads = encoder.config.layer_attentions[layer].num_heads
        of_layer = torch.from_numpy(gates[layer, :num_heads])
        return (args[0] * of_layer.repeat_interleave(args[0].shape[-1] // num_heads),)

    outputs = {id(layer): layer.get_submodule("attention.output") for layer in encoder.layers}
    hooks = [output.register_forward_pre_hook(multiply) for output in outputs.values()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _heads_case(config: EncoderConfig) -> Case:
    return Case(1, min(HEADS_TOKENS, config.max_tokens), Padding.NONE)


def _heads_feed(config: EncoderConfig, size: int) -> Feed:
    feed = make_feed(make_inputs(_heads_case(config), config), config, size)
    return feed | {TOWARDS_ITSELF: np.zeros(1, np.float32)}


def _size(config: EncoderConfig, dense: Sequence[DenseLayer]) -> int:
    """Return E."""
    return len(dense[-1].weight) if dense else config.vector_size


def _totals(found: Tensors) -> npt.NDArray[np.float64]:
    """Return the sum of scores and baseline of each text."""
    return np.asarray(found[TOKEN_CONTRIBUTIONS].sum(axis=1, dtype=np.float64) + found[BASELINE])


def _unit(vector: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.asarray(vector / np.linalg.norm(vector))


def measure_case(
    run: Run,
    case: Case,
    inputs: Inputs,
    config: EncoderConfig,
    hidden: npt.NDArray[np.float32],
    dense: Sequence[DenseLayer] = (),
) -> Completeness:
    """Measure one case.

    Args:
        run: the graph of contributions.
        case: the input shape.
        inputs: its tensors.
        config: of the encoder.
        hidden: (B, T, D), what the graph of embeddings makes of them.
        dense: the layers behind the pooling.
    """
    size = _size(config, dense)
    feed = make_feed(inputs, config, size)
    found = run(feed)
    live = inputs.attention_mask == 1
    rows = np.flatnonzero(live.any(axis=1))
    vectors = found[EMBEDDING_OUTPUT].astype(np.float64)  # (B, E)
    scores = found[TOKEN_CONTRIBUTIONS].astype(np.float64)  # (B, T)
    lengths = np.linalg.norm(vectors, axis=1)
    units = vectors / np.maximum(lengths, 1e-12)[:, None]
    kept = np.arange(size) < feed[NUM_DIMENSIONS].astype(np.int64)[:, None]
    directions = (feed[DIRECTION] + feed[TOWARDS_ITSELF].astype(np.float64)[:, None] * units) * kept
    sizes = np.maximum(np.linalg.norm(directions, axis=1), 1e-12)
    totals = scores.sum(axis=1) + found[BASELINE]
    errors = np.abs(totals - (directions * units).sum(axis=1)) / sizes
    pooled = [_embed(feed, int(row), hidden[row], dense, kept[row]) for row in rows]
    wrong = [
        np.linalg.norm(vectors[row] - wanted) / np.linalg.norm(wanted)
        for row, wanted in zip(rows, pooled, strict=True)
    ]
    return Completeness(
        case=str(case),
        incompleteness=float(errors[rows].max()),
        max_batch_difference=_max_batch_difference(run, inputs, feed, scores, sizes),
        embedding_error=float(np.max(wrong)),
        padding_score=float(np.abs(scores[~live]).max(initial=0.0)),
        is_finite=all(bool(np.isfinite(tensor).all()) for tensor in found.values()),
    )


def make_feed(inputs: Inputs, config: EncoderConfig, size: int) -> Feed:
    """Return the inputs of a graph of contributions: E = `size`; the same texts give the same numbers."""
    generator = np.random.default_rng((SEED, *inputs.input_ids.shape))
    live = inputs.attention_mask.astype(np.float32)
    count = len(live)
    rows = np.arange(count)
    gates = contribution_inputs(config, size)[HEAD_GATES][1:]
    return {
        **inputs.feed(),
        POOLING_WEIGHTS: live / np.maximum(live.sum(axis=1, keepdims=True), 1),
        TAKES_MAXIMUM: (rows % 2).astype(np.float32),
        DIRECTION: generator.standard_normal((count, size)).astype(np.float32),
        TOWARDS_ITSELF: (rows % 3 == 0).astype(np.float32) * np.float32(size**0.5),
        NUM_DIMENSIONS: np.where(rows % 4 == 3, (size + 1) // 2, size),  # noqa: PLR2004 - every fourth
        HEAD_GATES: np.ones((count, *(int(axis) for axis in gates)), dtype=np.float32),
    }


def _embed(
    feed: Feed,
    row: int,
    hidden: npt.NDArray[np.float32],
    dense: Sequence[DenseLayer],
    kept: npt.NDArray[np.bool_],
) -> npt.NDArray[np.float64]:
    """Return the embedding (E,) of the token vectors (T, D) of a text, by numpy."""
    pooling = Pooling.MAX if feed[TAKES_MAXIMUM][row] else Pooling.MEAN
    pooled = pool_weighted(hidden, feed[POOLING_WEIGHTS][row].astype(np.float32), pooling)
    [vector] = finish(pooled[None], dense)
    return np.asarray(vector.astype(np.float64) * kept)


def _max_batch_difference(
    run: Run, inputs: Inputs, feed: Feed, scores: npt.NDArray[np.float64], sizes: npt.NDArray[np.float64]
) -> float:
    """Run the shortest text of a batch alone and compare its scores."""
    lengths = inputs.attention_mask.sum(axis=1)
    if len(lengths) == 1:
        return 0.0
    row = int(np.where(lengths > 0, lengths, lengths.max() + 1).argmin())
    own = inputs.alone(row)
    length = own.input_ids.shape[1]
    alone: Feed = {name: array[row : row + 1] for name, array in feed.items()} | own.feed()
    alone[POOLING_WEIGHTS] = feed[POOLING_WEIGHTS][row : row + 1, :length]
    found = run(alone)[TOKEN_CONTRIBUTIONS][0]
    return float(np.abs(found - scores[row, :length]).max() / sizes[row])
