"""Limit on streams that clients may keep open for any time: watches of the health, and reflection.

`Calls` does not count them. Without a limit, one client could open all calls that the server accepts, without
an identity.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from attnlens_server.clients import client_at
from attnlens_server.errors import OverloadedError
from attnlens_server.grpc_api.status import call_status
from attnlens_server.serving.admission import SMALL_CALLS, Pool

RETRY_S = 10.0


class OpenStreams:
    """Open streams of all clients, which share them like other resources.

    Args:
        capacity: Maximum number of streams, without a reserve for clients that have few.

    Attributes:
        pool: Counts the streams.
    """

    def __init__(self, capacity: int) -> None:
        self.pool = Pool(capacity, SMALL_CALLS)

    @asynccontextmanager
    async def hold(self, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncGenerator[None]:
        """Count a stream while the block runs. Abort its call if there are too many."""
        pool, client = self.pool, client_at(context.peer())
        held = pool.held_by(client)
        if not pool.available_to(client, has_other_calls=held > 0):
            status = call_status(
                OverloadedError(
                    f"{pool.used} of at most {pool.capacity} streams for health and reflection are open, "
                    f"{held} of them from this client: end some of them",
                    metadata={"resource": "streams"},
                    retry_after_s=RETRY_S,
                )
            )
            await context.abort(status.code, status.message, status.trailers)
        pool.take(client, 1)
        try:
            yield
        finally:
            pool.put_back(client, 1)
