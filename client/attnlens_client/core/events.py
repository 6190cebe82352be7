"""Commands from the core to a driver, and events from a driver to the core.

A driver runs a generator of steps: it executes each command that the generator yields, sends events back,
yields items to the caller, and cancels running calls when the generator ends or fails.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import grpc

_T = TypeVar("_T")

Method: TypeAlias = Literal[
    "Embed",
    "Encode",
    "EncodeStream",
    "Tokenize",
    "GetModel",
    "ListModels",
    "Explain",
    "Compare",
    "Score",
    "Classify",
]


@dataclass(frozen=True, slots=True)
class Start:
    """Start a call. The driver sends nothing back.

    Attributes:
        call_id: Identifier of the call in events. Retries reuse it.
        method: Method of the service. `EncodeStream` has several replies and runs alone.
        request: Request message.
        timeout_s: Timeout in seconds, or None for no deadline.
    """

    call_id: int
    method: Method
    request: Any
    timeout_s: float | None


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for the next event, or for `seconds`. The driver sends the event, or None after a timeout."""

    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel all running calls. The driver sends no further events of them."""


@dataclass(frozen=True, slots=True)
class Item(Generic[_T]):
    """Yield `value` to the caller. The driver sends nothing back."""

    value: _T


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply has arrived. The call has ended, unless it is a stream."""

    call_id: int
    message: Any


@dataclass(frozen=True, slots=True)
class Ended:
    """A stream has ended."""

    call_id: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A call has failed.

    Attributes:
        call_id: Identifier of the call.
        error: Error with `code()`, `details()` and `trailing_metadata()` of grpc.Call.
        is_connected: False if the deadline has passed without a connection to a server.
    """

    call_id: int
    error: grpc.RpcError
    is_connected: bool = True


Event: TypeAlias = Reply | Ended | Failed
# A method of the client that yields items of a type.
Steps: TypeAlias = Generator[Start | Wait | Cancel | Item[_T], Event | None, None]
