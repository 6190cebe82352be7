"""Limits on calls of health and reflection, which may need no identity and which `Calls` does not count.

Clients may keep watches and reflection open for any time. Without a limit, one client could open all calls
that the server accepts, without an identity.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from attnlens_server.clients import client_at
from attnlens_server.core.admission import SMALL_CALLS, Pool
from attnlens_server.errors import OverloadedError, RequestError
from attnlens_server.grpc_api.receiving import AnyMessage, BriefReceiver
from attnlens_server.grpc_api.status import call_status, parse_or_abort

RETRY_S = 10.0
MAX_REFLECTIONS = 8
"""Maximum number of reflection streams, each of which may send a message of any allowed size."""


class OpenStreams:
    """Open streams of all clients, which share them like other resources.

    Args:
        capacity: Maximum number of streams, without a reserve for clients that have few.

    Attributes:
        pool: Counts the streams.
    """

    def __init__(self, capacity: int) -> None:
        self.pool = Pool(capacity, SMALL_CALLS)
        self._receiver = BriefReceiver()

    async def receive(
        self, message_class: type[AnyMessage], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AnyMessage:
        """Return the request of a call. Abort the call if it is invalid or was not received in time."""
        try:
            data = await self._receiver.receive(context, message_class)
        except RequestError as error:
            status = call_status(error)
        else:
            return await parse_or_abort(message_class, data, context)
        await context.abort(status.code, status.message, status.trailers)
        raise AssertionError  # abort does not return

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
