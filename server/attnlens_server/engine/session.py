"""A graph that is open, whatever runs it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt

from attnlens_server.engine.batch import Inputs
from attnlens_server.engine.outputs import BatchOutputs
from attnlens_server.engine.time_limit import TimeLimit


class Value(NamedTuple):
    """An input or output, as the graph states it."""

    name: str
    type: str
    """In ONNX's words, for instance `tensor(float)`."""
    shape: tuple[int | str | None, ...]
    """A number for a fixed length, a name or None for one that varies."""


class Session(Protocol):
    """One graph, ready to run, by many threads at a time.

    Attributes:
        inputs: what it takes.
        outputs: what it gives.
        providers: the execution providers of ONNX Runtime, the preferred one first; empty for other runtimes.
        check_results: called after each batch; raises where what it has brought can't be trusted.
    """

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    providers: tuple[str, ...]
    check_results: Callable[[], None]

    def run(self, inputs: Inputs, output_names: Sequence[str]) -> BatchOutputs:
        """Run a batch to the named outputs, fp32."""

    def run_all(self, inputs: Inputs, limit: TimeLimit) -> dict[str, npt.NDArray[Any]]:
        """Run a batch to every output as the graph gives it, by name, within `limit`."""


def feed_of(inputs: Inputs, values: Sequence[Value]) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays that a graph takes, by name."""
    arrays = inputs._asdict()
    return {value.name: arrays[value.name] for value in values if value.name in arrays}
