"""Texts in, seconds out: the request that every in-process contestant answers."""

import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from bench.lines import Answer, answer_lines

Run = Callable[..., Any]
"""Takes texts, the task (`embed`, `tokens`, `attention`, `attention mean`), the texts in a batch, and what
else a choice of its contestant has."""


def timed(run: Run) -> Callable[..., Answer]:
    """Return a handler that answers with the seconds of `run` and, if asked for, the vectors."""

    def handle(
        texts: list[str],
        what: str,
        batch_size: int,
        return_vectors: bool = False,
        one_by_one: bool = False,
        **choice: int,
    ) -> Answer:
        calls = [[text] for text in texts] if one_by_one else [texts]
        results: list[Any] = []
        seconds: list[float] = []
        for call in calls:
            started = time.perf_counter()
            results += run(call, what, batch_size, **choice)
            seconds.append(time.perf_counter() - started)
        answer: Answer = {"seconds": sum(seconds)}
        if one_by_one:
            answer["seconds_by_text"] = seconds
        if return_vectors:
            answer["vectors"] = [[float(number) for number in vector] for vector in results]
        return answer

    return handle


def answer_texts(run: Run, packages: Sequence[str]) -> None:
    """Answer requests for `run` until there are no more."""
    answer_lines(timed(run), versions={name: version(name) for name in packages})


def sorted_batches(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Cut the indices of texts, sorted by length, into batches."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
