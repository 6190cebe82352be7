"""Audit log: changes of access control, and refused identities. It never contains keys."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attnlens_server.clients import client_at, host_of
from attnlens_server.errors import RequestError
from attnlens_server.rates import Bucket

audit = logging.getLogger("attnlens_server.audit")

PAUSE_S = 60.0
"""Minimum time between two lines about the same sender and cause."""
_MAX_SENDERS = 1024
_LINES_PER_S, _BURST_LINES = 2.0, 50.0
_MAX_NAMES = 50


class RefusalLog:
    """Logs refused calls.

    Each sender gets one line per cause and minute, with the number of omitted ones, and all senders together
    a limited number, so that nobody can flood the log. Causes are messages of access control, which contain
    nothing that a sender has chosen: a missing key does not hide wrong ones.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lines = Bucket(clock)
        self._lines.configure(_LINES_PER_S, _BURST_LINES)
        self._senders: OrderedDict[tuple[str, str, str], tuple[float, int]] = OrderedDict()

    def write(self, error: RequestError, peer: str, name: str, method: str) -> None:
        """Log a refused call.

        Args:
            error: Why the call was refused.
            peer: Address of the sender.
            name: Name of the sender. Empty if it is unknown.
            method: Name of the method.
        """
        now, sender = self._clock(), (client_at(peer).name, name, error.message)
        until, num_omitted = self._senders.pop(sender, (now, 0))
        if now < until or self._lines.level() < 1:
            self._senders[sender] = until, num_omitted + 1
        else:
            self._lines.take(1)
            self._senders[sender] = now + PAUSE_S, 0
            fields = {"reason": error.reason, "peer": host_of(peer), "method": method, "cause": error.message}
            audit.warning(
                "refused",
                extra=fields
                | ({"client": name} if name else {})
                | ({"omitted": num_omitted} if num_omitted else {}),
            )
        if len(self._senders) > _MAX_SENDERS:
            self._senders.popitem(last=False)


def log_changes(path: Path, before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> None:
    """Log the changed names of a file. `before` is None when the file is loaded for the first time."""
    if before is None:
        audit.info("loaded", extra={"file": str(path), "names": len(after)})
        return
    changes = {
        "added": after.keys() - before.keys(),
        "removed": before.keys() - after.keys(),
        "changed": {name for name in before.keys() & after.keys() if before[name] != after[name]},
    }
    audit.info(
        "changed",
        extra={"file": str(path)} | {kind: sorted(names)[:_MAX_NAMES] for kind, names in changes.items()},
    )
