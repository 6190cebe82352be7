"""The diagonal fallacy: a token's own query and key need not fit each other.

It is often said that a token attends most to itself, since its query and key come from the same vector. They
come from it by two different matrices. With one matrix, W_q in the place of which W_k stands, q.k of a token
with itself is |k|^2, and the diagonal does win. This module measures both: it writes the attention graph once
more with the key's weights and bias for the query's of one layer, and runs that.

The graph is rewritten in protobuf's wire format (`attnlens.wire`): ModelProto.graph is field 7,
GraphProto.node field 1, NodeProto.input field 1 and GraphProto.initializer field 5 with its name in field 8
(https://github.com/onnx/onnx/blob/main/onnx/onnx.proto). Letters: N heads.
"""

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
_INITIALIZER, _INITIALIZER_NAME = 5, 8
NUM_TEXTS = 50


@dataclass(frozen=True, slots=True)
class TiedDiagonal:
    """Share of rows in which the token itself has the largest weight, for each of N heads; NaN: not measured.

    Attributes:
        num_texts: how many texts.
        num_rows: how many rows.
        own: with the model's own weights.
        tied: with the key's weights for the query's, one layer at a time.
        chance: if the largest weight were anywhere.
        notes: which layers are not measured, and why.
    """

    num_texts: int
    num_rows: int
    own: npt.NDArray[np.float64]
    tied: npt.NDArray[np.float64]
    chance: float
    notes: tuple[str, ...]


def measure_tied(source: MapSource, texts: Sequence[EncodedText], progress: Progress) -> TiedDiagonal | None:
    """Measure on the first `NUM_TEXTS` texts; None: no layer has queries and keys of one size."""
    texts = texts[:NUM_TEXTS]
    graph = source.bundle.graph_path("attention")
    sizes = source.bundle.manifest.architecture.layers
    layers = sorted({head.layer for head in source.heads})
    tied_graphs = {
        layer: tied_graph(graph, layer)
        for layer in layers
        if layer >= len(sizes) or sizes[layer].num_key_value_heads in {0, sizes[layer].num_heads}
    }
    usable = {layer: found for layer, found in tied_graphs.items() if found is not None}
    if not usable or not texts:
        return None
    num_rows = sum(len(rows) for rows in map(content_rows, texts))
    own = _diagonal_share(source, texts, None)
    tied = np.full(len(source.heads), np.nan)
    of_layer = np.array([head.layer for head in source.heads])
    for done, (layer, rewritten) in enumerate(usable.items()):
        progress("queries with the weights of keys", done, len(usable))
        session = _open(graph.parent, rewritten)
        tied[of_layer == layer] = _diagonal_share(source, texts, session)[of_layer == layer]
    left_out = [str(layer) for layer in layers if layer not in usable]
    notes = (
        (f"Queries and keys of layers {', '.join(left_out)} have other sizes or are shared: not tied.",)
        if left_out
        else ()
    )
    chance = sum(len(content_rows(text)) / len(text.input_ids) for text in texts) / num_rows
    return TiedDiagonal(len(texts), num_rows, own, tied, chance, notes)


def tied_graph(path: Path, layer: int) -> bytes | None:
    """Return an ONNX file in which the queries of a layer have the weights and bias of its keys.

    None: the layer has no two such parameters, or another layer has them too.
    """
    data = path.read_bytes()
    own, other = (f"layers.{layer}.attention.{part}." for part in ("query", "key"))
    uses = Counter(name for name in _inputs(data) if name.startswith((own, other)))
    queries = {name for name in uses if name.startswith(own)}
    replaced = {name: other + name.removeprefix(own) for name in queries}
    if not queries or set(replaced.values()) != set(uses) - queries or max(uses.values()) > 1:
        return None
    return _rewritten(data, {old.encode(): new.encode() for old, new in replaced.items()})


def _inputs(data: bytes) -> Iterator[str]:
    """Yield every input of every node of the graph."""
    for graph in _fields(data, 0, len(data), _GRAPH):
        for node in _fields(data, graph.content, graph.end, _NODE):
            for name in _fields(data, node.content, node.end, _INPUT):
                yield data[name.content : name.end].decode()


def _fields(data: bytes, start: int, end: int, number: int) -> Iterator[Field]:
    return (field for field in read_fields(data, start, end) if field.number == number)


def _rewritten(data: bytes, names: dict[bytes, bytes]) -> bytes:
    """Return the model with other inputs of nodes, and without initializers that no node reads any more."""

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
    """Tell whether a tensor has one of some names."""
    found = _fields(data, tensor.content, tensor.end, _INITIALIZER_NAME)
    return any(data[name.content : name.end] in names for name in found)


def _open(folder: Path, graph: bytes) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    return ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def content_rows(text: EncodedText) -> npt.NDArray[np.intp]:
    """Return the rows of tokens that are not special."""
    return np.flatnonzero([kind is not kind.SPECIAL for kind in text.tokens.sources])


def _diagonal_share(
    source: MapSource, texts: Sequence[EncodedText], session: ort.InferenceSession | None
) -> npt.NDArray[np.float64]:
    total, num_rows = np.zeros(len(source.heads)), 0
    for batch in batches([len(text.input_ids) for text in texts], len(source.heads)):
        maps = source.of_ids([texts[number].input_ids for number in batch], session)
        for number, weights in zip(batch, maps, strict=True):
            rows = content_rows(texts[number])
            total += diagonal_wins(weights[:, rows], rows)
            num_rows += len(rows)
    return total / num_rows


def diagonal_wins(weights: Weights, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
    """Return in how many of some rows (N, R, T) the token itself has the largest weight, (N,)."""
    wins: npt.NDArray[np.int64] = (weights.argmax(axis=-1) == rows).sum(axis=-1)
    return wins
