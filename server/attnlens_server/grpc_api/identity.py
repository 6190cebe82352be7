"""Identifies the senders of gRPC calls."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc

from attnlens_server.access import Access, name_in_certificate
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
        return self._access.identify(
            context.peer(),
            (method,),
            authorization,
            lambda: _certificate_name(context),
            is_bulk=priority == BULK,
        )

    async def check(self, context: Context, method: str, code: grpc.StatusCode | None = None) -> None:
        """Abort a call that does not run in `Calls`, unless its sender may call the method.

        `code` replaces the status code of the error.
        """
        try:
            self.identify(context, method)
        except RequestError as error:
            status = call_status(error)
            await context.abort(code or status.code, status.message, status.trailers)

    async def check_health(self, context: Context, method: str) -> None:
        """Abort a health check, unless they are open or its sender is known.

        gRPC's clients watch the health without credentials. If it is UNIMPLEMENTED, they send calls without
        it; after another status, they would not send any.
        """
        if not self._access.has_open_health:
            code = grpc.StatusCode.UNIMPLEMENTED if method == "Watch" else None
            await self.check(context, method, code)


async def accept(context: Context, method: str) -> None:
    """Accept any call."""


def _certificate_name(context: Context) -> str:
    """Return the name in the client certificate, or an empty string."""
    properties = context.auth_context()
    names = (properties.get(name, ()) for name in _CERTIFICATE_NAMES)
    return name_in_certificate(*([value.decode("utf-8", "replace") for value in each] for each in names))
