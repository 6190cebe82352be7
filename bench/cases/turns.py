"""All cases in turns; one that fails is a row that says why, and the others continue."""

import sys
from collections.abc import Callable, Sequence
from functools import partial

from bench.cases.row import Case
from bench.lines import ProcessError


def prepare_all(cases: Sequence[Case]) -> None:
    """Warm up every case; one that fails is out."""
    for case in cases:
        attempt(case, case.prepare)


def interleave(cases: Sequence[Case], repetitions: int) -> None:
    """Measure A B C A B C ..., so that a disturbance or a warm machine hits all alike."""
    for repetition in range(repetitions):
        print(f"Repetition {repetition + 1} of {repetitions} ...", file=sys.stderr, flush=True)
        for case in cases:
            attempt(case, partial(measure_once, case))


def measure_once(case: Case) -> None:
    case.samples.append(case.measure())


def attempt(case: Case, do: Callable[[], object]) -> None:
    """Do something with a case unless it failed before; a failure drops its samples."""
    if case.failure:
        return
    try:
        do()
    except ProcessError as error:
        case.failure = str(error)
        case.samples.clear()
