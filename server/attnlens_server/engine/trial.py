"""Trying a session before anybody is served: is the graph what its manifest says, and are its results sane?

It also reserves the memory that batches need. Letters: B texts, T tokens of a row of the batch, with padding,
D hidden size, H heads.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from attnlens.v1.manifest_pb2 import Architecture, Graph, GraphKind
from attnlens_server.engine.item import ALL_HEADS
from attnlens_server.engine.session import Session
from attnlens_server.engine.time_limit import TimeLimit
from attnlens_server.errors import UnusableGraphError
from attnlens_server.manifest_check import INPUT_NAMES, REMEDY, output_shapes

# How far the sum of an attention row may be from 1. An export promises 1e-5; a GPU may add in another order.
ROW_SUM_TOLERANCE = 1e-4

Array = npt.NDArray[np.generic]


class Trial:
    """What the graph in the file `path` has to be, by its manifest."""

    def __init__(self, path: Path, graph: Graph, sizes: Architecture) -> None:
        self._path = path
        self._kind = graph.kind
        self._sizes = sizes
        self._shapes = output_shapes(graph.kind, sizes)

    def check_interface(self, session: Session) -> None:
        """Compare the inputs and outputs of the graph with the manifest.

        Raises:
            UnusableGraphError: they differ.
        """
        inputs = [each.name for each in session.inputs]
        if inputs not in (list(INPUT_NAMES), list(INPUT_NAMES[:2])):
            self._refuse(f"has the inputs {', '.join(inputs)}")
        for each in session.inputs:
            if each.type != "tensor(int64)" or not _may_be(each.shape, (None, None)):
                self._refuse(f"wants {each.name} as {each.type} {list(each.shape)}")
        outputs = [each.name for each in session.outputs]
        if outputs != list(self._shapes):
            self._refuse(
                f"has {len(outputs)} outputs, the last {outputs[-1:]}, and by the manifest "
                f"{len(self._shapes)}, the last {list(self._shapes)[-1:]}"
            )
        for each, shape in zip(session.outputs, self._shapes.values(), strict=True):
            if each.type != "tensor(float)" or not _may_be(each.shape, shape):
                self._refuse(
                    f"returns {each.name} as {each.type} {list(each.shape)}, by the manifest it is "
                    f"tensor(float) {list(shape)}"
                )

    def run(self, session: Session, num_tokens: Sequence[int], limit: TimeLimit) -> None:
        """Run a batch of texts with so many tokens, and check what comes out.

        Raises:
            UnusableGraphError: a result has another shape or type than the manifest says, is not finite, or
                attention rows don't sum to 1 over the tokens and 0 over padding.
            Exception: what ONNX Runtime fails with.
        """
        batch = self._batch(num_tokens)
        outputs = session.run_all(*batch, limit)
        for name, shape in self._shapes.items():
            self._check(name, outputs[name], shape, num_tokens)
        if self._kind == GraphKind.GRAPH_KIND_ATTENTIONS:  # as requests will: the way differs on a GPU
            name = list(self._shapes)[-1]
            weights = session.run(*batch, [name]).attention(name, 0, num_tokens[0], ALL_HEADS)
            self._check(name, weights[None], self._shapes[name], num_tokens[:1])

    def _batch(self, num_tokens: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return ids and mask, both (B, T) int64; the last token of each text has the largest id."""
        shape = (len(num_tokens), max(num_tokens))
        input_ids = np.full(shape, self._sizes.pad_token_id, dtype=np.int64)
        attention_mask = np.zeros(shape, dtype=np.int64)
        for row, count in enumerate(num_tokens):
            input_ids[row, :count] = 0
            input_ids[row, count - 1] = self._sizes.vocab_size - 1
            attention_mask[row, :count] = 1
        return input_ids, attention_mask

    def _check(
        self, name: str, array: Array, shape: tuple[int | None, ...], num_tokens: Sequence[int]
    ) -> None:
        batch, length = len(num_tokens), max(num_tokens)
        sizes = iter((batch, length) if len(shape) == 3 else (batch, length, length))  # noqa: PLR2004 - (B, T, D)
        expected = tuple(next(sizes) if size is None else size for size in shape)
        if array.shape != expected or array.dtype != np.float32:
            self._refuse(
                f"returned {name} as {array.dtype} {list(array.shape)} for {batch} texts of at most {length} "
                f"tokens, by the manifest it is float32 {list(expected)}"
            )
        for row, count in enumerate(num_tokens):
            live = array[row, :count] if len(shape) == 3 else array[row, :, :count]  # noqa: PLR2004 - (B, T, D)
            if not np.isfinite(live).all():
                self._refuse(f"returned a NaN or an infinity in {name} for {count} tokens")
            if len(shape) == 4:  # noqa: PLR2004 - (B, H, T, T)
                self._check_rows(name, live, count)

    def _check_rows(self, name: str, weights: Array, count: int) -> None:
        """Check the weights of a text's tokens, (H, count, T)."""
        sums = weights.sum(axis=-1, dtype=np.float64)  # (H, count)
        error = float(np.abs(sums - 1).max())
        if error > ROW_SUM_TOLERANCE:
            self._refuse(f"returned rows of {name} whose sum is off from 1 by {error:.3g}")
        if weights.min() < 0:
            self._refuse(f"returned weights of {name} below 0")
        if weights[:, :, count:].any():
            self._refuse(f"returned weights of {name} on padding")

    def _refuse(self, what: str) -> None:
        raise UnusableGraphError(f"{self._path} {what}: it is not the graph of this manifest, {REMEDY}")


def _may_be(stated: Sequence[int | str | None], expected: Sequence[int | None]) -> bool:
    """Whether a graph with this shape may return that one: an axis that may vary is seen when it runs."""
    return len(stated) == len(expected) and all(
        not isinstance(size, int) or size == wanted for size, wanted in zip(stated, expected, strict=True)
    )
