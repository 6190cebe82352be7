"""Check of the contribution graph: contributions must add up. Measured on the parity grid.

Each text of a batch tests another combination: mean or maximum pooling, a random direction or the text's own
embedding, all embedding components or half of them. For a classifier, the pooling is that of its head.

The embedding of a classifier consists of its logits, which can be near 0 while contributions cancel, or the
products that the last layer adds up. Its errors are therefore relative to the larger sum of absolute values,
and to max(1, |p|) instead of |p|.

Shapes: B texts in a batch, T tokens, D hidden size, E embedding size, L layers, H heads.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from attnlens.dense import DenseLayer, open_layers
from attnlens.explanations import pool_weighted, pooling_weights
from attnlens.pooling import Pooling, finish
from attnlens.v1.manifest_pb2 import GateKind, OutputRole
from attnlens_export.contributions.heads import limit_to_sweep
from attnlens_export.contributions.reference import (
    Contributions,
    Reference,
    difference,
    reference_contributions,
)
from attnlens_export.graph.names import (
    BASELINE,
    CONTRIBUTIONS_PATH,
    DIRECTION,
    EMBEDDING_OUTPUT,
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
from attnlens_export.parity.grid import Case, Inputs, Padding, make_inputs
from attnlens_export.parity.measure import (
    NOT_FINITE,
    GridGraph,
    Subject,
    measure_grid,
    shortest_text,
)
from attnlens_export.parity.measure import Run as GridRun
from attnlens_export.parity.reference import (
    RUN_LOCK,
    FloatArray,
    Tensors,
    allowed_error,
    max_abs_difference,
    run_float64,
    run_fp32,
)
from attnlens_export.parity.sessions import Graph
from attnlens_export.progress import StageProgress
from attnlens_export.published.classifier import has_head
from attnlens_export.published.pooling import read_pooling
from attnlens_export.results import Comparison, Result, max_or_nan
from attnlens_model import Encoder, EncoderConfig, ModuleEncoder

LIMIT = 1e-5
SEED = 20_261_122
HEADS_TOKENS = 16
TOKENS = OutputRole.OUTPUT_ROLE_TOKEN_CONTRIBUTIONS
HEADS = OutputRole.OUTPUT_ROLE_HEAD_CONTRIBUTIONS
_MIN_LENGTH = 8.0
_MIN_GRADIENT_TEXTS, _MIN_GRADIENT_TOKENS = 4, 7

Float64Array = npt.NDArray[np.float64]
Feed = dict[str, npt.NDArray[np.generic]]
Run = Callable[[Feed], Tensors]


def measure_contributions(
    subject: Subject, hidden: Mapping[Case, npt.NDArray[np.floating]], progress: StageProgress
) -> Result:
    """Measure all cases whose attention fits into memory, and one text with head gates other than 1.

    Args:
        subject: Bundle and reference.
        hidden: Token vectors (B, T, D) of the embeddings graph, by case.
        progress: Called before each case.

    Returns:
        The measurements. A graph that fails does not raise an exception: see `Result.failures`.
    """
    directory, config = subject.directory, subject.config
    subject = replace(subject, cases=[case for case in subject.cases if case.with_attentions])
    dense, head = open_head(directory, config)
    feed = _ablating_feed(config, _size(config, dense), head)
    # One graph after the other, because two sessions would hold the weights twice.
    comparisons, ablated = _run_graph(subject, hidden, (dense, head), feed, progress)
    num_cases = len(subject.cases)
    progress("head gates", num_cases, num_cases)
    without_heads = _compare_ablated(ablated, feed, subject, dense, head)
    structure = read_structure(directory / CONTRIBUTIONS_PATH)
    limit_to_sweep(structure)
    graph = Graph(directory, CONTRIBUTIONS_PATH, model=structure)
    slope = compare_slope(graph.run_feed, config, _size(config, dense), head)
    progress("", num_cases, num_cases)
    return Result(
        title="Contributions of tokens",
        reference="the product of the direction and the embedding, and PyTorch's gradients",
        inputs=f"{num_cases} input shapes, and one text with other head gates",
        comparisons=(*comparisons, slope, *without_heads),
    )


def store_gradients(subject: Subject) -> None:
    """Compute the results of the PyTorch encoder that `measure_contributions` needs."""
    dense, head = open_head(subject.directory, subject.config)
    _gradients(subject, dense, head)
    _states_without_heads(subject, _ablating_feed(subject.config, _size(subject.config, dense), head))


def open_head(directory: Path, config: EncoderConfig) -> tuple[Sequence[DenseLayer], Pooling | None]:
    """Return the dense layers after the pooling of a bundle, and the pooling if it is a classifier."""
    pooling = read_pooling(directory, config.vector_size)
    dense = open_layers(directory, pooling.dense, config.vector_size)
    return dense, Pooling(pooling.pooling) if has_head(directory) else None


def _run_graph(
    subject: Subject,
    hidden: Mapping[Case, npt.NDArray[np.floating]],
    dense_and_head: tuple[Sequence[DenseLayer], Pooling | None],
    feed: Feed,
    progress: StageProgress,
) -> tuple[list[Comparison], Tensors]:
    """Return the measurements of all cases and the outputs for `feed`. Releases the graph afterwards."""
    graph = Graph(subject.directory, CONTRIBUTIONS_PATH)
    measured = to_grid_graph(subject, graph.run_feed, lambda case, _: hidden[case], dense_and_head)
    grid = measure_grid(subject, {CONTRIBUTIONS_PATH: measured}, progress)
    return grid[CONTRIBUTIONS_PATH].comparisons, graph.run_feed(feed)


def to_grid_graph(
    subject: Subject,
    run: Run,
    hidden: Callable[[Case, Inputs], npt.NDArray[np.floating]],
    dense_and_head: tuple[Sequence[DenseLayer], Pooling | None],
    *,
    is_reduced: bool = False,
) -> GridGraph:
    """Return the contribution graph as `measure_grid` runs it.

    Args:
        subject: Bundle and reference.
        run: Runs the contribution graph.
        hidden: Returns the token vectors (B, T, D) of a case.
        dense_and_head: Result of `open_head`.
        is_reduced: Whether the graph is computed in bf16 or fp16. Incompleteness then has no limit, and other
            figures are omitted.
    """

    def measure(case: Case, inputs: Inputs) -> GridRun:
        found = _measure_case_of(subject, run, case, inputs, hidden(case, inputs), dense_and_head)
        if is_reduced:
            kind = GateKind.GATE_KIND_MAX_INCOMPLETENESS
            found = [replace(figure, limit=math.inf) for figure in found if figure.kind == kind]
        return GridRun(CONTRIBUTIONS_PATH, {}, {}, found)

    return GridGraph(measure, has_attention=True)


def _measure_case_of(
    subject: Subject,
    run: Run,
    case: Case,
    inputs: Inputs,
    hidden: npt.NDArray[np.floating],
    dense_and_head: tuple[Sequence[DenseLayer], Pooling | None],
) -> list[Comparison]:
    """Measure one case of a bundle, and for one of the cases also the errors against PyTorch's gradients."""
    dense, head = dense_and_head
    exact = subject.references.float64(inputs)[HIDDEN_OUTPUT] if head is not None else None
    found = measure_case(run, case, inputs, subject.config, hidden, dense, head, exact)
    if case != _case_with_gradients(subject.cases):
        return found
    feed, reference = _gradients(subject, dense, head)
    if reference is None:
        return found
    outputs = run(feed)
    scales = _scales(feed, outputs, hidden, dense, is_logit=head is not None)
    return [*_compare_scores(case, outputs, feed, reference, scales), *found]


