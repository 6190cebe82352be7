"""Rate limits: token buckets for the texts and the tokens of a client."""

import math
import time
from collections.abc import Callable

from attnlens_server.errors import RateLimitedError

UNLIMITED = math.inf
_ROUNDING = 1e-6
_MAX_WAIT_S = 365 * 86_400.0


class Bucket:
    """Token bucket: an amount that grows at a constant rate up to a burst.

    It may become negative: a debt that the rate repays.

    Args:
        clock: Monotonic clock, in seconds.
    """

    __slots__ = ("_burst", "_clock", "_level", "_rate", "_updated")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rate, self._burst, self._level = UNLIMITED, 0.0, 0.0
        self._updated = clock()

    def configure(self, rate: float, burst: float) -> None:
        """Set rate and burst. Amounts already taken remain taken."""
        taken = 0.0 if self._rate == UNLIMITED else self._burst - self.level()
        self._rate, self._burst, self._level = rate, burst, burst - taken
        self._updated = self._clock()

    @property
    def rate(self) -> float:
        """Growth per second."""
        return self._rate

    def level(self) -> float:
        """Return the available amount."""
        if self._rate == UNLIMITED:
            return UNLIMITED
        now = self._clock()
        self._level = min(self._burst, self._level + self._rate * (now - self._updated))
        self._updated = now
        return self._level

    def wait_s(self, amount: float) -> float:
        """Return the seconds until `amount` is available, or the burst if it is smaller. At most a year."""
        if self._rate == UNLIMITED:
            return 0.0
        missing = min(amount, self._burst) - self.level()
        return min(missing / self._rate, _MAX_WAIT_S) if missing > _ROUNDING else 0.0

    def take(self, amount: float) -> None:
        """Take an amount, also if less is available."""
        self._level -= amount


class RateLimits:
    """Rates of one client. Used on the event loop only.

    The number of texts is known before a request is processed: it is taken if the bucket has it, and from a
    full bucket also if the request exceeds the burst. Tokens are counted after tokenization, so the bucket
    may become negative, and further requests are rejected until it is positive.
    """

    __slots__ = ("_texts", "_tokens")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._texts, self._tokens = Bucket(clock), Bucket(clock)

    def configure(
        self, texts_per_second: float, burst_texts: float, tokens_per_second: float, burst_tokens: float
    ) -> None:
        """Set rates and bursts."""
        self._texts.configure(texts_per_second, burst_texts)
        self._tokens.configure(tokens_per_second, burst_tokens)

    def take_texts(self, count: int) -> None:
        """Take the texts of a request.

        Raises:
            RateLimitedError: Too many texts or tokens were sent before.
        """
        if wait_s := self._texts.wait_s(count):
            raise _rejection("texts", self._texts.rate, wait_s)
        if wait_s := self._tokens.wait_s(1):
            raise _rejection("tokens", self._tokens.rate, wait_s)
        self._texts.take(count)

    def take_tokens(self, count: int) -> None:
        """Take the tokens of a request that `take_texts` has accepted."""
        self._tokens.take(count)

    def give_back(self, num_texts: int, num_tokens: int) -> None:
        """Give back what a request has taken."""
        self._texts.take(-num_texts)
        self._tokens.take(-num_tokens)


def _rejection(resource: str, rate: float, wait_s: float) -> RateLimitedError:
    return RateLimitedError(
        f"this client may send {rate:,.10g} {resource} per second on average and has sent more: "
        f"try again in {math.ceil(10 * wait_s) / 10:,.10g} s",
        metadata={"resource": resource, f"{resource}_per_second": f"{rate:g}"},
        retry_after_s=wait_s,
    )
