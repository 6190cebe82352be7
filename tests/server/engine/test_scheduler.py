"""Batches respect their limits, always contain the oldest text and have little padding."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlens_server.engine.scheduler import BatchLimits, LengthBuckets, Scheduler, pack, share

DATA = Path(__file__).parents[2] / "data"

waiting = st.lists(st.integers(1, 512), min_size=1, max_size=60)
limits = st.builds(
    BatchLimits,
    max_tokens=st.integers(1, 2048),
    max_padding_share=st.floats(0, 1),
    max_square_tokens=st.none() | st.integers(1, 512 * 512 * 4),
)


@given(waiting, limits)
def test_batch_always_contains_the_oldest_text(lengths: list[int], limits: BatchLimits) -> None:
    chosen = pack(lengths, limits)
    assert chosen[0] == 0
    assert chosen == sorted(set(chosen))
    assert chosen[-1] < len(lengths)


@given(waiting, limits)
def test_batch_of_several_texts_respects_every_limit(lengths: list[int], limits: BatchLimits) -> None:
    chosen = [lengths[index] for index in pack(lengths, limits)]
    if len(chosen) == 1:
        return
    num_tokens = len(chosen) * max(chosen)
    assert num_tokens <= limits.max_tokens
    assert num_tokens - sum(chosen) <= limits.max_padding_share * num_tokens
    if limits.max_square_tokens is not None:
        assert num_tokens * max(chosen) <= limits.max_square_tokens


def test_attention_memory_grows_with_the_square_of_the_longest_text() -> None:
    limits = BatchLimits(10_000, max_square_tokens=3 * 100**2)
    assert len(pack([100] * 10, limits)) == 3
    assert len(pack([50] * 20, limits)) == 12


@given(waiting, limits)
def test_text_waits_for_at_most_one_batch_per_earlier_text(lengths: list[int], limits: BatchLimits) -> None:
    queue = list(enumerate(lengths))
    num_batches = 0
    while queue:
        chosen = set(pack([length for _, length in queue], limits))
        for position, (arrival, _) in enumerate(queue):
            assert position not in chosen or num_batches <= arrival
        queue = [entry for position, entry in enumerate(queue) if position not in chosen]
        num_batches += 1


@given(waiting, limits, st.integers(1, 16))
def test_batch_leaves_items_for_idle_lanes(lengths: list[int], limits: BatchLimits, num_idle: int) -> None:
    """A batch of several texts leaves the other lanes at least their even share."""
    chosen = pack(lengths, share(lengths, limits, num_idle))
    num_taken = sum(lengths[index] for index in chosen)
    assert len(chosen) == 1 or num_taken <= -(-sum(lengths) // num_idle)
    assert len(chosen) == 1 or num_taken <= limits.max_tokens


@given(st.integers(1, 512), st.integers(1, 64))
def test_texts_of_one_length_fill_the_batch(length: int, count: int) -> None:
    chosen = pack([length] * count, BatchLimits(max_tokens=2048, max_padding_share=0))
    assert len(chosen) == max(1, min(count, 2048 // length))


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([10], [0]),
        ([40, 400, 40, 41], [0, 2, 3]),  # next to the long text, all others would be mostly padding
        ([400, 10, 10, 390], [0, 3]),
        ([5000, 10], [0]),  # longer than a batch, so it runs alone
        ([100, 97, 103, 98, 60], [0, 1, 2, 3]),
    ],
)
def test_texts_of_similar_length_run_together(lengths: list[int], expected: list[int]) -> None:
    assert pack(lengths, BatchLimits(max_tokens=1024)) == expected


def test_real_prose_has_little_padding_and_full_batches() -> None:
    lines = (DATA / "passages.jsonl").read_text(encoding="utf-8").splitlines()
    queue = [min(256, len(json.loads(line)["text"].split()) * 4 // 3 + 2) for line in lines]
    limits = BatchLimits(max_tokens=512)
    live = padded = batches = 0
    total = sum(queue)
    while queue:
        chosen = pack(queue[:64], limits)
        lengths = [queue[index] for index in chosen]
        live += sum(lengths)
        padded += len(lengths) * max(lengths)
        batches += 1
        queue = [length for index, length in enumerate(queue) if index not in set(chosen)]
    assert live == total
    assert (padded - live) / padded < 0.05
    assert padded / batches > 200


@given(st.integers(1, 600), st.integers(1, 16), st.integers(1, 512))
def test_length_is_padded_to_the_next_multiple_or_the_maximum(
    num_tokens: int, multiple: int, max_length: int
) -> None:
    padded = LengthBuckets(multiple, max_length).round_up(num_tokens)
    assert num_tokens <= padded < num_tokens + multiple
    assert padded % multiple == 0 or padded == max_length or padded == num_tokens > max_length
    assert padded <= max(num_tokens, max_length)


@given(st.lists(st.integers(1, 256), min_size=1, max_size=60), st.integers(1, 3))
def test_runtime_with_few_shapes_gets_batches_of_one_length_and_allowed_size(
    lengths: list[int], num_idle: int
) -> None:
    counts = (1, 2, 3, 4, 6, 8)
    limits = BatchLimits(max_tokens=1024, max_padding_share=0)
    scheduler = Scheduler(limits, LengthBuckets(16, 250), counts)
    chosen = scheduler.choose(lengths, num_idle)
    assert chosen[0] == 0
    assert len(chosen) in counts
    assert len({scheduler.padded_length(lengths[index]) for index in chosen}) == 1
