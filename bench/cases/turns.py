"""Interleaved measurement of all cases. A failed case is recorded, and the others continue."""

import sys
from collections.abc import Callable, Sequence
from functools import partial

from bench.cases.row import Case
from bench.lines import ProcessError


def prepare_all(cases: Sequence[Case]) -> None:
    """Warm up every case. A case that fails is not measured."""
    print(f"Preparing {len(cases)} rows ...", file=sys.stderr, flush=True)
    for case in cases:
        attempt(case, case.prepare)


def interleave(cases: Sequence[Case], repetitions: int) -> None:
    """Measure in the order A B C A B C ..., so that noise affects all cases equally."""
    for repetition in range(repetitions):
        print(f"Repetition {repetition + 1} of {repetitions} ...", file=sys.stderr, flush=True)
        for case in cases:
            attempt(case, partial(measure_once, case))


def measure_once(case: Case) -> None:
    case.samples.append(case.measure())


def attempt(case: Case, action: Callable[[], object]) -> None:
    """Run an action for a case that has not failed. On failure, discard its samples."""
    if case.failure:
        return
    try:
        action()
    except ProcessError as error:
        case.failure = str(error)
        case.samples.clear()
