"""Diagonal attention with separate and with tied query and key projections.

A common misconception is that tokens attend most to themselves because their query and key are computed from
the same vector. Query and key use different weights, however. With tied weights (W_q = W_k), q.k of a token
with itself is |k|^2, and the diagonal does dominate. This module measures both cases, by running a copy of
the attention graph in which the query weights and bias of one layer are replaced by the key weights and bias.

The graph is modified in the protobuf wire format (`attnlens.wire`): ModelProto.graph is field 7,
GraphProto.node field 1, NodeProto.input field 1, and GraphProto.initializer field 5 with its name in field 8
(https://github.com/onnx/onnx/blob/main/onnx/onnx.proto). Shapes: N heads.
"""

import re
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from attnlens.wire import Field, read_fields, start_field
from attnlens_analysis.heads.maps import EncodedText, MapSource, Progress, Weights, batches

_GRAPH, _NODE, _INPUT = 7, 1, 1
# Names of projections to queries, and those to keys.
_KEYS = {"query": "key", "q_proj": "k_proj", "q_lin": "k_lin"}
_INITIALIZER, _INITIALIZER_NAME = 5, 8
NUM_TEXTS = 50


@dataclass(frozen=True, slots=True)
class TiedDiagonal:
    """Share of rows whose largest weight is on the token itself, (N,). NaN if not measured.

    Attributes:
        num_texts: Number of texts.
        num_rows: Number of rows.
        own: Share with the original weights.
        tied: Share with query weights replaced by key weights, one layer at a time.
        chance: Expected share if the largest weight were at a random position.
        notes: Sentences about skipped layers.
    """

    num_texts: int
    num_rows: int
    own: npt.NDArray[np.float64]
    tied: npt.NDArray[np.float64]
    chance: float
    notes: tuple[str, ...]


def measure_tied(source: MapSource, texts: Sequence[EncodedText], progress: Progress) -> TiedDiagonal | None:
    """Measure on the first `NUM_TEXTS` texts. Return None if no layer can be tied."""
    texts = texts[:NUM_TEXTS]
    graph = source.bundle.graph_path("attention")
    sizes = source.bundle.manifest.architecture.layers
    layers = sorted({head.layer for head in source.heads})
    tied_graphs = {
        layer: tied_graph(graph, layer)
        for layer in layers
        if layer >= len(sizes) or sizes[layer].num_key_value_heads in {0, sizes[layer].num_heads}
    }
    usable = {layer: content for layer, content in tied_graphs.items() if content is not None}
    if not usable or not texts:
        return None
    num_rows = sum(len(rows) for rows in map(content_rows, texts))
    own = _diagonal_share(source, texts, None)
    tied = np.full(len(source.heads), np.nan)
    layer_of_head = np.array([head.layer for head in source.heads])
    for done, (layer, rewritten) in enumerate(usable.items()):
        progress("tied queries and keys", done, len(usable))
        session = _open(graph.parent, rewritten)
        tied[layer_of_head == layer] = _diagonal_share(source, texts, session)[layer_of_head == layer]
    skipped = [str(layer) for layer in layers if layer not in usable]
    notes = (
        (f"Layers {', '.join(skipped)} cannot be tied: sizes differ or weights are shared.",)
        if skipped
        else ()
    )
    chance = sum(len(content_rows(text)) / len(text.input_ids) for text in texts) / num_rows
    return TiedDiagonal(len(texts), num_rows, own, tied, chance, notes)


def tied_graph(path: Path, layer: int) -> bytes | None:
    """Return an ONNX model in which the queries of a layer use the weights and bias of its keys.

    Return None if the layer has no matching parameters, or shares them with another layer.
    """
    data = path.read_bytes()
    roles = "|".join(_KEYS)
    # The latter names are those of modules.
    pattern = re.compile(rf"(layers\.{layer}\.attention|module\..*?\.{layer}\..*)\.({roles})\.")
    inputs = Counter(_inputs(data))
    found = next(filter(None, map(pattern.match, inputs)), None)
    if found is None:
        return None
    own, other = (f"{found[1]}.{role}." for role in (found[2], _KEYS[found[2]]))
    uses = {name: count for name, count in inputs.items() if name.startswith((own, other))}
    queries = {name for name in uses if name.startswith(own)}
    replaced = {name: other + name.removeprefix(own) for name in queries}
    if set(replaced.values()) != set(uses) - queries or max(uses.values()) > 1:
        return None
    return _replace_inputs(data, {old.encode(): new.encode() for old, new in replaced.items()})


def _inputs(data: bytes) -> Iterator[str]:
    """Yield every input of every node of the graph."""
    for graph in _fields(data, 0, len(data), _GRAPH):
        for node in _fields(data, graph.content, graph.end, _NODE):
            for name in _fields(data, node.content, node.end, _INPUT):
                yield data[name.content : name.end].decode()


def _fields(data: bytes, start: int, end: int, number: int) -> Iterator[Field]:
    return (field for field in read_fields(data, start, end) if field.number == number)


def _replace_inputs(data: bytes, names: dict[bytes, bytes]) -> bytes:
    """Return the model with renamed node inputs and without the replaced initializers."""

    def message(start: int, end: int, path: tuple[int, ...]) -> bytes:
        parts = []
        for field in read_fields(data, start, end):
            below = (*path, field.number)
            if below == (_GRAPH, _INITIALIZER) and _is_named(data, field, names):
                continue
            content = data[field.content : field.end]
            if below in {(_GRAPH,), (_GRAPH, _NODE)}:
                content = message(field.content, field.end, below)
            elif below == (_GRAPH, _NODE, _INPUT):
                content = names.get(content, content)
            else:
                parts.append(data[field.start : field.end])
                continue
            parts.append(start_field(field.number, len(content)) + content)
        return b"".join(parts)

    return message(0, len(data), ())


def _is_named(data: bytes, tensor: Field, names: Container[bytes]) -> bool:
    """Return whether the name of a tensor is in `names`."""
    fields = _fields(data, tensor.content, tensor.end, _INITIALIZER_NAME)
    return any(data[name.content : name.end] in names for name in fields)


def _open(folder: Path, graph: bytes) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    return ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def content_rows(text: EncodedText) -> npt.NDArray[np.intp]:
    """Return the row indices of tokens that are not special."""
    return np.flatnonzero([kind is not kind.SPECIAL for kind in text.tokens.sources])


def _diagonal_share(
    source: MapSource, texts: Sequence[EncodedText], session: ort.InferenceSession | None
) -> npt.NDArray[np.float64]:
    total, num_rows = np.zeros(len(source.heads)), 0
    for batch in batches([len(text.input_ids) for text in texts], len(source.heads)):
        maps = source.of_ids([texts[index].input_ids for index in batch], session)
        for index, weights in zip(batch, maps, strict=True):
            rows = content_rows(texts[index])
            total += diagonal_wins(weights[:, rows], rows)
            num_rows += len(rows)
    return total / num_rows


def diagonal_wins(weights: Weights, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
    """Count the rows (N, R, T) whose largest weight is on the token itself, (N,)."""
    wins: npt.NDArray[np.int64] = (weights.argmax(axis=-1) == rows).sum(axis=-1)
    return wins
