"""Who may come in. What is full refuses at once and says when to come back; nothing waits in front of it.

Two things are counted. Texts that wait or run, for each graph by itself, so that a crowd asking for
attention does not shut out embeddings. And the bytes of replies that are being made or sent, which is
where the memory goes when clients read slowly.

Everything here runs on the event loop, hence no locks.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from attnlens_server.engine import SessionWorker
from attnlens_server.errors import OverloadedError

REPLY_RETRY_S = 0.25


class Admission:
    """Counts what is inside."""

    def __init__(self, max_texts: int, max_reply_bytes: int) -> None:
        self._max_texts = max_texts
        self._max_reply_bytes = max_reply_bytes
        self._num_texts: Counter[SessionWorker] = Counter()
        self._reply_bytes = 0

    @contextmanager
    def texts(self, worker: SessionWorker, count: int) -> Iterator[None]:
        """Hold `count` places of a worker while the block runs.

        Raises:
            OverloadedError: there are not as many.
        """
        taken = self._num_texts[worker]
        if taken + count > self._max_texts:
            raise OverloadedError(
                f"{taken} texts wait or run, at most {self._max_texts} may, and the request has {count}: "
                "try again later",
                retry_after_s=worker.estimate_wait_s(),
            )
        self._num_texts[worker] += count
        try:
            yield
        finally:
            self._num_texts[worker] -= count

    def reply(self, size_bytes: int, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Count a reply of this size until the call is over, that is, until the client has it.

        Raises:
            OverloadedError: clients have not read enough of their replies yet.
        """
        if self._reply_bytes + size_bytes > self._max_reply_bytes:
            raise OverloadedError(
                f"replies of {self._reply_bytes} bytes are being made or sent, at most "
                f"{self._max_reply_bytes} may, and this one would have {size_bytes}: try again later",
                retry_after_s=REPLY_RETRY_S,
            )
        self._reply_bytes += size_bytes

        def give_back(_: object) -> None:
            self._reply_bytes -= size_bytes

        context.add_done_callback(give_back)  # type: ignore[arg-type]  # its stub asks for a class
