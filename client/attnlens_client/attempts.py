"""How long an overloaded server is asked again.

gRPC's own retries (see channel.py) bridge a moment: five attempts, with the delay that the server
names. Many clients with much work outlast that, so what gRPC gives up as overloaded is tried again here
until the call's deadline, with growing random delays that keep the clients from coming back together.
"""

import random
import time

from attnlens_client.channel import Settings
from attnlens_client.errors import OverloadedError

_FIRST_DELAY_S = 0.1
_MAX_DELAY_S = 5.0


class Attempts:
    """The attempts of one call, from now to its deadline."""

    def __init__(self, settings: Settings) -> None:
        self._deadline = None if settings.timeout_s is None else time.monotonic() + settings.timeout_s
        self._may_retry = settings.max_attempts > 1
        self._delay_s = _FIRST_DELAY_S

    def timeout_s(self) -> float | None:
        """Return what is left of the deadline, for the next attempt. None: there is no deadline."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def delay_s(self, error: OverloadedError) -> float:
        """Return how long to wait before the next attempt.

        Raises:
            OverloadedError: `error`, where the deadline leaves no time for one.
        """
        self._delay_s = min(2 * self._delay_s, _MAX_DELAY_S)
        delay_s = self._delay_s * random.uniform(0.5, 1.0)  # noqa: S311 - spreads load, guards no secret
        left_s = self.timeout_s()
        if not self._may_retry or (left_s is not None and left_s <= delay_s):
            raise error
        return delay_s
