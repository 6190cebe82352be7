"""What the core tells a driver to do, and what the driver tells the core has happened.

A driver runs a generator of steps. It starts the calls that the generator asks for, waits when it is told
to, hands items on to the caller, and cancels what still runs when the generator ends, in whatever way.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import grpc

_T = TypeVar("_T")

Method: TypeAlias = Literal[
    "Embed", "Encode", "EncodeStream", "Tokenize", "GetModel", "ListModels", "Explain", "Compare"
]


@dataclass(frozen=True, slots=True)
class Start:
    """Start a call. Nothing is sent back to the core.

    Attributes:
        call_id: what names the call in events. The core uses a number again when the call has ended.
        method: the method of the service. A call of `EncodeStream` has many replies; no other call runs
            beside it.
        request: its message.
        timeout_s: the seconds that are left for it. None: no deadline.
    """

    call_id: int
    method: Method
    request: Any
    timeout_s: float | None


@dataclass(frozen=True, slots=True)
class Wait:
    """Send the next event to the core, or None when `seconds` have passed without one. None: wait for one."""

    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    """End all calls that still run; nothing of them is sent to the core any more."""


@dataclass(frozen=True, slots=True)
class Item(Generic[_T]):
    """Hand `value` to the caller. Nothing is sent back to the core."""

    value: _T


@dataclass(frozen=True, slots=True)
class Reply:
    """A message has come. With it the call has ended, unless it is a stream."""

    call_id: int
    message: Any


@dataclass(frozen=True, slots=True)
class Ended:
    """A stream has brought all its messages."""

    call_id: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The call has failed. `error` has `code()`, `details()` and `trailing_metadata()`, as of grpc.Call."""

    call_id: int
    error: grpc.RpcError


Event: TypeAlias = Reply | Ended | Failed
# A method of the client that hands items of a type to its caller.
Steps: TypeAlias = Generator[Start | Wait | Cancel | Item[_T], Event | None, None]