def _gradients(
    subject: Subject, dense: Sequence[DenseLayer], head: Pooling | None
) -> tuple[Feed, Reference | None]:
    """Return the inputs whose contributions are compared with PyTorch's gradients, and the gradients."""
    inputs = subject.references.inputs(_case_with_gradients(subject.cases), subject.config)
    feed = make_feed(inputs, subject.config, _size(subject.config, dense), head)
    if head is not None:
        # Logits are not normalized: if they are near 0, the direction p / |p| is not exact in fp32.
        feed[TOWARDS_ITSELF] = np.zeros(len(inputs.input_ids), np.float32)
    reference = subject.references.get(
        "gradients", lambda encoder: reference_contributions(encoder, inputs, feed, dense)
    )
    return feed, reference


def _case_with_gradients(cases: Sequence[Case]) -> Case:
    """Return the smallest case with several texts of several tokens, padded in the middle if possible."""

    def key(case: Case) -> tuple[bool, bool, bool, int, bool]:
        is_small = case.batch_size < _MIN_GRADIENT_TEXTS, case.length < _MIN_GRADIENT_TOKENS
        size = case.batch_size * case.length
        return case.padding is Padding.EMPTY_ROW, *is_small, size, case.padding is not Padding.MIDDLE

    return min((case for case in cases if case.with_attentions), key=key)


