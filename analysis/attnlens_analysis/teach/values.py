"""What a model computes for one text inside of its attention. T tokens, D width, H heads, K head width.

The bundle's attention graph is copied in memory, and inner values are made outputs of the copy. Nothing is
written, and PyTorch is not needed.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from attnlens_analysis.errors import NotTeachableError, UnknownHeadError, UnknownTokenError
from attnlens_analysis.structure import read_proto, structure_of
from attnlens_analysis.teach.graph import LayerNames, find_layer, refuse_mechanism
from attnlens_analysis.teach.numbers import Array, softmax
from attnlens_analysis.teach.tokens import Sentence, largest, read_sentence
from attnlens_server.bundle import Bundle, OutputRole, open_bundle

# A masked score has this much or more taken off: half of what the exported encoders take off.
_MASKED = -(2.0**14)


@dataclass(frozen=True)
class LayerValues:
    """The values of a layer, each as `LayerNames` says, of one text and in float64.

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
        scale: what q.k is multiplied by.
        is_rotated: q and k are rotated by their positions.
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

    @cached_property
    def allowed(self) -> npt.NDArray[np.bool_]:
        """(H, T, T): where a token may attend."""
        may: npt.NDArray[np.bool_] = self.scores - self.products > _MASKED
        return may

    @cached_property
    def biases(self) -> Array:
        """(H, T, T): what is added to scaled products, 0 where a token may not attend."""
        return np.where(self.allowed, self.scores - self.products, 0.0)

    @property
    def has_biases(self) -> bool:
        """Whether scores are more than products of queries and keys."""
        return bool(np.abs(self.biases).max() > 1e-4)  # noqa: PLR2004 - above the rounding of fp32

    def weights_with(self, *, scale: float | None = None, query: Array | None = None) -> Array:
        """Return the weights (H, T, T) as they would be with another scale or other queries."""
        queries = self.query if query is None else query
        products = queries @ self.key.swapaxes(-1, -2)
        factor = self.scale if scale is None else scale
        return softmax(products * factor + self.biases, self.allowed)

    @property
    def weights_without_scale(self) -> Array:
        """The weights without their scale; with 1 / sqrt(K) where they have none."""
        return self.weights_with(scale=self.other_scale)

    @property
    def other_scale(self) -> float:
        """What the model's scale is compared with."""
        return 1.0 if self.scale != 1.0 else self.query.shape[-1] ** -0.5


@dataclass(frozen=True)
class Question:
    """One token in one head, and everything that is needed to say what happens there.

    Attributes:
        model_name: of the bundle.
        sentence: the text.
        layers: the values of each layer that is a softmax, by its number.
        num_layers: of the model.
        final: (T, D), what leaves the last layer.
        layer: the layer asked about.
        head: the head.
        row: the number of the token.
        target: the number of the token that it should attend to.
        rival: the number of another one, None: the text has no other.
        costs: (length, milliseconds, bytes of all maps) for texts of some lengths.
        max_positions: the longest text that the encoder takes.
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

    @property
    def values(self) -> LayerValues:
        """Those of the layer asked about."""
        return self.layers[self.layer]

    @property
    def leaving(self) -> Array:
        """(T, D): the residual stream behind the layer, as far as it is known."""
        following = self.layers.get(self.layer + 1)
        return self.final if following is None else following.residual

    @property
    def leaving_is_next(self) -> bool:
        """Whether `leaving` is really right behind the layer."""
        return self.layer + 1 in self.layers or self.layer == self.num_layers - 1

    def label(self, row: int) -> str:
        """Return the token's spelling."""
        return self.sentence.labels[row]


def ask(
    directory: Path,
    text: str,
    token: str,
    *,
    layer: int | None = None,
    head: int | None = None,
    target: str | None = None,
    rival: str | None = None,
    lengths: Sequence[int] = (),
) -> Question:
    """Run a text and choose what is to be explained.

    Args:
        directory: a bundle.
        text: one text; no prompt is put before it.
        token: whose row: its spelling, word or number.
        layer: from 0, negative from the end; None: the one with `head`.
        head: likewise; None: that which gives most to `target`, or where there is none to a token that is
            neither special nor next to this one.
        target: the token that it is asked about; None: the one that it gives most to there.
        rival: what the target is compared with; None: the next.
        lengths: those at which the cost is measured, as far as the model takes them.

    Raises:
        AnalysisError: the message says what is the matter.
        attnlens_server.errors.StartupError: the bundle can't be used.
        ImportError: `onnx` is not installed.
    """
    bundle = open_bundle(directory)
    sentence = read_sentence(bundle, text)
    row = sentence.find(token)
    wanted = _number("layer", layer, bundle.model.num_layers)
    hidden = bundle.model.outputs.hidden_state("attention").name
    graph, names = bundle.graph_path("attention"), _names(bundle, wanted)
    layers, final = compute(graph, names, hidden, sentence.input_ids)
    others, places = _other_tokens(sentence, row)
    asked = None if target is None else sentence.find(target)
    wanted, chosen = _choose(layers, wanted, head, row, places if asked is None else [asked])
    weights = layers[wanted].weights[chosen, row]
    to = largest(weights, others)[0] if asked is None else asked
    rest = [place for place in largest(weights, others) if place != to]
    than = sentence.find(rival) if rival is not None else (rest[0] if rest else None)
    usable = [length for length in lengths if length <= bundle.model.max_positions]
    return Question(
        model_name=bundle.model.name,
        sentence=sentence,
        layers=layers,
        num_layers=bundle.model.num_layers,
        final=final,
        layer=wanted,
        head=chosen,
        row=row,
        target=to,
        rival=than,
        costs=measure_cost(bundle, usable) if usable else (),
        max_positions=bundle.model.max_positions,
    )


