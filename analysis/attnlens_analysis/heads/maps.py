"""The attention weights of a bundle's model for texts: its attention graph in ONNX Runtime, batch by batch.

Letters: B texts, T tokens of a text, N heads of all layers that have weights.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from attnlens.patterns import Band, BlockTable
from attnlens_server.bundle import Bundle, Layout, Output, OutputRole, RowSum
from attnlens_server.engine.runtimes.onnx_session import open_graph
from attnlens_server.errors import StartupError
from attnlens_server.text import TextEncoder, Tokens, TokenSource

Weights: TypeAlias = npt.NDArray[np.float32]
Progress: TypeAlias = Callable[[str, int, int], None]
"""Takes the name of a stage, how much of it is done, and its whole."""

_MAX_BATCH_WEIGHTS = 1 << 24  # 64 MiB in fp32
_MAX_BATCH_TOKENS = 2048


@dataclass(frozen=True, slots=True, order=True)
class Head:
    """A head, by its layer and its index in the layer, both from 0. Its name is for instance L2H8."""

    layer: int
    head: int

    def __str__(self) -> str:
        return f"L{self.layer}H{self.head}"


@dataclass(frozen=True, slots=True)
class TextMaps:
    """A text's tokens, and what they give each other.

    Attributes:
        tokens: the T tokens.
        weights: (N, T, T) float32, query by key; each row sums to 1.
    """

    tokens: Tokens
    weights: Weights

    @property
    def content(self) -> npt.NDArray[np.intp]:
        """The rows of tokens that are not special."""
        return np.flatnonzero([source is not TokenSource.SPECIAL for source in self.tokens.sources])


@dataclass(frozen=True, slots=True)
class EncodedText:
    """A text as token ids, (T,) int64, with what is told of each."""

    input_ids: npt.NDArray[np.int64]
    tokens: Tokens


class MapSource:
    """The attention weights of a bundle's model.

    Attributes:
        bundle: whose model it is.
        heads: the N heads whose weights there are, by layer and number.
        notes: what is left out, and why; a sentence each.
    """

    def __init__(self, bundle: Bundle, threads: int = 0) -> None:
        """Open the tokenizer and the attention graph; `threads` 0: as many as ONNX Runtime likes.

        Raises:
            StartupError: the bundle has no tokenizer, no attention weights, or ONNX Runtime can't open it.
        """
        if bundle.tokenizer_path is None:
            raise StartupError(f"{bundle.directory} has no tokenizer, and heads are measured on texts")
        self.bundle = bundle
        self._encoder = TextEncoder(bundle.tokenizer_path, bundle.model.max_tokens)
        self._outputs, self.notes = _usable_outputs(bundle)
        self.heads = tuple(
            Head(layer, head) for layer, output in self._outputs.items() for head in range(output.num_heads)
        )
        self._session = open_graph(bundle.graph_path("attention"), "cpu", threads, 0)

    def spelling(self, token_id: int) -> str:
        """Return how the tokenizer spells an id; empty for one that it doesn't know."""
        return self._encoder.token_text(token_id)

    def encode(self, texts: Sequence[str]) -> list[EncodedText | None]:
        """Tokenize texts; None stands for one that has more tokens than the model takes."""
        encoded = self._encoder.encode([(text,) for text in texts], with_record=True, truncate=False)
        return [
            EncodedText(found.input_ids, self._encoder.describe(found))
            if found.num_tokens <= self._encoder.max_tokens
            else None
            for found in encoded
        ]

    def of_texts(self, texts: Sequence[EncodedText]) -> Iterator[tuple[int, TextMaps]]:
        """Yield the number of each text and its maps, short texts first."""
        for batch in batches([len(text.input_ids) for text in texts], len(self.heads)):
            inputs = [texts[number].input_ids for number in batch]
            for number, weights in zip(batch, self.of_ids(inputs), strict=True):
                yield number, TextMaps(texts[number].tokens, weights)

    def of_ids(
        self, rows: Sequence[npt.NDArray[np.int64]], session: ort.InferenceSession | None = None
    ) -> Iterator[Weights]:
        """Run inputs of token ids as one batch and yield the weights of each, (N, T, T).

        Args:
            rows: (T,) int64 each.
            session: another graph with the same inputs and outputs.
        """
        session = session or self._session
        feed = graph_inputs(rows, self.bundle)
        names = [output.name for output in self._outputs.values()]
        found: list[Weights] = session.run(names, feed)
        for row, ids in enumerate(rows):
            yield np.concatenate(
                [
                    dense_weights(array[row], output, len(ids))
                    for array, output in zip(found, self._outputs.values(), strict=True)
                ]
            )


