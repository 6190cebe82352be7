"""What opens graphs: the one thing that the engine asks, whichever program computes."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, Self

from attnlens_server.bundle import Kind
from attnlens_server.config import EngineName
from attnlens_server.engine.session import Session
from attnlens_server.engine.time_limit import TimeLimit


class Division(NamedTuple):
    """How a session's batches share the machine."""

    threads: int
    """Of one batch; what is not on the CPU need not heed it."""
    num_batches: int
    """That run side by side."""


class Runtime(Protocol):
    """A program that runs graphs, on one device.

    Attributes:
        name: its package.
        device: where it runs, in its own words, for instance `CPU`.
        processor: that device's own name; empty: not known, and not needed, since an export measures ONNX
            Runtime itself.
        is_on_cpu: whether lanes divide the threads of the CPU among them. Elsewhere, all graphs are opened
            at the start, so that the server does not start unless the device really runs them.
        batch_tokens: where throughput stops growing with the batch.
        length_multiple: batches are padded to multiples of it; 1: to their longest text.
        mixes_lengths: whether a text may be padded beyond the next multiple, with longer ones in its batch.
        batch_counts: how many texts a batch may have, ascending from 1; empty: any number.
    """

    name: EngineName
    device: str
    processor: str
    is_on_cpu: bool
    batch_tokens: int
    length_multiple: int
    mixes_lengths: bool
    batch_counts: Sequence[int]

    @property
    def version(self) -> str:
        """That of its package."""

    def open(self, kind: Kind, graph: Path, division: Division, limit: TimeLimit | None = None) -> Session:
        """Open a graph, within `limit`.

        Raises:
            StartupError: it can't be opened, or does not run where and as it was asked for.
        """

    def fallback(self) -> Self | None:
        """Return what to use where this does not run the graphs; None: nothing, it was asked for."""
