"""Clients share the queue, the memory and the calls of a server."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlens_server.clients import Client, client_at
from attnlens_server.core.admission import Admission, Pool
from attnlens_server.errors import OverloadedError, RateLimitedError

CAPACITY = 2048
LIGHT = Client("light")


def fill(pool: Pool, clients: list[Client], amount: int) -> None:
    """Let clients take turns to take `amount` until all are refused."""
    refused = 0
    while refused < len(clients):
        refused = 0
        for client in clients:
            if pool.available_to(client) >= amount:
                pool.take(client, amount)
            else:
                refused += 1


@given(st.integers(1, 40), st.integers(1, 32))
def test_new_client_finds_room_whatever_others_hold(num_heavy: int, amount: int) -> None:
    pool = Pool(CAPACITY, small=8)
    heavy = [Client(str(number)) for number in range(num_heavy)]
    fill(pool, heavy, amount)
    expected = CAPACITY * 2 / (2 * num_heavy + 1)
    assert all(abs(pool.held_by(client) - expected) <= amount + 1 for client in heavy)
    assert pool.available_to(LIGHT, has_other_calls=False) >= 8
    assert pool.used <= CAPACITY


def test_small_client_is_served_when_the_queue_is_full() -> None:
    pool = Pool(CAPACITY, small=8)
    pool.take(Client("heavy"), CAPACITY)
    for number in range(CAPACITY // 16):
        client = Client(str(number))
        assert pool.available_to(client) == min(8, CAPACITY // 16 - number)
        pool.take(client, 1)
    assert pool.available_to(LIGHT) == 0


def test_share_decides_how_much_a_client_may_hold() -> None:
    pool = Pool(CAPACITY, small=8)
    double, single = Client("double", share=2.0), Client("single")
    for _ in range(100):
        fill(pool, [double, single], 1)
        for client in (double, single):
            pool.put_back(client, pool.held_by(client) // 50)
    fill(pool, [double, single], 1)
    assert pool.held_by(double) == pytest.approx(2 * pool.held_by(single), rel=0.1)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 900)), max_size=40))
def test_pool_counts_what_is_held(requests: list[tuple[str, int]]) -> None:
    pool, held = Pool(CAPACITY, small=8), list[tuple[Client, int]]()
    for name, amount in requests:
        client = Client(name)
        if amount <= pool.available_to(client):
            pool.take(client, amount)
            held.append((client, amount))
        assert pool.num_clients == len({client for client, size in held if size})
        assert pool.used == sum(size for _, size in held) <= CAPACITY + CAPACITY // 16
    for client, amount in held:
        pool.put_back(client, amount)
    assert (pool.used, dict(pool._held)) == (0, {})


def test_refusal_names_the_resource_and_what_the_client_holds() -> None:
    admission = Admission(100, 1 << 20, lambda _: 2.5, max_calls=2)
    client = Client("search")
    admission.acquire_slots("embeddings", 60, client)
    with pytest.raises(
        OverloadedError, match=r"60 of at most 100 texts .*, 60 of them from this client"
    ) as caught:
        admission.acquire_slots("embeddings", 30, client)
    assert (caught.value.metadata, caught.value.retry_after_s) == ({"resource": "texts"}, 2.5)
    admission.acquire_slots("embeddings", 30, LIGHT)
    admission.acquire_call(client)
    admission.acquire_call(LIGHT)
    with pytest.raises(OverloadedError, match="2 of at most 2 calls are open, 1 of them from this client"):
        admission.acquire_call(client)


def test_refusals_because_of_own_calls_are_no_sign_of_a_lockout() -> None:
    admission, client = Admission(100, 1 << 20, lambda _: 1.0, max_calls=16), Client("search")
    for error, expected in ((OverloadedError(""), 1), (RateLimitedError(""), 1)):
        admission.acquire_call(client)
        admission.count_failure(error, client)
        admission.calls.put_back(client, 1)
        assert admission.num_refused == expected
    for _ in range(2):
        admission.acquire_call(client)
    admission.count_failure(OverloadedError(""), client)
    assert admission.num_refused == 1
    admission.count_failure(OverloadedError(""), LIGHT)
    assert admission.num_refused == 2


@pytest.mark.parametrize(
    ("peer", "name"),
    [
        ("ipv4:10.1.2.3:4567", "10.1.2.3"),
        ("ipv6:%5B2001:db8::1%5D:80", "2001:db8::/64"),
        ("ipv6:%5B2001:db8::ffff:0:0:2%5D:81", "2001:db8::/64"),
        ("ipv6:%5B2001:db8:0:1::1%5D:80", "2001:db8:0:1::/64"),
        ("[::ffff:10.1.2.3]:80", "10.1.2.3"),
        ("[fe80::1%eth0]:80", "fe80::1%eth0"),
        ("[::1]:80", "::1"),
        ("10.1.2.3:4567", "10.1.2.3"),
        ("[2001:db8::1]:80", "2001:db8::/64"),
        ("unix:", "unix"),
        ("unix:/run/attnlens.sock", "unix"),
        ("", ""),
    ],
)
def test_client_without_identity_is_its_address(peer: str, name: str) -> None:
    assert client_at(peer) == Client(name)
