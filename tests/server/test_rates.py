"""Rate limits in virtual time, compared with the definition of a token bucket."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlens_server.clients import Client
from attnlens_server.core.admission import Admission, Budget, Reservation
from attnlens_server.core.request_record import RequestRecord
from attnlens_server.errors import (
    DeadlineError,
    GraphUnavailableError,
    InputTooLongError,
    OverloadedError,
    RateLimitedError,
    RequestError,
    ShuttingDownError,
)
from attnlens_server.grpc_api.status import call_status
from attnlens_server.rates import UNLIMITED, Bucket, RateLimits


@dataclass
class Time:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


RATE = st.floats(0.1, 1000)
BURST = st.floats(1, 1000)
REQUESTS = st.lists(st.tuples(st.floats(0, 10), st.integers(1, 300)), max_size=60)  # pause, texts


@given(rate=RATE, burst=BURST, requests=REQUESTS)
def test_accepted_texts_never_exceed_rate_and_burst(
    rate: float, burst: float, requests: list[tuple[float, int]]
) -> None:
    time = Time()
    limits = RateLimits(time)
    limits.configure(rate, burst, UNLIMITED, 1)
    accepted: list[tuple[float, int]] = []
    for pause, count in requests:
        time.now += pause
        try:
            limits.take_texts(count)
        except RateLimitedError:
            continue
        accepted.append((time.now, count))
    for first in range(len(accepted)):
        for last in range(first, len(accepted)):
            total = sum(count for _, count in accepted[first : last + 1])
            elapsed = accepted[last][0] - accepted[first][0]
            overshoot = max(0.0, accepted[last][1] - burst)  # a request may exceed a full bucket
            assert total <= burst + rate * elapsed + overshoot + 1e-3


@given(rate=RATE, burst=BURST, requests=REQUESTS)
def test_a_rejected_request_is_accepted_after_the_retry_delay_and_not_before(
    rate: float, burst: float, requests: list[tuple[float, int]]
) -> None:
    time = Time()
    limits = RateLimits(time)
    limits.configure(rate, burst, UNLIMITED, 1)
    for pause, count in requests:
        time.now += pause
        try:
            limits.take_texts(count)
        except RateLimitedError as error:
            assert error.retry_after_s is not None
            start = time.now
            time.now = start + error.retry_after_s / 2
            with pytest.raises(RateLimitedError):
                limits.take_texts(count)
            time.now = start + error.retry_after_s
            limits.take_texts(count)


@given(rate=RATE, burst=BURST, requests=REQUESTS)
def test_a_debt_of_tokens_is_repaid_at_the_rate(
    rate: float, burst: float, requests: list[tuple[float, int]]
) -> None:
    time = Time()
    limits = RateLimits(time)
    limits.configure(UNLIMITED, 1, rate, burst)
    level, updated = burst, 0.0  # the definition
    for pause, count in requests:
        time.now += pause
        level, updated = min(burst, level + rate * (time.now - updated)), time.now
        if level < 1 - 1e-3:
            with pytest.raises(RateLimitedError) as caught:
                limits.take_texts(1)
            assert caught.value.metadata["resource"] == "tokens"
            assert caught.value.retry_after_s == pytest.approx((1 - level) / rate, rel=1e-3, abs=1e-3)
        elif level > 1 + 1e-3:
            limits.take_texts(1)
            limits.take_tokens(10 * count)
            level -= 10 * count


def test_a_rejected_request_takes_nothing() -> None:
    limits = RateLimits(Time())
    limits.configure(1, 10, 1, 10)
    limits.take_texts(1)
    limits.take_tokens(30)
    for _ in range(20):
        with pytest.raises(RateLimitedError, match=r"may send 1 tokens per second .* try again in 21 s"):
            limits.take_texts(1)
    limits.configure(1, 10, UNLIMITED, 1)
    limits.take_texts(9)


@given(before=BURST, after=BURST, taken=st.integers(0, 500))
def test_used_up_amounts_survive_a_new_configuration(before: float, after: float, taken: int) -> None:
    bucket = Bucket(Time())
    bucket.configure(1, before)
    bucket.take(taken)
    bucket.configure(2, after)
    assert bucket.level() == pytest.approx(after - taken)


def test_texts_of_a_call_that_runs_several_graphs_are_charged_once() -> None:
    limits = RateLimits(Time())
    limits.configure(1, 4, 2_000_000, 1)
    memory = Reservation(Admission(9, 9, lambda _: 1.0), Client("search", rates=limits))
    budget = Budget(memory)
    for count in (3, 2, 4):
        budget.charge_texts(count)
    with pytest.raises(RateLimitedError):
        budget.charge_texts(5)
    limits.take_tokens(5_000_000_000)
    budget.charge_texts(4)
    with pytest.raises(RateLimitedError) as caught:
        Budget(memory).charge_texts(1)
    assert "1 texts per second" in caught.value.message
    limits.configure(UNLIMITED, 1, 2_000_000, 1)
    with pytest.raises(RateLimitedError, match=r"2,000,000 tokens per second .* try again in 2,500 s"):
        Budget(memory).charge_texts(1)


def test_without_limits_nothing_is_rejected() -> None:
    limits = RateLimits(Time())
    for _ in range(3):
        limits.take_texts(10**9)
        limits.take_tokens(10**12)


@pytest.mark.parametrize(
    ("error", "reply_bytes", "is_free"),
    [
        (OverloadedError("the memory is full"), 0, True),
        (GraphUnavailableError("not now", retry_after_s=1), 0, True),
        (ShuttingDownError("bye"), 0, True),
        (OverloadedError("after the first part of a stream"), 1, False),
        (DeadlineError("too late"), 0, False),
        (InputTooLongError("inputs[0]", 9, 8), 0, False),
    ],
)
def test_request_that_the_server_cannot_serve_costs_nothing(
    error: RequestError, reply_bytes: int, *, is_free: bool
) -> None:
    limits = RateLimits(Time())
    limits.configure(10, 10, 100, 100)
    record = RequestRecord("Embed", client=Client("a", rates=limits), reply_bytes=reply_bytes)
    memory = Reservation(Admission(1, 1, lambda _: 1.0), record.client)
    budget = Budget(memory, None, record.metrics)
    budget.charge_texts(10)
    budget.count_tokens(300)
    record.fail(error)
    if is_free:
        budget.charge_texts(10)
    else:
        record.metrics.num_charged = 0
        with pytest.raises(RateLimitedError):
            budget.charge_texts(10)


@pytest.mark.parametrize("rate", [1e-310, 5e-324, 1e-9])
def test_tiny_rates_have_a_finite_retry_delay(rate: float) -> None:
    limits = RateLimits(Time())
    limits.configure(rate, 1, UNLIMITED, 1)
    limits.take_texts(1)
    with pytest.raises(RateLimitedError, match=r"try again in [0-9,]+ s") as caught:
        limits.take_texts(1)
    assert caught.value.retry_after_s == pytest.approx(min(1 / rate, 365 * 86_400))
    assert call_status(caught.value).reason == "RATE_LIMITED"
