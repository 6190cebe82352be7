"""What a call can raise.

AttnlensError                    .violations, .text_index
├── InvalidRequestError          a field has a value that it can't have
│   ├── InputTooLongError        .num_tokens, .max_tokens
│   ├── ResponseTooLargeError    .size_bytes, .max_response_bytes
│   ├── RequestTooLargeError     it needs more than the server gives to all calls together
│   └── RequestTooExpensiveError .computed_tokens, .max_computed_tokens
├── ModelNotFoundError           .available
├── NotSupportedError            the bundle lacks what the method needs, or the server does not serve it
├── UnauthenticatedError         the call does not say who makes it
├── PermissionDeniedError        who makes the call may not make it
├── OverloadedError              still so after all retries
├── RateLimitedError             the caller made too many calls; after all retries
├── UnavailableError             no server, or one that starts or stops; after all retries
├── DeadlineExceededError
├── SlowConsumerError            a stream was left unread for longer than the server waits
└── ServerError                  a fault of the server, .error_id stands in its log
    └── BadReplyError            it answered, but not with what was asked for

Arguments that are wrong whatever the server (a str in place of a list, an unknown pooling) raise
TypeError and ValueError before anything is sent.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import cast

import grpc
from google.protobuf.message import DecodeError

from attnlens.v1 import error_pb2 as pb
from attnlens_client.coloured_text import printable

_DETAILS_TRAILER = "attnlens-error-bin"
_REASON_TRAILER = "attnlens-error-reason"
# gRPC itself refuses a message over the limit of either end, with these words and no reason of ours.
_LARGER_THAN_MAX = re.compile(r"(CLIENT|SERVER): \w+ message larger than max \((\d+) vs\. (\d+)\)")

_NUMBER = re.compile(r"[0-9]{1,19}")
# What gRPC says of bytes that are no message of the type.
_NO_MESSAGE = "Exception deserializing response!"

# What fields of a request are called among the arguments of a method.
_ARGUMENTS = {
    "inputs": "texts",
    "prompt.name": "prompt_name",
    "prompt.text": "prompt",
    "data_type": "dtype",
}
_TEXT_FIELDS = {".text", ".text_pair"}  # the text itself
_MAX_NAMED = 3

# Parts of gRPC's messages for an address where another program answers, or a server that wants TLS.
_SIGNS_OF_ANOTHER_PROGRAM = ("HTTP/2", "http2 header with status", "http1.x", "content-type")
_SIGNS_OF_OTHER_TLS = ("handshake", "SSL", "erification")
_SIGNS_OF_TLS = ("Socket closed", "onnection reset", "Broken pipe", "GOAWAY")


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """An invalid argument and its defect.

    Attributes:
        field: which one, for instance `texts[7]` or `attention[0].layers[2]`.
        description: a sentence that follows it, for instance `has 300 tokens, the model takes 256: ...`.
        text_index: the number of the text that the field leads into, from 0. None: it leads into none.
    """

    field: str
    description: str
    text_index: int | None = None


class AttnlensError(Exception):
    """A call failed. The grpc.RpcError is the `__cause__`.

    Attributes:
        message: what is wrong and what to do about it.
        code: the gRPC status.
        reason: the name of an `attnlens.v1.ErrorReason` without its prefix, for instance
            `INPUT_TOO_LONG`. Empty where the failure did not come from an attnlens server.
        metadata: what the server says about the failure, for instance `{"num_tokens": "300"}`.
        violations: the arguments that are to blame, texts by the caller's own numbers.
        retry_delay_s: when the server says to try again. None: it does not say.
    """

    def __init__(
        self,
        message: str,
        code: grpc.StatusCode = grpc.StatusCode.UNKNOWN,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        violations: Sequence[FieldViolation] = (),
        retry_delay_s: float | None = None,
    ) -> None:
        self.message = message
        self.code = code
        self.reason = reason
        self.metadata = dict(metadata or {})
        self.violations = tuple(violations)
        self.retry_delay_s = retry_delay_s
        # All of them, so that it can be pickled.
        super().__init__(message, code, reason, self.metadata, self.violations, retry_delay_s)

    def __str__(self) -> str:
        return self.message

    @property
    def text_index(self) -> int | None:
        """The number of the first text that is to blame, from 0. None: no text is."""
        indices = (violation.text_index for violation in self.violations)
        return next((index for index in indices if index is not None), None)

    def _number(self, key: str) -> int:
        value = self.metadata.get(key, "")
        return int(value) if _NUMBER.fullmatch(value) else 0


class InvalidRequestError(AttnlensError):
    """The request asks for something that can't be: sending it again will not help."""