def _compare_scores(
    case: Case, outputs: Tensors, feed: Feed, reference: Reference, scales: Float64Array
) -> Iterator[Comparison]:
    """Compare the parts of d . p of tokens and heads with PyTorch's, for texts with tokens.

    Errors are divided by |d| |p|. For a classifier, they are divided by `_scales`, times |p|.
    """
    live = feed[POOLING_WEIGHTS].any(axis=1)
    lengths = np.linalg.norm(outputs[EMBEDDING_OUTPUT].astype(np.float64), axis=1)
    scales = np.maximum(scales * lengths, 1e-12)
    tokens = outputs[TOKEN_CONTRIBUTIONS] * lengths[:, None]
    has_heads = reference.fp32.heads is not None
    heads = outputs[HEAD_CONTRIBUTIONS] * lengths[:, None, None] if has_heads else None
    found = Contributions(tokens, heads)
    rounding = reference.token_error, reference.head_error
    roles = (TOKENS, HEADS) if has_heads else (TOKENS,)
    for role, error, own in zip(roles, difference(found, reference.fp32), rounding, strict=False):
        value, limit = (float((errors / scales)[live].max()) for errors in (error, own))
        yield Comparison(
            CONTRIBUTIONS_PATH,
            str(case),
            value,
            allowed_error(limit),
            GateKind.GATE_KIND_MAX_ABS_ERROR,
            role,
            "the reference is PyTorch's gradient",
        )


def compare_slope(run: Run, config: EncoderConfig, size: int, head: Pooling | None = None) -> Comparison:
    """Compare the contributions of heads with the effect of closed heads on one text.

    For each layer, the sum of scores and baseline is computed twice: with all gates at 1, and with random
    gates in the sweep alone, half of them 0. The change must equal the contributions of the heads. The figure
    is the maximum difference, divided by |d|.

    Args:
        run: Runs the contribution graph with gates limited to the sweep, see `heads.limit_to_sweep`.
        config: Configuration of the encoder.
        size: E.
        head: Pooling of a classifier.
    """
    num_layers = config.num_layers
    feed = {
        name: np.repeat(array, num_layers + 1, axis=0)
        for name, array in _heads_feed(config, size, head).items()
    }
    generator = np.random.default_rng((SEED, num_layers))
    closed = np.ones(feed[HEAD_GATES].shape, dtype=np.float32)  # (L + 1, L, H)
    shape = closed.shape[-1:]
    for layer in range(num_layers):
        closed[layer + 1, layer] = generator.random(shape) * generator.integers(0, 2, shape)
    outputs = run(feed | {HEAD_GATES: closed})
    totals = _totals(outputs)
    contributions = outputs[HEAD_CONTRIBUTIONS][0].astype(np.float64)  # (L, H)
    changes = ((1.0 - closed.diagonal(axis1=0, axis2=1, offset=-1).T) * contributions).sum(axis=-1)  # (L,)
    scale = float(np.linalg.norm(feed[DIRECTION][0]))
    if head is not None:
        scale = max(scale, float(_sums_of_parts(outputs).max()))
    error = float(np.abs(totals[0] - totals[1:] - changes).max() / scale)
    kind = GateKind.GATE_KIND_MAX_INCOMPLETENESS
    return Comparison(CONTRIBUTIONS_PATH, str(_heads_case(config)), error, LIMIT, kind, HEADS)


def _ablating_feed(config: EncoderConfig, size: int, head: Pooling | None) -> Feed:
    """Return the inputs for one text with gates that remove random heads of all layers."""
    feed = _heads_feed(config, size, head)
    gates = np.random.default_rng(SEED).integers(0, 2, feed[HEAD_GATES].shape)
    return feed | {HEAD_GATES: gates.astype(np.float32)}


