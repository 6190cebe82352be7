"""Computes attention maps of texts by running the bundle's attention graph in batches.

Shapes: B texts, T tokens of a text, N heads of all layers with attention weights.
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
"""Called with the name of a stage, the completed amount and the total."""

_MAX_BATCH_WEIGHTS = 1 << 24  # 64 MiB in fp32
_MAX_BATCH_TOKENS = 2048


@dataclass(frozen=True, slots=True, order=True)
class Head:
    """An attention head, identified by layer and index, both counted from 0. Formatted as e.g. L2H8."""

    layer: int
    head: int

    def __str__(self) -> str:
        return f"L{self.layer}H{self.head}"


@dataclass(frozen=True, slots=True)
class TextMaps:
    """Tokens and attention maps of a text.

    Attributes:
        tokens: The T tokens.
        weights: (N, T, T) float32, query by key. Each row sums to 1.
    """

    tokens: Tokens
    weights: Weights

    @property
    def content(self) -> npt.NDArray[np.intp]:
        """Row indices of tokens that are not special."""
        return np.flatnonzero([source is not TokenSource.SPECIAL for source in self.tokens.sources])


@dataclass(frozen=True, slots=True)
class EncodedText:
    """Token ids of a text, (T,) int64, and token metadata."""

    input_ids: npt.NDArray[np.int64]
    tokens: Tokens


class MapSource:
    """Computes the attention maps of a bundle's model.

    Attributes:
        bundle: Bundle of the model.
        heads: The N heads with attention weights, ordered by layer and index.
        notes: Sentences about skipped layers and outputs.
    """

    def __init__(self, bundle: Bundle, threads: int = 0) -> None:
        """Open the tokenizer and the attention graph. `threads` = 0 uses the default of ONNX Runtime.

        Raises:
            StartupError: The bundle has no tokenizer or attention weights, or ONNX Runtime cannot open it.
        """
        if bundle.tokenizer_path is None:
            raise StartupError(f"{bundle.directory} has no tokenizer, which is required to measure heads")
        self.bundle = bundle
        self._encoder = TextEncoder(
            bundle.tokenizer_path, bundle.model.max_tokens, bundle.model.chat_template
        )
        self._outputs, self.notes = _usable_outputs(bundle)
        self.heads = tuple(
            Head(layer, head) for layer, output in self._outputs.items() for head in range(output.num_heads)
        )
        self._session = open_graph(bundle.graph_path("attention"), "cpu", threads, 0)

    def spelling(self, token_id: int) -> str:
        """Return the token string of an id, or an empty string for an unknown id."""
        return self._encoder.token_text(token_id)

    def encode(self, texts: Sequence[str]) -> list[EncodedText | None]:
        """Tokenize texts. The result is None for texts that exceed the maximum length of the model."""
        encoded = self._encoder.encode([(text,) for text in texts], with_record=True, truncate=False)
        return [
            EncodedText(tokens.input_ids, self._encoder.describe(tokens))
            if tokens.num_tokens <= self._encoder.max_tokens
            else None
            for tokens in encoded
        ]

    def of_texts(self, texts: Sequence[EncodedText]) -> Iterator[tuple[int, TextMaps]]:
        """Yield the index and maps of each text, in ascending order of length."""
        for batch in batches([len(text.input_ids) for text in texts], len(self.heads)):
            inputs = [texts[index].input_ids for index in batch]
            for index, weights in zip(batch, self.of_ids(inputs), strict=True):
                yield index, TextMaps(texts[index].tokens, weights)

    def of_ids(
        self, rows: Sequence[npt.NDArray[np.int64]], session: ort.InferenceSession | None = None
    ) -> Iterator[Weights]:
        """Run token ids as one batch and yield the weights of each text, (N, T, T).

        Args:
            rows: (T,) int64 token ids of each text.
            session: Session of a modified graph. Defaults to the attention graph.
        """
        session = session or self._session
        feed = graph_inputs(rows, self.bundle)
        names = [output.name for output in self._outputs.values()]
        arrays: list[Weights] = session.run(names, feed)
        for row, ids in enumerate(rows):
            yield np.concatenate(
                [
                    dense_weights(array[row], output, len(ids))
                    for array, output in zip(arrays, self._outputs.values(), strict=True)
                ]
            )


def graph_inputs(rows: Sequence[npt.NDArray[np.int64]], bundle: Bundle) -> dict[str, npt.NDArray[np.int64]]:
    """Return the graph inputs, each (B, T) int64 with padding on the right."""
    shape = (len(rows), max(map(len, rows)))
    ids = np.full(shape, bundle.model.pad_token_id, dtype=np.int64)
    mask = np.zeros(shape, dtype=np.int64)
    for row, token_ids in enumerate(rows):
        ids[row, : len(token_ids)] = token_ids
        mask[row, : len(token_ids)] = 1
    feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    return {name: feed[name] for name in bundle.model.graphs["attention"].inputs}


def batches(lengths: Sequence[int], num_heads: int) -> Iterator[list[int]]:
    """Yield batches of text indices, grouping texts of similar length, in ascending order of length."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        size, length = len(batch) + 1, lengths[index]
        is_full = size * length > _MAX_BATCH_TOKENS or size * num_heads * length**2 > _MAX_BATCH_WEIGHTS
        if batch and is_full:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _usable_outputs(bundle: Bundle) -> tuple[dict[int, Output], tuple[str, ...]]:
    """Return the usable attention outputs by layer, and notes about the others."""
    outputs, notes = {}, []
    for layer, output in sorted(bundle.model.outputs.layers(OutputRole.ATTENTION_WEIGHTS).items()):
        if output.row_sum is RowSum.UNBOUNDED or output.layout is Layout.PER_TOKEN:
            notes.append(f"Layer {layer} was skipped: the rows of {output.name} do not sum to a constant.")
        else:
            outputs[layer] = output
    if not outputs:
        raise StartupError(f"{bundle.directory} has no token-to-token attention weights to measure")
    if missing := sorted(set(range(bundle.model.num_layers)) - set(outputs)):
        notes.append(f"The graph has no attention weights for layers {', '.join(map(str, missing))}.")
    if any(output.row_sum is RowSum.GATE for output in outputs.values()):
        notes.append("Rows that sum to a gate were divided by the gate.")
    roles = bundle.model.outputs.roles
    if OutputRole.HEAD_GATES in roles:
        notes.append("Head gates were ignored, since they are not defined for pairs of tokens.")
    if OutputRole.ATTENTION_COMPOSED in roles:
        notes.append("Weights were measured before head composition, since composed weights may be negative.")
    return outputs, tuple(notes)


def dense_weights(array: Weights, output: Output, num_tokens: int) -> Weights:
    """Return the dense weights (H, T, T) of one text of a batch."""
    if output.layout is Layout.DENSE:
        weights = array[:, :num_tokens, :num_tokens]
    elif isinstance(output.pattern, Band):
        weights = output.pattern.dense(array[:, :num_tokens])
    elif isinstance(output.pattern, BlockTable):
        weights = output.pattern.at(num_tokens).dense(array[:, :num_tokens])
    else:  # read_graph ensures that all other layouts have a pattern
        raise AssertionError(f"{output.name} has the layout {output.layout}")
    if output.row_sum is RowSum.GATE:
        sums = weights.sum(axis=-1, keepdims=True)
        weights = (weights / np.where(sums > 0, sums, 1)).astype(np.float32)
    return weights
