"""Computes the intermediate values of attention for one text. T tokens, D hidden size, H heads, K head size.

Intermediate values are added as outputs to an in-memory copy of the bundle's attention graph. PyTorch is not
needed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from attnlens_analysis.errors import NotTeachableError, TextError, UnknownHeadError, UnknownTokenError
from attnlens_analysis.structure import read_proto, structure_of
from attnlens_analysis.teach.diagrams import Sizes
from attnlens_analysis.teach.graph import (
    PLAIN,
    LayerNames,
    ProjectionNames,
    check_mechanism,
    find_layer,
    find_projections,
)
from attnlens_analysis.teach.numbers import Array, cosine, softmax
from attnlens_analysis.teach.parameters import LayerParameters, read_parameters
from attnlens_analysis.teach.recurrence import measure_recurrence
from attnlens_analysis.teach.tokens import Sentence, largest, read_sentence
from attnlens_analysis.timing import growing, measure
from attnlens_server.bundle import Bundle, OutputRole, open_bundle

# Threshold for masked scores: half of the mask value of exported encoders.
_MASKED = -(2.0**14)
NUM_PADDING = 4
_OTHER_ROLES = (OutputRole.HEAD_GATES, OutputRole.ATTENTION_COMPOSED)
# The word is the same token at the same position in all texts. The last one has a context like the first.
CONTEXT_WORD = "bank"
CONTEXTS = (
    "She took the money to the bank.",
    "She sat on the low grassy bank.",
    "He got a loan from the bank.",
)


@dataclass(frozen=True, slots=True)
class Contexts:
    """A word in three texts: two different contexts, and a third that is similar to the first.

    Attributes:
        word: The word. Its first token is compared.
        texts: The three texts.
        cosines: Cosine similarities of texts 1 and 2, and of texts 1 and 3, for the input of each layer and
            the final output. Empty if they could not be computed.
    """

    word: str
    texts: tuple[str, str, str]
    cosines: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class LayerValues:
    """Values of a layer for one text, in float64. See `LayerNames`.

    Attributes:
        entering: (T, D).
        query: (H, T, K).
        key: (H, T, K).
        value: (H, T, K).
        scores: (H, T, T).
        products: (H, T, T).
        weights: (H, T, T).
        context: (H, T, K).
        output: (T, D).
        residual: (T, D).
        scale: Scale of q.k.
        is_rotated: Whether rotary embeddings are applied to q and k.
        feed_forward: (T, D) output of the feed-forward layer, before it is added. None if it was not located.
        gates: (T, H) factors of the contexts, or None if the heads have no gates.
        composed: (H, T, T) weights after the composition of heads, which multiply the values. None if heads
            are not composed.
    """

    entering: Array
    query: Array
    key: Array
    value: Array
    scores: Array
    products: Array
    weights: Array
    context: Array
    output: Array
    residual: Array
    scale: float
    is_rotated: bool
    feed_forward: Array | None = None
    gates: Array | None = None
    composed: Array | None = None

    @property
    def applied(self) -> Array:
        """(H, T, T) weights that multiply the values."""
        return self.weights if self.composed is None else self.composed

    @property
    def gated_context(self) -> Array:
        """(H, T, K) contexts times gates, if there are gates."""
        return self.context if self.gates is None else self.context * self.gates.T[:, :, None]

    @property
    def active_weights(self) -> Array:
        """(H, T, T) attention weights, with 0 where the gate of the head is 0."""
        return self.weights if self.gates is None else self.weights * (self.gates.T[:, :, None] != 0)

    @cached_property
    def allowed(self) -> npt.NDArray[np.bool_]:
        """(H, T, T) positions that are not masked."""
        allowed: npt.NDArray[np.bool_] = self.scores - self.products > _MASKED
        return allowed

    @cached_property
    def biases(self) -> Array:
        """(H, T, T) terms added to the scaled products, with 0 at masked positions."""
        return np.where(self.allowed, self.scores - self.products, 0.0)

    @property
    def has_biases(self) -> bool:
        """Whether terms other than the mask are added to the scaled products."""
        return bool(np.abs(self.biases).max() > 1e-4)  # noqa: PLR2004 - above the rounding of fp32

    def weights_with(self, *, scale: float | None = None, query: Array | None = None) -> Array:
        """Recompute the weights (H, T, T) with another scale or other queries."""
        queries = self.query if query is None else query
        products = queries @ self.key.swapaxes(-1, -2)
        factor = self.scale if scale is None else scale
        return softmax(products * factor + self.biases, self.allowed)

    @property
    def weights_without_scale(self) -> Array:
        """Weights without the scale, or with 1 / sqrt(K) if the model has none."""
        return self.weights_with(scale=self.other_scale)

    @property
    def other_scale(self) -> float:
        """Scale to compare the scale of the model with."""
        return 1.0 if self.scale != 1.0 else self.query.shape[-1] ** -0.5


@dataclass(frozen=True)
class HeadTrace:
    """The values of one token in one head, with the context needed to explain them.

    Attributes:
        model_name: Model name.
        sentence: Tokenized text.
        layers: Values of each layer with softmax attention, by layer index.
        num_layers: Number of layers of the model.
        final: (T, D) output of the last layer.
        layer: Index of the selected layer.
        head: Index of the selected head.
        row: Index of the selected token.
        target: Index of the token whose attention is explained.
        rival: Index of the token to compare the target with. None if the text has no other tokens.
        costs: (length, milliseconds, bytes of all maps) for texts of several lengths.
        max_positions: Maximum length that the encoder supports.
        mechanism: Name of the attention mechanism of the selected layer.
        parameters: Parameters of the selected layer.
        padded: (T + P,) weights of the token with padding appended. None if there is no room for padding.
        contexts: A word in several contexts.
        races: (length, milliseconds of attention, milliseconds of a recurrent loop).
    """

    model_name: str
    sentence: Sentence
    layers: Mapping[int, LayerValues]
    num_layers: int
    final: Array
    layer: int
    head: int
    row: int
    target: int
    rival: int | None
    costs: Sequence[tuple[int, float, int]]
    max_positions: int
    mechanism: str
    parameters: LayerParameters
    padded: Array | None
    contexts: Contexts
    races: Sequence[tuple[int, float, float]]

    @property
    def values(self) -> LayerValues:
        """Values of the selected layer."""
        return self.layers[self.layer]

    @property
    def leaving(self) -> Array:
        """(T, D) residual stream after the layer, or the final output if unknown."""
        following = self.layers.get(self.layer + 1)
        return self.final if following is None else following.residual

    @property
    def sizes(self) -> Sizes:
        """Sizes of the selected layer."""
        heads, tokens, width = self.values.query.shape
        return Sizes(tokens, self.values.entering.shape[-1], heads, width, self.num_layers)

    @property
    def is_pre_norm(self) -> bool:
        """Whether the layer normalizes its input, so that the residual differs from it."""
        return not np.array_equal(self.values.entering, self.values.residual)

    @property
    def overlap(self) -> int:
        """Number of features that a head shares with each of its neighbors."""
        query, (num_heads, _, width) = self.parameters.query, self.values.query.shape
        return 0 if query is None else (width - query.shape[1] // num_heads) // 2

    @property
    def head_matrices(self) -> tuple[tuple[Array, Array], tuple[Array, Array]] | None:
        """W (D, K) and bias (K,) of the query and key projections of the head, or None if unknown.

        Heads that overlap also read columns of their neighbors, and zeros beyond the first and last head.
        """
        parameters, num_heads = self.parameters, len(self.values.query)
        if parameters.query is None or parameters.key is None:
            return None
        width = parameters.query.shape[1] // num_heads
        shared = num_heads * width // parameters.key.shape[1]
        pairs = []
        for weight, bias, head in (
            (parameters.query, parameters.query_bias, self.head),
            (parameters.key, parameters.key_bias, self.head // shared),
        ):
            columns = slice(head * width, (head + 1) * width + 2 * self.overlap)
            biases = np.zeros(weight.shape[1]) if bias is None else bias
            padded, padded_biases = (
                np.pad(each, [*[(0, 0)] * (each.ndim - 1), (self.overlap,) * 2]) for each in (weight, biases)
            )
            pairs.append((padded[:, columns], padded_biases[columns]))
        return pairs[0], pairs[1]

    @property
    def stream(self) -> list[Array]:
        """(T, D) input of each layer and the final output, if all layers are known."""
        return stream(self.layers, self.final) if len(self.layers) == self.num_layers else []

    @property
    def leaving_is_next(self) -> bool:
        """Whether `leaving` is the direct output of the layer."""
        return self.layer + 1 in self.layers or self.layer == self.num_layers - 1

    def label(self, row: int) -> str:
        """Return the label of a token."""
        return self.sentence.labels[row]

    def save(self, file: BinaryIO) -> None:
        """Save the values of the head in NPZ format.

        The arrays are x (T, D), q, k, v and context (T, K), scores, bias and weights (T, T), scale and tokens
        (T,), with scores = scale * q k^T + bias. The bias is a large negative number at masked positions.
        Depending on the mechanism, there are also composed (T, T), the weights that multiply v, and gates
        (T,), which multiply the context.
        """
        values, head = self.values, self.head
        others: dict[str, Any] = {} if values.composed is None else {"composed": values.composed[head]}
        others |= {} if values.gates is None else {"gates": values.gates[:, head]}
        np.savez_compressed(
            file,
            x=values.entering,
            q=values.query[head],
            k=values.key[head],
            v=values.value[head],
            context=values.context[head],
            scores=values.scores[head],
            bias=(values.scores - values.products)[head],
            weights=values.weights[head],
            scale=np.float64(values.scale),
            tokens=np.array(self.sentence.labels),
            **others,
        )


def trace_head(
    directory: Path,
    text: str,
    token: str,
    *,
    layer: int | None = None,
    head: int | None = None,
    target: str | None = None,
    rival: str | None = None,
    lengths: Sequence[int] = (),
    contexts: Contexts | None = None,
) -> HeadTrace:
    """Compute the attention of a text and select the head to explain.

    Args:
        directory: Bundle directory.
        text: Text. No prompt is added.
        token: Token to follow: its string, word or index.
        layer: Layer index, possibly negative. If None, it is selected together with the head.
        head: Head index. If None, the head with the largest weight on `target` or on a non-adjacent token.
        target: Token whose attention is explained. Defaults to the token with the largest weight.
        rival: Token to compare the target with. Defaults to the token with the next largest weight.
        contexts: Word and texts to compare. Defaults to "bank" in three texts.
        lengths: Lengths at which to measure the cost. Lengths beyond the maximum of the model are ignored.

    Raises:
        AnalysisError: An argument is invalid, or the attention of the model cannot be explained.
        attnlens_server.errors.StartupError: The bundle is invalid. ImportError: `onnx` is not installed.
    """
    bundle = open_bundle(directory)
    sentence = read_sentence(bundle, text)
    row = sentence.find(token)
    graph = bundle.graph_path("attention")
    run = LayerRun(graph, all_layers(bundle), bundle.model.outputs.hidden_state("attention").name)
    layers, final = run.values(sentence.input_ids)
    others, candidates = _other_tokens(sentence, row, target)
    layer = resolve_index("layer", layer, bundle.model.num_layers)
    selected_layer, selected_head = _select_head(layers, layer, head, row, candidates)
    values = layers[selected_layer]
    keys = _select_keys(sentence, largest(values.weights[selected_head, row], others), target, rival)
    lengths = [length for length in lengths if length <= bundle.model.max_positions]
    return HeadTrace(
        model_name=bundle.model.name,
        sentence=sentence,
        layers=layers,
        num_layers=bundle.model.num_layers,
        final=final,
        layer=selected_layer,
        head=selected_head,
        row=row,
        target=keys[0],
        rival=keys[1],
        costs=measure_cost(bundle, lengths) if lengths else (),
        max_positions=bundle.model.max_positions,
        mechanism=_mechanism(bundle, selected_layer),
        parameters=read_parameters(graph, selected_layer),
        padded=_padded_row(bundle, run, sentence, (selected_layer, selected_head, row)),
        contexts=_compare_contexts(bundle, run, contexts),
        races=measure_recurrence(values.entering.shape[-1], len(values.query), lengths),
    )


def _mechanism(bundle: Bundle, layer: int) -> str:
    """Return the attention mechanism of a layer. That of a module is a softmax of q.k, or was rejected."""
    mechanism = bundle.manifest.architecture.layers[layer].attention
    return "softmax" if mechanism in PLAIN else mechanism


def _select_keys(
    sentence: Sentence, ranked: Sequence[int], target: str | None, rival: str | None
) -> tuple[int, int | None]:
    """Return the requested keys, or those with the largest weights."""
    target_row = ranked[0] if target is None else sentence.find(target)
    remaining = (index for index in ranked if index != target_row)
    return target_row, next(remaining, None) if rival is None else sentence.find(rival)


def _other_tokens(
    sentence: Sentence, row: int, target: str | None
) -> tuple[npt.NDArray[np.bool_], Sequence[int]]:
    """Return a mask of the tokens that are neither special nor `row`, and the candidates for the target."""
    distances = np.abs(np.arange(len(sentence)) - row)
    others = ~sentence.is_special & (distances > 0)
    if not others.any():
        raise UnknownTokenError("TEXT has no other token. Use a longer text.")
    if target is not None:
        return others, [sentence.find(target)]
    distant = others & (distances > 1)
    return others, largest(np.zeros(len(sentence)), distant if distant.any() else others)


class LayerRun:
    """Computes the values of layers, with one session for several texts."""

    def __init__(self, path: Path, names: Mapping[int, LayerNames | ProjectionNames], hidden: str) -> None:
        """Open the graph.

        Args:
            path: Path of the attention graph.
            names: Value names by layer index.
            hidden: Name of the token vectors.
        """
        outputs = [hidden, *(name for each in names.values() for name in each.outputs)]
        self.names, self.hidden, self.outputs = names, hidden, list(dict.fromkeys(outputs))
        self.session = _open_with(path, self.outputs)

    def values(
        self, input_ids: npt.NDArray[np.int64], num_padding: int = 0
    ) -> tuple[dict[int, LayerValues], Array]:
        """Return the values of each layer and the final token vectors (T, D).

        Args:
            input_ids: (1, T) token ids.
            num_padding: Number of tokens at the end that are padding.
        """
        feed = _feed(self.session, input_ids)
        feed["attention_mask"][:, input_ids.shape[1] - num_padding :] = 0
        arrays = dict(zip(self.outputs, self.session.run(self.outputs, feed), strict=True))
        exact = {name: array[0].astype(np.float64) for name, array in arrays.items()}
        return {layer: _layer_values(each, exact) for layer, each in self.names.items()}, exact[self.hidden]


def compute(
    path: Path, names: Mapping[int, LayerNames], hidden: str, input_ids: npt.NDArray[np.int64]
) -> tuple[dict[int, LayerValues], Array]:
    """Compute the values of each layer and the final token vectors (T, D) for one text. See `LayerRun`."""
    return LayerRun(path, names, hidden).values(input_ids)


def stream(layers: Mapping[int, LayerValues], final: Array) -> list[Array]:
    """Return the (T, D) input of each layer and the final output."""
    return [*(layers[layer].residual for layer in sorted(layers)), final]


def _padded_row(
    bundle: Bundle, run: LayerRun, sentence: Sentence, selected: tuple[int, int, int]
) -> Array | None:
    """Return the weights (T + P,) of a row when P padding tokens are appended to the text."""
    if len(sentence) + NUM_PADDING > bundle.model.max_positions:
        return None
    padding = np.full((1, NUM_PADDING), bundle.manifest.architecture.pad_token_id, np.int64)
    layers, _ = run.values(np.concatenate([sentence.input_ids, padding], axis=1), NUM_PADDING)
    layer, head, row = selected
    weights: Array = layers[layer].weights[head, row]
    return weights


def _compare_contexts(bundle: Bundle, run: LayerRun, contexts: Contexts | None) -> Contexts:
    """Compare a word in several contexts, in each layer.

    Raises:
        AnalysisError: The contexts are given, and a text is too long or does not contain the word.
    """
    selected = contexts or Contexts(CONTEXT_WORD, CONTEXTS)
    vectors = []
    for text in selected.texts:
        try:
            sentence = read_sentence(bundle, text)
            row = sentence.find(selected.word)
        except (TextError, UnknownTokenError):
            if contexts is None:
                return selected
            raise
        vectors.append([each[row] for each in stream(*run.values(sentence.input_ids))])
    pairs = zip(*vectors, strict=True)
    return replace(selected, cosines=[(cosine(one, two), cosine(one, three)) for one, two, three in pairs])


def measure_cost(bundle: Bundle, lengths: Sequence[int]) -> list[tuple[int, float, int]]:
    """Return (length, milliseconds of the attention graph, bytes of all maps in fp32) for each length.

    The time is the median CPU time on one thread. Lengths whose times are within the noise are omitted.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = ort.InferenceSession(
        str(bundle.graph_path("attention")), options, providers=["CPUExecutionProvider"]
    )
    feeds = [
        _feed(session, np.full((1, length), bundle.model.vocab_size // 2, np.int64)) for length in lengths
    ]
    timings = measure([partial(session.run, None, feed) for feed in feeds])
    return [
        (lengths[index], timings[index].median_ms, bundle.model.pair_bytes * lengths[index] ** 2)
        for index in growing([[timing] for timing in timings])
    ]


def locate_layers(bundle: Bundle, required: int | None) -> dict[int, LayerNames]:
    """Locate the values of each layer that can be decomposed.

    Raises:
        NotTeachableError: The required layer or, if None, every layer cannot be decomposed.
    """
    graph = structure_of(read_proto(bundle.graph_path("attention")))
    outputs = bundle.model.outputs.layers(OutputRole.ATTENTION_WEIGHTS)
    names: dict[int, LayerNames] = {}
    last_error = NotTeachableError("the model has no layer with attention weights")
    for layer, described in enumerate(bundle.manifest.architecture.layers):
        try:
            check_mechanism(layer, described.attention)
            names[layer] = find_layer(graph, layer, outputs[layer].name)
        except NotTeachableError as error:
            last_error = error
            if layer == required:
                raise
    if not names:
        raise last_error
    return names


def all_layers(bundle: Bundle) -> dict[int, LayerNames | ProjectionNames]:
    """Locate the values of all layers. Attention that cannot be decomposed has only projections and weights.

    Raises:
        NotTeachableError: A layer has no query, key and value projections.
    """
    graph = structure_of(read_proto(bundle.graph_path("attention")))
    outputs = bundle.model.outputs.layers(OutputRole.ATTENTION_WEIGHTS)
    names: dict[int, LayerNames | ProjectionNames] = {}
    for layer, described in enumerate(bundle.manifest.architecture.layers):
        output = outputs[layer]
        try:
            located = find_layer(graph, layer, output.name)
            is_plain = described.attention in PLAIN
            names[layer] = located if is_plain else replace(located, is_rotated=False)
        except NotTeachableError:
            sizes = (described.num_heads, described.num_key_value_heads or described.num_heads)
            names[layer] = find_projections(graph, layer, output, sizes)
        roles = {role: bundle.model.outputs.layers(role).get(layer) for role in _OTHER_ROLES}
        gates, composed = ("" if each is None else each.name for each in roles.values())
        names[layer] = replace(names[layer], gates=gates, composed=composed)
    return names


def _open_with(path: Path, outputs: Sequence[str]) -> ort.InferenceSession:
    """Open a copy of a graph with additional outputs, using the original weights file."""
    from onnx import TensorProto, helper  # noqa: PLC0415 - of the extra `export`

    proto = read_proto(path)
    present = {output.name for output in proto.graph.output}
    proto.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
        for name in outputs
        if name not in present
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(path.parent.resolve())
    )
    return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _feed(
    session: ort.InferenceSession, input_ids: npt.NDArray[np.int64]
) -> dict[str, npt.NDArray[np.int64]]:
    """Return the graph inputs for a single text without padding."""
    all_inputs = {
        "input_ids": input_ids,
        "attention_mask": np.ones_like(input_ids),
        "token_type_ids": np.zeros_like(input_ids),
    }
    return {value.name: all_inputs[value.name] for value in session.get_inputs()}


def _layer_values(names: LayerNames | ProjectionNames, arrays: Mapping[str, Array]) -> LayerValues:
    feed_forward = arrays.get(names.feed_forward)
    if isinstance(names, ProjectionNames):
        return _projected_values(names, arrays, feed_forward)
    return LayerValues(
        entering=arrays[names.entering],
        query=arrays[names.query],
        key=arrays[names.key_transposed].swapaxes(-1, -2),
        value=arrays[names.value],
        scores=arrays[names.scores],
        products=arrays[names.products],
        weights=arrays[names.weights],
        context=arrays[names.context],
        output=arrays[names.output],
        residual=arrays[names.residual],
        scale=names.scale,
        is_rotated=names.is_rotated,
        feed_forward=feed_forward,
        gates=arrays.get(names.gates),
        composed=arrays.get(names.composed),
    )


def _projected_values(
    names: ProjectionNames, arrays: Mapping[str, Array], feed_forward: Array | None
) -> LayerValues:
    """Return values whose scores are scale * q.k plus the terms that explain the weights of the graph."""
    heads, shared = names.num_heads, names.num_key_value_heads
    query = _split(arrays[names.query], heads)
    key, value = (
        _split(arrays[name], shared).repeat(heads // shared, 0) for name in (names.key, names.value)
    )
    weights = names.dense(arrays[names.weights])
    allowed = weights > 0
    products = names.scale * query @ key.swapaxes(-1, -2)
    with np.errstate(divide="ignore", invalid="ignore"):  # weights of 0, and rows of padding
        expected = softmax(products, allowed)
        terms = np.where(allowed, np.log(weights) - np.log(expected), 2 * _MASKED)
    return LayerValues(
        entering=arrays[names.entering],
        query=query,
        key=key,
        value=value,
        scores=products + terms,
        products=products,
        weights=weights,
        context=arrays.get(names.composed, weights) @ value,
        output=arrays[names.output],
        residual=arrays[names.residual],
        scale=names.scale,
        is_rotated=False,
        feed_forward=feed_forward,
        gates=arrays.get(names.gates),
        composed=arrays.get(names.composed),
    )


def _split(projected: Array, num_heads: int) -> Array:
    """(T, H K) -> (H, T, K)."""
    return projected.reshape(len(projected), num_heads, -1).swapaxes(0, 1)


def resolve_index(kind: str, number: int | None, count: int) -> int | None:
    """Convert a layer or head index, possibly negative, to a non-negative one.

    Raises:
        UnknownHeadError: The index is out of range.
    """
    if number is None:
        return None
    if not -count <= number < count:
        raise UnknownHeadError(f"{kind} {number} does not exist. Use 0 to {count - 1}, or -{count} to -1.")
    return number % count


def _select_head(
    layers: Mapping[int, LayerValues],
    layer: int | None,
    head: int | None,
    row: int,
    targets: Sequence[int],
) -> tuple[int, int]:
    """Return the given layer and head, or those with the largest weight from `row` to one of `targets`."""
    best, selected = -1.0, (0, 0)
    for number in layers if layer is None else [layer]:
        weights = layers[number].active_weights
        requested = resolve_index("head", head, len(weights))
        for each in range(len(weights)) if requested is None else [requested]:
            if (highest := float(weights[each, row, list(targets)].max())) > best:
                best, selected = highest, (number, each)
    return selected