def graph_inputs(rows: Sequence[npt.NDArray[np.int64]], bundle: Bundle) -> dict[str, npt.NDArray[np.int64]]:
    """Return the inputs of a graph, each (B, T) int64, padded on the right."""
    shape = (len(rows), max(map(len, rows)))
    ids = np.full(shape, bundle.model.pad_token_id, dtype=np.int64)
    mask = np.zeros(shape, dtype=np.int64)
    for row, found in enumerate(rows):
        ids[row, : len(found)] = found
        mask[row, : len(found)] = 1
    feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    return {name: feed[name] for name in bundle.model.graphs["attention"].inputs}


def batches(lengths: Sequence[int], num_heads: int) -> Iterator[list[int]]:
    """Yield the numbers of texts of about the same length that run together, short ones first."""
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        size, length = len(batch) + 1, lengths[number]
        is_full = size * length > _MAX_BATCH_TOKENS or size * num_heads * length**2 > _MAX_BATCH_WEIGHTS
        if batch and is_full:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def _usable_outputs(bundle: Bundle) -> tuple[dict[int, Output], tuple[str, ...]]:
    """Return the outputs with weights by their layer, and what is left out."""
    outputs, notes = {}, []
    for layer, output in sorted(bundle.model.outputs.layers(OutputRole.ATTENTION_WEIGHTS).items()):
        if output.row_sum is RowSum.UNBOUNDED or output.layout is Layout.PER_TOKEN:
            notes.append(f"Layer {layer} is left out: the rows of {output.name} are no shares of a whole.")
        else:
            outputs[layer] = output
    if not outputs:
        raise StartupError(
            f"{bundle.directory} has no attention weights from token to token: there is nothing to measure"
        )
    if missing := sorted(set(range(bundle.model.num_layers)) - set(outputs)):
        notes.append(f"No attention weights in the graph for layers {', '.join(map(str, missing))}.")
    if any(output.row_sum is RowSum.GATE for output in outputs.values()):
        notes.append("Rows that sum to a gate are divided by it.")
    roles = bundle.model.outputs.roles
    if OutputRole.HEAD_GATES in roles:
        notes.append("Head gates are left out: they are numbers of a token and head, not of two tokens.")
    if OutputRole.ATTENTION_COMPOSED in roles:
        notes.append("Measured are the weights before heads are composed; composed ones may be negative.")
    return outputs, tuple(notes)


def dense_weights(array: Weights, output: Output, num_tokens: int) -> Weights:
    """Return the weights (H, T, T) of a text out of its row of a batch."""
    if output.layout is Layout.DENSE:
        weights = array[:, :num_tokens, :num_tokens]
    elif isinstance(output.pattern, Band):
        weights = output.pattern.dense(array[:, :num_tokens])
    elif isinstance(output.pattern, BlockTable):
        weights = output.pattern.at(num_tokens).dense(array[:, :num_tokens])
    else:  # read_graph gives every other layout a pattern
        raise AssertionError(f"{output.name} has the layout {output.layout}")
    if output.row_sum is RowSum.GATE:
        sums = weights.sum(axis=-1, keepdims=True)
        weights = (weights / np.where(sums > 0, sums, 1)).astype(np.float32)
    return weights