def _compare_ablated(
    outputs: Tensors, feed: Feed, subject: Subject, dense: Sequence[DenseLayer], head: Pooling | None
) -> Iterator[Comparison]:
    """Compare the sum of scores, and the embedding scaled to length 1, without random heads of all layers.

    Logits are not scaled. The embedding is not compared for a user's module, whose heads can't be removed in
    PyTorch.

    Args:
        outputs: Outputs of the contribution graph for `feed`.
        feed: Inputs from `_ablating_feed`.
        subject: Bundle and reference.
        dense: Dense layers after the pooling.
        head: Pooling of a classifier.
    """
    unit = _unit(outputs[EMBEDDING_OUTPUT][0].astype(np.float64))
    direction = feed[DIRECTION][0].astype(np.float64)
    scale = float(np.linalg.norm(direction))
    if head is not None:
        scale = max(scale, float(_sums_of_parts(outputs)[0]))
    incompleteness = abs(float(_totals(outputs)[0] - direction @ unit)) / scale
    case = _heads_case(subject.config)
    name, what = f"{case} without some heads", "incompleteness without some heads"
    yield Comparison(CONTRIBUTIONS_PATH, name, incompleteness, LIMIT, what=what)
    states = _states_without_heads(subject, feed)
    if states is None:
        return
    all_components = np.ones(feed[DIRECTION].shape[1], dtype=np.bool_)
    fp32, float64 = (_embed(feed, 0, hidden[0], dense, all_components) for hidden in states)
    found = outputs[EMBEDDING_OUTPUT][0].astype(np.float64)
    if head is None:
        found, fp32, float64 = unit, _unit(fp32), _unit(float64)
    limit = allowed_error(max_abs_difference(fp32, float64)) * max(1.0, float(np.abs(fp32).max()))
    kind, role = GateKind.GATE_KIND_MAX_ABS_ERROR, OutputRole.OUTPUT_ROLE_EMBEDDING
    yield Comparison(CONTRIBUTIONS_PATH, name, max_abs_difference(found, fp32), limit, kind, role)


def _states_without_heads(subject: Subject, feed: Feed) -> tuple[FloatArray, FloatArray] | None:
    """Return hidden states (B, T, D) of PyTorch in fp32 and float64. None for a user's module."""
    inputs = make_inputs(_heads_case(subject.config), subject.config)

    def compute(encoder: Encoder | ModuleEncoder) -> tuple[FloatArray, FloatArray] | None:
        if not isinstance(encoder, Encoder):
            return None
        with ablated_heads(encoder, feed[HEAD_GATES][0].astype(np.float32)):
            hidden = run_fp32(encoder, inputs, with_attentions=False)[HIDDEN_OUTPUT]
            return hidden, run_float64(encoder, inputs, lambda _name, _output: None)

    return subject.references.get("without heads", compute)