def _other_tokens(sentence: Sentence, row: int) -> tuple[npt.NDArray[np.bool_], Sequence[int]]:
    """Return which tokens are neither special nor `row`, and the places of those not next to it, if any."""
    distances = np.abs(np.arange(len(sentence)) - row)
    others = ~sentence.is_special & (distances > 0)
    if not others.any():
        raise UnknownTokenError("TEXT has no token beside that one: give a longer text")
    far = others & (distances > 1)
    return others, largest(np.zeros(len(sentence)), far if far.any() else others)


def compute(
    path: Path, names: Mapping[int, LayerNames], hidden: str, input_ids: npt.NDArray[np.int64]
) -> tuple[dict[int, LayerValues], Array]:
    """Return the values of layers by their number, and the token vectors (T, D) at the end.

    Args:
        path: of an attention graph.
        names: what it calls the values of each layer.
        hidden: what it calls the token vectors.
        input_ids: (1, T).
    """
    wanted = list(dict.fromkeys([hidden, *(name for each in names.values() for name in each.wanted)]))
    session = _open_with(path, wanted)
    arrays = dict(zip(wanted, session.run(wanted, _feed(session, input_ids)), strict=True))
    exact = {name: array[0].astype(np.float64) for name, array in arrays.items()}
    return {layer: _layer_values(each, exact) for layer, each in names.items()}, exact[hidden]


def measure_cost(bundle: Bundle, lengths: Sequence[int]) -> list[tuple[int, float, int]]:
    """Return for each length: it, the milliseconds of the attention graph, and the bytes of all maps in fp32.

    The milliseconds are those of the quickest of 5 runs on one thread.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = ort.InferenceSession(
        str(bundle.graph_path("attention")), options, providers=["CPUExecutionProvider"]
    )
    costs = []
    for length in lengths:
        feed = _feed(session, np.full((1, length), bundle.model.vocab_size // 2, np.int64))
        session.run(None, feed)
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            session.run(None, feed)
            seconds.append(time.perf_counter() - start)
        costs.append((length, 1000 * min(seconds), bundle.model.pair_bytes * length**2))
    return costs


def _names(bundle: Bundle, wanted: int | None) -> dict[int, LayerNames]:
    """Find the values of each layer that can be taken apart; `wanted` must be one, else any.

    Raises:
        NotTeachableError: it is not, or none is.
    """
    graph = structure_of(read_proto(bundle.graph_path("attention")))
    outputs = bundle.model.outputs.layers(OutputRole.ATTENTION_WEIGHTS)
    found: dict[int, LayerNames] = {}
    refusal = NotTeachableError("the model has no layer with attention weights")
    for layer, described in enumerate(bundle.manifest.architecture.layers):
        try:
            refuse_mechanism(layer, described.attention)
            found[layer] = find_layer(graph, layer, outputs[layer].name)
        except NotTeachableError as error:
            refusal = error
            if layer == wanted:
                raise
    if not found:
        raise refusal
    return found


def _open_with(path: Path, outputs: Sequence[str]) -> ort.InferenceSession:
    """Open a copy of a graph with more outputs; its weights stay in their file."""
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
    """Return the inputs for a text of one type without padding."""
    all_inputs = {
        "input_ids": input_ids,
        "attention_mask": np.ones_like(input_ids),
        "token_type_ids": np.zeros_like(input_ids),
    }
    return {value.name: all_inputs[value.name] for value in session.get_inputs()}


def _layer_values(names: LayerNames, arrays: Mapping[str, Array]) -> LayerValues:
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
    )


def _number(kind: str, number: int | None, count: int) -> int | None:
    if number is None:
        return None
    if not -count <= number < count:
        raise UnknownHeadError(f"there is no {kind} {number}: give 0 to {count - 1}, or -{count} to -1")
    return number % count


def _choose(
    layers: Mapping[int, LayerValues],
    layer: int | None,
    head: int | None,
    row: int,
    places: Sequence[int],
) -> tuple[int, int]:
    """Return the layer and head: those given, the rest where the token gives most to one of `places`."""
    best, place = -1.0, (0, 0)
    for number in layers if layer is None else [layer]:
        weights = layers[number].weights
        known = _number("head", head, len(weights))
        for each in range(len(weights)) if known is None else [known]:
            if (highest := float(weights[each, row, list(places)].max())) > best:
                best, place = highest, (number, each)
    return place