class InputTooLongError(InvalidRequestError):
    """A text has more tokens than the model takes, and `truncate` is not set."""

    @property
    def num_tokens(self) -> int:
        """The tokens of the text, special tokens included."""
        return self._number("num_tokens")

    @property
    def max_tokens(self) -> int:
        """The most tokens that the model takes."""
        return self._number("max_tokens")


class ResponseTooLargeError(InvalidRequestError):
    """The result of one text exceeds the message size limit. Use `encode_stream` or `encode_stream_parts`."""

    @property
    def size_bytes(self) -> int:
        """The size that the message would have."""
        return self._number("size_bytes")

    @property
    def max_response_bytes(self) -> int:
        """The limit."""
        return self._number("max_response_bytes")


class RequestTooLargeError(InvalidRequestError):
    """The request needs more than the server gives to all calls together: ask for less at a time."""


class RequestTooExpensiveError(InvalidRequestError):
    """The estimated compute cost of the request is over the server's limit."""

    @property
    def computed_tokens(self) -> int:
        """The estimate, in tokens."""
        return self._number("computed_tokens")

    @property
    def max_computed_tokens(self) -> int:
        """The limit."""
        return self._number("max_computed_tokens")


class NotSupportedError(AttnlensError):
    """The bundle lacks what the method needs, or the server was started without it."""


class ModelNotFoundError(AttnlensError):
    """The server does not hold the model."""

    @property
    def available(self) -> str:
        """The models that it holds, as the server lists them."""
        return self.metadata.get("available", "")


class UnauthenticatedError(AttnlensError):
    """The call does not say who makes it, or not so that it can be believed: see `metadata` of the client."""


class PermissionDeniedError(AttnlensError):
    """Who makes the call may not make it."""


class OverloadedError(AttnlensError):
    """The server holds as many waiting texts as it may, and still did after the retries."""


class RateLimitedError(AttnlensError):
    """Who makes the call has made too many, and still had after the retries."""


class UnavailableError(AttnlensError):
    """No server answers at the address, or it is starting or stopping; the retries are used up."""


class DeadlineExceededError(AttnlensError):
    """The call took longer than `timeout_s`."""


class SlowConsumerError(AttnlensError):
    """The parts of a stream were not fetched for longer than the server holds them."""


class ServerError(AttnlensError):
    """The server failed at a request that it should have answered."""

    @property
    def error_id(self) -> str:
        """What to look for in the server's log. Empty where the server gave none."""
        return self.metadata.get("error_id", "")


class BadReplyError(ServerError):
    """The call succeeded, but its reply is not what was asked for: rows, widths, names, numbers.

    Another program may answer at the address, something on the way may have changed the reply, or the
    model was replaced between two calls. Nothing of the reply was used.
    """


