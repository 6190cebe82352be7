"""Batches respect their limits, always contain the first text and have little padding. Clients take turns."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlens_server.clients import Client
from attnlens_server.engine.scheduler import BatchLimits, LengthBuckets, Scheduler, Turns, pack, share

DATA = Path(__file__).parents[2] / "data"

waiting = st.lists(st.integers(1, 512), min_size=1, max_size=60)
limits = st.builds(
    BatchLimits,
    max_tokens=st.integers(1, 2048),
    max_padding_share=st.floats(0, 1),
    max_square_tokens=st.none() | st.integers(1, 512 * 512 * 4),
)


@given(waiting, limits)
def test_batch_always_contains_the_first_text(lengths: list[int], limits: BatchLimits) -> None:
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


def served(arrivals: list[tuple[int, Client, int]], rate: int) -> list[tuple[Client, int, int, int]]:
    """Serve texts one by one in virtual time, in the order of their turns.

    Args:
        arrivals: (time, client, tokens), in the order of arrival.
        rate: Tokens per unit of time.

    Returns:
        (client, tokens, arrival, end) in the order of service.
    """
    turns, waiting, done, now = Turns(), list[tuple[float, int, int, Client, int]](), [], 0
    arriving = sorted(enumerate(arrivals), key=lambda entry: entry[1][0])
    while arriving or waiting:
        if not waiting:
            now = max(now, arriving[0][1][0])
        while arriving and arriving[0][1][0] <= now:
            number, (at, client, tokens) = arriving.pop(0)
            waiting.append((turns.assign(client, tokens), number, at, client, tokens))
        waiting.sort(key=lambda entry: entry[:2])
        turn, _, at, client, tokens = waiting.pop(0)
        turns.serve(turn)
        now += -(-tokens // rate)
        done.append((client, tokens, at, now))
    return done


LONGEST = 64
clients = st.builds(Client, st.sampled_from("abcd"), st.sampled_from([0.5, 1.0, 4.0])).map(
    lambda client: Client(client.name, {"a": 1.0, "b": 0.5, "c": 4.0, "d": 1.0}[client.name])
)


@given(st.lists(st.tuples(st.integers(0, 200), clients, st.integers(1, LONGEST)), min_size=1, max_size=60))
def test_texts_of_a_client_run_in_the_order_of_their_arrival(arrivals: list[tuple[int, Client, int]]) -> None:
    done = served(arrivals, rate=1)
    assert len(done) == len(arrivals)
    for name in "abcd":
        times = [at for client, _, at, _ in done if client.name == name]
        assert times == sorted(times)


@given(st.integers(1, 8), st.integers(1, 40), st.integers(1, LONGEST), st.integers(0, 500))
def test_client_with_one_text_waits_for_one_text_of_each_other_client(
    num_heavy: int, backlog: int, length: int, at: int
) -> None:
    heavy = [(0, Client(f"heavy {number}"), LONGEST) for number in range(num_heavy) for _ in range(backlog)]
    done = served([*heavy, (at, Client("light"), length)], rate=1)
    [end] = [end for client, _, _, end in done if client.name == "light"]
    assert end - at <= length + (num_heavy + 1) * LONGEST


@given(st.sampled_from([0.5, 1.0, 2.0, 4.0]), st.integers(20, 80))
def test_backlogged_clients_are_served_in_proportion_to_their_shares(weight: float, backlog: int) -> None:
    first, second = Client("first", weight), Client("second")
    done = served([(0, client, 8) for client in (first, second) for _ in range(4 * backlog)], rate=8)
    tokens = {"first": 0, "second": 0}
    for client, length, _, _ in done[:backlog]:
        tokens[client.name] += length
        assert abs(tokens["first"] / weight - tokens["second"]) <= 8 / weight + 8


def test_clients_without_waiting_texts_are_forgotten() -> None:
    turns = Turns()
    for number in range(5000):
        turns.serve(turns.assign(Client(str(number)), 1))
        turns.serve(turns.assign(Client("always"), 1))
    assert len(turns._ends) < 1100
