"""Request handler shared by all in-process contestants: runs texts and returns timings."""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any, TypeVar

from bench.lines import Response, serve_lines

T = TypeVar("T")
Run = Callable[..., Any]
"""Function of texts, task (`embed`, `tokens`, `attention`, `attention mean`), batch size and further options
of a batching choice."""


def timed(run: Run) -> Callable[..., Response]:
    """Return a handler that times `run` and optionally returns the vectors."""

    def handle(
        texts: list[str],
        what: str,
        batch_size: int,
        return_vectors: bool = False,
        one_by_one: bool = False,
        **choice: int,
    ) -> Response:
        calls = [[text] for text in texts] if one_by_one else [texts]
        results: list[Any] = []
        seconds: list[float] = []
        for call in calls:
            started = time.perf_counter()
            results += run(call, what, batch_size, **choice)
            seconds.append(time.perf_counter() - started)
        response: Response = {"seconds": sum(seconds)}
        if one_by_one:
            response["seconds_by_text"] = seconds
        if return_vectors:
            response["vectors"] = [[float(number) for number in vector] for vector in results]
        return response

    return handle


def serve_texts(run: Run, packages: Sequence[str]) -> None:
    """Serve requests for `run` until stdin is closed."""
    serve_lines(timed(run), versions={name: version(name) for name in packages})


def sorted_batches(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Return batches of text indices, sorted by length."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def run_in_threads(
    work: Callable[[T], object],
    batches: Iterable[T],
    num_threads: int,
    initializer: Callable[[], object] = lambda: None,
) -> None:
    """Run `work` on each batch. Each thread calls `initializer` first, and takes the next batch when idle."""
    with ThreadPoolExecutor(num_threads, initializer=initializer) as pool:
        for _ in pool.map(work, batches):
            pass
