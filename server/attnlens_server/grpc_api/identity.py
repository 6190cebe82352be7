"""Identifies the senders of gRPC calls."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc

from attnlens_server.access import Access, Caller, name_in_certificate
from attnlens_server.clients import BULK, PRIORITY, Client
from attnlens_server.errors import RequestError, UnauthenticatedError
from attnlens_server.grpc_api.status import call_status

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Check: TypeAlias = Callable[[Context, str], Awaitable[None]]
"""Ends the call of a method with a status unless its sender may call it."""

_CERTIFICATE_NAMES = ("peer_uri", "peer_dns", "peer_email", "x509_common_name")


class Gate:
    """Access control for gRPC calls."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def identify(self, context: Context, method: str) -> Client:
        """Return the sender of a call to a method.

        Raises:
            UnauthenticatedError, PermissionDeniedError: See `Access.identify`.
        """
        authorization = priority = ""
        for name, value in context.invocation_metadata() or ():
            if name == "authorization":
                if authorization:
                    raise UnauthenticatedError("the metadata has several values of authorization: send one")
                authorization = str(value)
            elif name == PRIORITY:
                priority = str(value)
        caller = Caller(context.peer(), authorization, priority == BULK, lambda: _certificate_name(context))
        return self._access.identify(caller, (method,))

    async def check(self, context: Context, method: str) -> None:
        """Abort a call that does not run in `Calls`, unless its sender may call the method."""
        try:
            self.identify(context, method)
        except RequestError as error:
            status = call_status(error)
            await context.abort(status.code, status.message, status.trailers)

    async def check_health(self, context: Context, method: str) -> None:
        """Abort a health check, unless they are open or its sender is known."""
        if not self._access.has_open_health:
            await self.check(context, method)


async def accept(context: Context, method: str) -> None:
    """Accept any call."""


def _certificate_name(context: Context) -> str:
    """Return the name in the client certificate, or an empty string."""
    properties = context.auth_context()
    names = (properties.get(name, ()) for name in _CERTIFICATE_NAMES)
    return name_in_certificate(*([value.decode("utf-8", "replace") for value in each] for each in names))
