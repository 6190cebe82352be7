"""Lone batches use all threads unless the threads of one lane were faster for batches of their size."""

import pytest

from attnlens_server.engine.sessions import RETRY_INTERVAL, SAMPLES, SHORT_S, ThreadChoice


def run(choice: ThreadChoice, num_tokens: int, all_s: float, some_s: float, count: int) -> list[bool]:
    """Return the choices for batches that take these times."""
    choices = []
    for _ in range(count):
        uses_all = choice.uses_all(num_tokens)
        choice.add(num_tokens, all_s if uses_all else some_s, used_all=uses_all)
        choices.append(uses_all)
    return choices


@pytest.mark.parametrize(("some_s", "uses_all"), [(0.0009, False), (0.0011, True)])
def test_the_faster_way_is_used_after_both_were_measured(some_s: float, *, uses_all: bool) -> None:
    choices = run(ThreadChoice(), 16, 0.001, some_s, 2 * SAMPLES + 10)
    assert choices == [True] * SAMPLES + [False] * SAMPLES + [uses_all] * 10


def test_one_slow_run_is_enough_to_stop_trying() -> None:
    assert run(ThreadChoice(), 16, 0.001, 0.003, 20).count(False) == 1


def test_long_batches_always_use_all_threads() -> None:
    assert all(run(ThreadChoice(), 512, 1.1 * SHORT_S, 0.0, 50))


def test_sizes_are_measured_separately() -> None:
    choice = ThreadChoice()
    assert not run(choice, 16, 0.002, 0.001, 20)[-1]
    assert run(choice, 64, 0.002, 0.003, 20)[-1]
    assert not choice.uses_all(31)


def test_a_change_of_the_machine_is_noticed() -> None:
    choice = ThreadChoice()
    run(choice, 16, 0.002, 0.001, 20)
    later = run(choice, 16, 0.0005, 0.001, RETRY_INTERVAL * SAMPLES)
    assert not later[0]
    assert later[-1]


def test_a_slow_run_among_fast_ones_changes_nothing() -> None:
    choice = ThreadChoice()
    run(choice, 16, 0.002, 0.001, 20)
    choice.add(16, 1.0, used_all=False)
    assert not choice.uses_all(16)
