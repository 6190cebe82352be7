"""Rate limit for log lines."""

import time
from collections.abc import Callable

BURST = 10
LINES_PER_S = 1.0
_MAX_KEYS = 256


class RateLimit:
    """Allows `BURST` lines per key at once, and `LINES_PER_S` in the long run. Each key has its own budget.

    Args:
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._states: dict[str, tuple[float, float, int]] = {}  # available lines, at this time, suppressed

    def take(self, key: str) -> int | None:
        """Return the number of suppressed lines since the last one, or None to suppress this one."""
        now = self._clock()
        available, at, suppressed = self._states.get(key, (float(BURST), now, 0))
        available = min(BURST, available + LINES_PER_S * (now - at))
        if key not in self._states and len(self._states) >= _MAX_KEYS:
            self._states.clear()
        if available < 1:
            self._states[key] = available, now, suppressed + 1
            return None
        self._states[key] = available - 1, now, 0
        return suppressed
