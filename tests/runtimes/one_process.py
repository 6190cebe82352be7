"""Runtimes in one process for many graphs: starting one for each takes longer than running small graphs.

What a process of its own is for, crashes and silence, test_process.py has. Nothing here imports torch.
"""

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self
from unittest import mock

import numpy as np
import numpy.typing as npt

from attnlens_runtimes import RUNTIMES, Installed, RuntimeFailureError
from attnlens_runtimes.runtime import FP32_OPTION, Feed, Opened, PythonRuntime

_opened: dict[str, Opened] = {}  # in that process


def _open(name: str, path: str, *, in_fp32: bool) -> str:
    runtime = RUNTIMES[name]
    assert isinstance(runtime, PythonRuntime)
    open_graph = runtime.open_in_fp32 if in_fp32 else runtime.open_graph
    assert open_graph is not None
    _opened[path] = open_graph(Path(path))
    return _opened[path].precision


def _run(path: str, feed: Feed) -> list[npt.NDArray[np.float32]]:
    return [np.array(output, np.float32) for output in _opened[path].run(feed)]


def _close(path: str) -> None:
    del _opened[path]


class _Graph:
    """In the place of a `GraphProcess`."""

    def __init__(self, executor: ProcessPoolExecutor, runtime: Installed, graph: Path) -> None:
        self._executor, self._runtime, self._path = executor, runtime, str(graph)

    def __enter__(self) -> Self:
        in_fp32 = FP32_OPTION in self._runtime.command
        self.precision = self._there(_open, self._runtime.name, self._path, in_fp32=in_fp32)
        return self

    def __exit__(self, *_error: object) -> None:
        self._there(_close, self._path)

    def run(self, feed: Feed) -> Sequence[npt.NDArray[Any]]:
        outputs: Sequence[npt.NDArray[Any]] = self._there(_run, self._path, dict(feed))
        return outputs

    def _there(self, function: Any, *args: Any, **options: Any) -> Any:
        try:
            return self._executor.submit(function, *args, **options).result()
        except Exception as error:
            raise RuntimeFailureError(str(error)) from error


@contextmanager
def one_process() -> Iterator[None]:
    """Measure runtimes in one process: each graph is opened and run there, one after the other."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:

        def opened(runtime: Installed, graph: Path, _timeout_s: float) -> _Graph:
            return _Graph(executor, runtime, graph)

        with mock.patch("attnlens_export.runtimes.measure.GraphProcess", opened):
            yield