@contextmanager
def ablated_heads(encoder: Encoder, gates: npt.NDArray[np.float32]) -> Iterator[None]:
    """Multiply the outputs of heads by gates (L, H) while the context is active."""
    layers = itertools.count()

    def multiply(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        layer = next(layers) % encoder.config.num_layers
        num_heads = encoder.config.layer_attentions[layer].num_heads
        of_layer = torch.from_numpy(gates[layer, :num_heads])
        return (args[0] * of_layer.repeat_interleave(args[0].shape[-1] // num_heads),)

    outputs = {id(layer): layer.get_submodule("attention.output") for layer in encoder.layers}
    with RUN_LOCK:
        hooks = [output.register_forward_pre_hook(multiply) for output in outputs.values()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _heads_case(config: EncoderConfig) -> Case:
    return Case(1, min(HEADS_TOKENS, config.max_tokens), Padding.NONE)


def _heads_feed(config: EncoderConfig, size: int, head: Pooling | None) -> Feed:
    feed = make_feed(make_inputs(_heads_case(config), config), config, size, head)
    return feed | {TOWARDS_ITSELF: np.zeros(1, np.float32)}


def _size(config: EncoderConfig, dense: Sequence[DenseLayer]) -> int:
    """Return E."""
    return len(dense[-1].weight) if dense else config.vector_size


def _totals(outputs: Tensors) -> Float64Array:
    """Return the sum of scores and baseline of each text."""
    return np.asarray(outputs[TOKEN_CONTRIBUTIONS].sum(axis=1, dtype=np.float64) + outputs[BASELINE])


def _sums_of_parts(outputs: Tensors) -> Float64Array:
    """Return the sum of |scores| and |baseline| of each text (B,)."""
    scores = np.abs(outputs[TOKEN_CONTRIBUTIONS]).sum(axis=1, dtype=np.float64)
    return np.asarray(scores + np.abs(outputs[BASELINE]))


def _unit(vector: Float64Array) -> Float64Array:
    return np.asarray(vector / np.linalg.norm(vector))


def measure_case(
    run: Run,
    case: Case,
    inputs: Inputs,
    config: EncoderConfig,
    hidden: npt.NDArray[np.floating],
    dense: Sequence[DenseLayer] = (),
    head: Pooling | None = None,
    exact: npt.NDArray[np.floating] | None = None,
) -> list[Comparison]:
    """Measure one case. Each figure is the maximum over texts.

    - The incompleteness of scores is |sum of scores + baseline - d · p / |p|| / |d|. For a classifier, it is
      divided by the sum of |scores| and |baseline|, or by that of the products of its last layer, if larger.
    - The difference of a score of the shortest text in the batch and alone is divided by the same.
    - The error of the embedding is |p - q| / |q|, where q is computed from the token vectors of the
      embeddings graph. Logits are less exact than token vectors if their terms cancel, in PyTorch too.

    Args:
        run: Runs the contribution graph.
        case: Input shape.
        inputs: Inputs of the case.
        config: Configuration of the encoder.
        hidden: Token vectors (B, T, D) of the embeddings graph.
        dense: Dense layers after the pooling.
        head: Pooling of a classifier, whose embeddings are logits.
        exact: Token vectors (B, T, D) of PyTorch in float64, from which the limit of a classifier follows.
    """
    size = _size(config, dense)
    feed = make_feed(inputs, config, size, head)
    outputs = run(feed)
    live = inputs.attention_mask == 1
    rows = np.flatnonzero(live.any(axis=1))
    vectors = outputs[EMBEDDING_OUTPUT].astype(np.float64)  # (B, E)
    scores = outputs[TOKEN_CONTRIBUTIONS].astype(np.float64)  # (B, T)
    directions, units, kept = _directions(feed, outputs)
    norms = _scales(feed, outputs, hidden, dense, is_logit=head is not None)
    totals = scores.sum(axis=1) + outputs[BASELINE]
    errors = np.abs(totals - (directions * units).sum(axis=1)) / norms
    embedding_errors, own_errors = [], [0.0]
    for row in rows:
        expected = _embed(feed, int(row), hidden[row], dense, kept[row])
        norm = np.linalg.norm([*expected, float(head is not None)])
        embedding_errors.append(float(np.linalg.norm(vectors[row] - expected) / norm))
        if exact is not None:
            error = expected - _embed(feed, int(row), exact[row], dense, kept[row])
            own_errors.append(float(np.linalg.norm(error) / norm))
    batch_difference = _max_batch_difference(run, inputs, feed, scores, norms)
    num_not_finite = sum(not np.isfinite(tensor).all() for tensor in outputs.values())
    compare = partial(Comparison, CONTRIBUTIONS_PATH, str(case))
    return [
        compare(float(errors[rows].max()), LIMIT, GateKind.GATE_KIND_MAX_INCOMPLETENESS, TOKENS),
        compare(batch_difference, LIMIT, GateKind.GATE_KIND_MAX_BATCH_DIFFERENCE, TOKENS),
        compare(float(num_not_finite), 0.0, what=NOT_FINITE),
        compare(max_or_nan(embedding_errors), allowed_error(max(own_errors)), what="error of the embedding"),
        compare(float(np.abs(scores[~live]).max(initial=0.0)), 0.0, what="score of padding"),
    ]


def make_feed(inputs: Inputs, config: EncoderConfig, size: int, head: Pooling | None = None) -> Feed:
    """Return the inputs of the contribution graph. The same input shape always gets the same directions.

    Args:
        inputs: Tokens.
        config: Configuration of the encoder.
        size: E.
        head: Pooling of a classifier. For embeddings, texts are pooled by their mean or maximum.
    """
    generator = np.random.default_rng((SEED, *inputs.input_ids.shape))
    live = inputs.attention_mask.astype(np.bool_)
    count = len(live)
    weights = np.zeros(live.shape, np.float32)
    for row in np.flatnonzero(live.any(axis=1)):
        weights[row, live[row]] = pooling_weights(head or Pooling.MEAN, int(live[row].sum()))
    rows = np.arange(count)
    gates = contribution_inputs(config, size)[HEAD_GATES][1:]
    return {
        **inputs.feed(),
        POOLING_WEIGHTS: weights,
        TAKES_MAXIMUM: (rows % 2).astype(np.float32),
        DIRECTION: generator.standard_normal((count, size)).astype(np.float32),
        # Longer than the random direction if there are few components, or the two could cancel.
        TOWARDS_ITSELF: (rows % 3 == 0).astype(np.float32) * np.float32(max(size**0.5, _MIN_LENGTH)),
        NUM_DIMENSIONS: np.where(rows % 4 == 3, (size + 1) // 2, size),  # noqa: PLR2004 - every fourth
        HEAD_GATES: np.ones((count, *(int(axis) for axis in gates)), dtype=np.float32),
    }


def _directions(feed: Feed, outputs: Tensors) -> tuple[Float64Array, Float64Array, npt.NDArray[np.bool_]]:
    """Return d, p / |p| and which components are used, each (B, E)."""
    vectors = outputs[EMBEDDING_OUTPUT].astype(np.float64)
    units = vectors / np.maximum(np.linalg.norm(vectors, axis=1), 1e-12)[:, None]
    kept = np.arange(vectors.shape[1]) < feed[NUM_DIMENSIONS].astype(np.int64)[:, None]
    towards_itself = feed[TOWARDS_ITSELF].astype(np.float64)[:, None]
    directions = np.asarray((feed[DIRECTION] + towards_itself * units) * kept, dtype=np.float64)
    return directions, units, kept


def _scales(
    feed: Feed,
    outputs: Tensors,
    hidden: npt.NDArray[np.floating],
    dense: Sequence[DenseLayer],
    *,
    is_logit: bool,
) -> Float64Array:
    """Return the numbers (B,) that errors of scores are divided by, see `measure_case`."""
    directions, _, _ = _directions(feed, outputs)
    lengths = np.linalg.norm(directions, axis=1)
    scales = np.maximum(lengths, 1e-12)
    if is_logit:
        vectors = outputs[EMBEDDING_OUTPUT].astype(np.float64)
        scales = np.maximum(scales, _sums_of_parts(outputs))
        for row in np.flatnonzero(feed[POOLING_WEIGHTS].any(axis=1)):
            factor = lengths[row] / max(float(np.linalg.norm(vectors[row])), 1e-12)
            scales[row] = max(scales[row], factor * _sum_of_products(feed, int(row), hidden[row], dense))
    return np.asarray(scales)


def _embed(
    feed: Feed,
    row: int,
    hidden: npt.NDArray[np.floating],
    dense: Sequence[DenseLayer],
    kept: npt.NDArray[np.bool_],
) -> Float64Array:
    """Compute the embedding (E,) of a text from its token vectors (T, D) with NumPy."""
    pooling = Pooling.MAX if feed[TAKES_MAXIMUM][row] else Pooling.MEAN
    pooled = pool_weighted(hidden, feed[POOLING_WEIGHTS][row].astype(np.float32), pooling)
    [vector] = finish(pooled[None], dense)
    return np.asarray(vector.astype(np.float64) * kept)


def _sum_of_products(
    feed: Feed, row: int, hidden: npt.NDArray[np.float32], dense: Sequence[DenseLayer]
) -> float:
    """Return the largest sum of absolute values that the last layer adds up to a logit."""
    pooling = Pooling.MAX if feed[TAKES_MAXIMUM][row] else Pooling.MEAN
    pooled = pool_weighted(hidden, feed[POOLING_WEIGHTS][row].astype(np.float32), pooling)
    inputs = finish(pooled[None], dense[:-1])
    return float((np.abs(inputs) @ np.abs(dense[-1].weight).T).max())


def _max_batch_difference(
    run: Run, inputs: Inputs, feed: Feed, scores: Float64Array, norms: Float64Array
) -> float:
    """Run the shortest text alone, and return the maximum difference of its scores divided by |d|."""
    row = shortest_text(inputs)
    if row is None:
        return 0.0
    alone = inputs.alone(row)
    length = alone.input_ids.shape[1]
    alone_feed: Feed = {name: array[row : row + 1] for name, array in feed.items()} | alone.feed()
    alone_feed[POOLING_WEIGHTS] = feed[POOLING_WEIGHTS][row : row + 1, :length]
    alone_scores = run(alone_feed)[TOKEN_CONTRIBUTIONS][0]
    return float(np.abs(alone_scores - scores[row, :length]).max() / norms[row])