_BY_REASON: dict[str, type[AttnlensError]] = {
    "INVALID_FIELD": InvalidRequestError,
    "INPUT_TOO_LONG": InputTooLongError,
    "RESPONSE_TOO_LARGE": ResponseTooLargeError,
    "REQUEST_TOO_LARGE": RequestTooLargeError,
    "REQUEST_TOO_EXPENSIVE": RequestTooExpensiveError,
    "NOT_SUPPORTED": NotSupportedError,
    "MALFORMED_REQUEST": InvalidRequestError,
    "MODEL_NOT_FOUND": ModelNotFoundError,
    "UNAUTHENTICATED": UnauthenticatedError,
    "PERMISSION_DENIED": PermissionDeniedError,
    "OVERLOADED": OverloadedError,
    "RATE_LIMITED": RateLimitedError,
    "NOT_READY": UnavailableError,
    "SHUTTING_DOWN": UnavailableError,
    "DEADLINE_EXCEEDED": DeadlineExceededError,
    "SLOW_CONSUMER": SlowConsumerError,
    "INTERNAL": ServerError,
    "GRAPH_UNAVAILABLE": ServerError,
}
# For failures without a reason that is known here: of gRPC itself, of a proxy, of a newer server.
_BY_CODE: dict[grpc.StatusCode, type[AttnlensError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequestError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.UNKNOWN: ServerError,
    grpc.StatusCode.INTERNAL: ServerError,
    grpc.StatusCode.DATA_LOSS: ServerError,
    grpc.StatusCode.UNIMPLEMENTED: ServerError,
}


def from_rpc_error(error: grpc.RpcError, first_index: int = 0) -> AttnlensError:
    """Return the exception for a failed call, by the server's reason, else by the status.

    `first_index` is the caller's number of the call's first text: the server counts from 0 in each call.
    """
    call = cast("grpc.Call", error)  # what gRPC raises for a call is a Call as well, in both APIs
    code, message = call.code(), printable(call.details() or "")
    if message == _NO_MESSAGE:
        return no_message_error()
    refused = _LARGER_THAN_MAX.search(message)
    if refused is not None:
        kind = ResponseTooLargeError if refused[1] == "CLIENT" else InvalidRequestError
        return kind(message, code, "", {"size_bytes": refused[2], "max_response_bytes": refused[3]})
    trailers = dict(call.trailing_metadata() or ())
    details = _details(trailers.get(_DETAILS_TRAILER))
    reason = str(trailers.get(_REASON_TRAILER, "")) or _reason_name(details)
    violations = [_violation(violation, first_index) for violation in details.violations]
    return (_BY_REASON.get(reason) or _BY_CODE.get(code, AttnlensError))(
        _joined(violations) or message or code.name,
        code,
        printable(reason),
        {key: printable(value) for key, value in details.metadata.items()},
        violations,
        details.retry_delay.ToTimedelta().total_seconds() if details.HasField("retry_delay") else None,
    )


def _details(trailer: str | bytes | None) -> pb.ErrorDetails:
    """Read the trailer; none, or one that is no message, says nothing."""
    try:
        return pb.ErrorDetails.FromString(trailer if isinstance(trailer, bytes) else b"")
    except DecodeError:
        return pb.ErrorDetails()


def _reason_name(details: pb.ErrorDetails) -> str:
    value = pb.ErrorReason.DESCRIPTOR.values_by_number.get(details.reason)
    return value.name.removeprefix("ERROR_REASON_") if value is not None and value.number else ""


def _violation(message: pb.FieldViolation, first_index: int) -> FieldViolation:
    field, description = printable(message.field), printable(message.description)
    if not message.HasField("input_index"):
        return FieldViolation(_ARGUMENTS.get(field, field), description)
    index = first_index + message.input_index
    rest = field.removeprefix(f"inputs[{message.input_index}]")
    return FieldViolation(f"texts[{index}]{'' if rest in _TEXT_FIELDS else rest}", description, index)


def _joined(violations: Sequence[FieldViolation]) -> str:
    told = [f"{violation.field} {violation.description}" for violation in violations[:_MAX_NAMED]]
    told += [f"and {len(violations) - _MAX_NAMED} more"] if len(violations) > _MAX_NAMED else []
    return "; ".join(told)


def refusal(description: str, *, field: str = "", text_index: int | None = None) -> InvalidRequestError:
    """Return what this client refuses on its own, as the server would."""
    violation = FieldViolation(field or f"texts[{text_index}]", description, text_index)
    return InvalidRequestError(_joined([violation]), grpc.StatusCode.INVALID_ARGUMENT, violations=[violation])


def closed_error(cause: BaseException | None = None, *, closed: str = "client") -> AttnlensError:
    """Return what a call raises after the client, or what `closed` says, was closed."""
    error = AttnlensError(f"the {closed} was closed", grpc.StatusCode.CANCELLED)
    error.__cause__ = cause
    return error


def no_message_error() -> BadReplyError:
    """Return the failure of a call whose reply has other bytes than a message of its type."""
    return BadReplyError("the reply is wrong: its bytes are no message of the reply's type")


class Trouble(Enum):
    """Why no attnlens server answers at an address."""

    NO_SERVER = "no server"
    NO_SERVER_OR_TLS = "no server, or one that uses TLS"
    OTHER_PROGRAM = "another program"
    OTHER_TLS = "no TLS that both ends accept"


def trouble_of(error: BaseException | None, *, answered: bool, uses_tls: bool) -> tuple[Trouble, str]:
    """Return why no server answers, and what gRPC says of it, which is what there is to go by.

    Args:
        error: what gRPC has raised, the `__cause__` of an UnavailableError or a ServerError without reason.
        answered: whether some program has answered, as with a ServerError.
        uses_tls: whether the client does.
    """
    details = (cast("grpc.Call", error).details() or "") if isinstance(error, grpc.RpcError) else ""
    cause = printable(details.rpartition("last error: ")[2])
    if uses_tls and any(sign in cause for sign in _SIGNS_OF_OTHER_TLS):
        return Trouble.OTHER_TLS, cause
    if answered or any(sign in cause for sign in _SIGNS_OF_ANOTHER_PROGRAM):
        return Trouble.OTHER_PROGRAM, cause
    if not uses_tls and any(sign in cause for sign in _SIGNS_OF_TLS):
        return Trouble.NO_SERVER_OR_TLS, cause
    return Trouble.NO_SERVER, cause
