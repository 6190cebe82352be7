"""Trial runs of a session: its graph and results must match the manifest before it serves requests.

Trial runs also allocate the memory that batches need. Shapes: B texts, T tokens of a padded row, D hidden
size, H heads.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from attnlens_server.bundle import ContributionsGraph, Graph, Layout, Model, Output, RowSum
from attnlens_server.bundle.check import CONTRIBUTION_OUTPUTS, INPUT_NAMES, REMEDY
from attnlens_server.engine.batch import Inputs, Item, RequestedOutput, Target, pad, to_dense
from attnlens_server.engine.runtimes.runtime import Session, TimeLimit
from attnlens_server.errors import UnusableGraphError

# Maximum error of the sum of an attention row. Exports guarantee 1e-5; GPUs may sum in a different order.
ROW_SUM_TOLERANCE = 1e-4
# Maximum error of the sum of contributions and baseline, which is 1 here. Exports guarantee 1e-5.
COMPLETENESS_TOLERANCE = 1e-4

Array = npt.NDArray[Any]


class AnyTrial(Protocol):
    """Trial of a session."""

    def check_interface(self, session: Session) -> None:
        """Compare the inputs and outputs of the graph with the manifest."""

    def run(self, session: Session, num_tokens: Sequence[int], limit: TimeLimit) -> None:
        """Run a batch of texts with these numbers of tokens, and check the results."""


def make_trial(path: Path, graph: Graph | ContributionsGraph, model: Model) -> AnyTrial:
    """Return the trial for a graph."""
    if isinstance(graph, ContributionsGraph):
        return ContributionsTrial(path, graph, model)
    return Trial(path, graph, model)


class ContributionsTrial:
    """Trial of a contributions graph."""

    def __init__(self, path: Path, graph: ContributionsGraph, model: Model) -> None:
        self._path = path
        self._graph = graph
        self._model = model

    def check_interface(self, session: Session) -> None:
        """Compare the names of the inputs and outputs of the graph with the manifest.

        Raises:
            UnusableGraphError: The names differ.
        """
        inputs = tuple(value.name for value in session.inputs)
        missing = set(CONTRIBUTION_OUTPUTS) - {value.name for value in session.outputs}
        if inputs != self._graph.inputs or missing:
            lacking = f" and lacks the outputs {', '.join(sorted(missing))}" if missing else ""
            self._refuse(f"has the inputs {', '.join(inputs)}{lacking}")

    def run(self, session: Session, num_tokens: Sequence[int], limit: TimeLimit) -> None:
        """Explain the mean-pooled embedding of each text, with itself as the target.

        Raises:
            UnusableGraphError: A result has an unexpected shape or data type, or contributions and baseline
                do not add up to 1.
            Exception: The runtime failed.
        """
        size, heads = self._graph.embedding_size, self._graph.heads
        items = []
        for count in num_tokens:
            ids = np.zeros(count, np.int64)
            ids[-1] = self._model.vocab_size - 1
            target = Target(
                pooling_weights=np.full(count, 1 / count, np.float32),
                takes_maximum=False,
                direction=np.zeros(size, np.float32),
                towards_itself=1.0,
                num_dimensions=size,
                head_gates=np.ones(heads, np.float32),
            )
            items.append(Item(ids, (), target=target))
        arrays: dict[str, Array] = session.run_all(
            pad(items, max(num_tokens), self._model.pad_token_id), limit
        )
        lengths = {"B": len(items), "T": max(num_tokens), "E": size, "L": heads[0], "H": heads[1]}
        for name, letters in CONTRIBUTION_OUTPUTS.items():
            expected = tuple(lengths[letter] for letter in letters)
            if arrays[name].shape != expected or arrays[name].dtype != np.float32:
                self._refuse(
                    f"returned {name} as {arrays[name].dtype} {list(arrays[name].shape)}, but the manifest "
                    f"specifies float32 {list(expected)}"
                )
        totals = arrays["token_contributions"].sum(axis=1) + arrays["baseline"]
        if not (np.abs(totals - 1) <= COMPLETENESS_TOLERANCE).all():
            self._refuse(f"returned contributions that add up to {totals.tolist()} instead of 1")

    def _refuse(self, problem: str) -> None:
        raise UnusableGraphError(f"{self._path} {problem}: it does not match the manifest: {REMEDY}")


class Trial:
    """Trial of any graph other than the contributions graph."""

    def __init__(self, path: Path, graph: Graph, model: Model) -> None:
        self._path = path
        self._graph = graph
        self._model = model

    def check_interface(self, session: Session) -> None:
        """Compare the inputs and outputs of the graph with the manifest.

        Raises:
            UnusableGraphError: The inputs or outputs differ.
        """
        inputs = [value.name for value in session.inputs]
        if inputs not in (list(INPUT_NAMES), list(INPUT_NAMES[:2])):
            self._refuse(f"has the inputs {', '.join(inputs)}")
        for value in session.inputs:
            if value.type != "tensor(int64)" or not _may_be(value.shape, (None, None)):
                self._refuse(f"expects {value.name} as {value.type} {list(value.shape)}")
        values = [value for value in session.outputs if value.name not in self._graph.unknown_outputs]
        found, expected = ([value.name for value in outputs] for outputs in (values, self._graph.outputs))
        if found != expected:
            self._refuse(
                f"has {len(found)} outputs, the last {found[-1:]}, but the manifest lists {len(expected)}, "
                f"the last {expected[-1:]}"
            )
        for value, output in zip(values, self._graph.outputs, strict=True):
            if value.type != "tensor(float)" or not _may_be(value.shape, output.shape):
                self._refuse(
                    f"returns {value.name} as {value.type} {list(value.shape)}, but the manifest specifies "
                    f"tensor(float) {list(output.shape)}"
                )

    def run(self, session: Session, num_tokens: Sequence[int], limit: TimeLimit) -> None:
        """Run a batch of texts with these numbers of tokens, and check the results.

        Raises:
            UnusableGraphError: A result is not finite or does not have the manifest's shape or data type, or
                attention rows do not sum to 1 over the tokens and to 0 over padding.
            Exception: The runtime failed.
        """
        inputs = self._inputs(num_tokens)
        arrays = session.run_all(inputs, limit)
        for output in self._graph.outputs:
            self._check(output, arrays[output.name], num_tokens)
        last = self._graph.outputs[-1]
        if last.num_heads:  # like a request, which takes a different path on a GPU
            requested = RequestedOutput(last.name, last.layout, pattern=last.pattern)
            part = session.run(inputs, [last.name]).part(0, num_tokens[0], requested)
            self._check(last, part[None], num_tokens[:1])

    def _inputs(self, num_tokens: Sequence[int]) -> Inputs:
        """Return a batch (B, T) in which the last token of each text has the largest id."""
        items = [Item(np.zeros(count, np.int64), ()) for count in num_tokens]
        for item in items:
            item.input_ids[-1] = self._model.vocab_size - 1
        return pad(items, max(num_tokens), self._model.pad_token_id)

    def _check(self, output: Output, array: Array, num_tokens: Sequence[int]) -> None:
        batch, length = len(num_tokens), max(num_tokens)
        lengths = iter((batch, *[length] * output.shape.count(None)))
        expected = tuple(next(lengths) if size is None else size for size in output.shape)
        if array.shape != expected or array.dtype != np.float32:
            self._refuse(
                f"returned {output.name} as {array.dtype} {list(array.shape)} for {batch} texts of at most "
                f"{length} tokens, but the manifest specifies float32 {list(expected)}"
            )
        is_per_token = output.layout is Layout.PER_TOKEN
        for row, count in enumerate(num_tokens):
            if output.layout is Layout.PER_TEXT:
                live = array[row]
            else:
                live = array[row, :count] if is_per_token else array[row, :, :count]
            if not np.isfinite(live).all():
                self._refuse(f"returned NaN or infinity in {output.name} for {count} tokens")
            if not is_per_token and output.row_sum is RowSum.ONE:
                whole = live if output.pattern is None else to_dense(live, output.pattern, None)
                self._check_rows(output.name, whole, count)

    def _check_rows(self, name: str, weights: Array, count: int) -> None:
        """Check the attention weights of a text's tokens, shape (H, count, T)."""
        sums = weights.sum(axis=-1, dtype=np.float64)  # (H, count)
        error = float(np.abs(sums - 1).max())
        if error > ROW_SUM_TOLERANCE:
            self._refuse(f"returned rows of {name} whose sum differs from 1 by {error:.3g}")
        if weights.min() < 0:
            self._refuse(f"returned weights of {name} below 0")
        if weights[:, :, count:].any():
            self._refuse(f"returned weights of {name} on padding")

    def _refuse(self, problem: str) -> None:
        raise UnusableGraphError(f"{self._path} {problem}: it does not match the manifest: {REMEDY}")


def _may_be(stated: Sequence[int | str | None], expected: Sequence[int | None]) -> bool:
    """Return whether a declared shape is compatible with the expected one. Dynamic axes match any size."""
    return len(stated) == len(expected) and all(
        not isinstance(size, int) or size == requested
        for size, requested in zip(stated, expected, strict=True)
    )
