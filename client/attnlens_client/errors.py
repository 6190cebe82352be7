"""Exceptions of the client.

AttnlensError                    .violations, .text_index
├── InvalidRequestError          a field is invalid
│   ├── InputTooLongError        .num_tokens, .max_tokens
│   ├── ResponseTooLargeError    .size_bytes, .max_response_bytes
│   ├── RequestTooLargeError     exceeds the server's limit for all calls
│   └── RequestTooExpensiveError .computed_tokens, .max_computed_tokens
├── ModelNotFoundError           .available
├── NotSupportedError            not supported by the bundle or disabled on the server
├── UnauthenticatedError         missing or invalid credentials
├── PermissionDeniedError        the caller lacks permission
├── OverloadedError              after all retries
├── RateLimitedError             after all retries
├── UnavailableError             no server, or one that is starting or stopping, after all retries
├── DeadlineExceededError
├── SlowConsumerError            a stream was not read in time
└── ServerError                  internal error, with .error_id in the server's log
    └── BadReplyError            the reply is invalid

Arguments that are invalid for any server, such as a str instead of a list or an unknown pooling, raise
TypeError or ValueError before a request is sent.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import cast

import grpc
from google.protobuf.message import DecodeError

from attnlens.short_repr import short_repr
from attnlens.v1 import error_pb2 as pb
from attnlens_client.colored_text import printable

_DETAILS_TRAILER = "attnlens-error-bin"
_REASON_TRAILER = "attnlens-error-reason"
# gRPC rejects a message over the limit of either side with this text and without a reason.
_LARGER_THAN_MAX = re.compile(r"(CLIENT|SERVER): \w+ message larger than max \((\d+) vs\. (\d+)\)")

_NUMBER = re.compile(r"[0-9]{1,19}")
# Details of gRPC when deserialization fails.
_NO_MESSAGE = "Exception deserializing response!"

# Names of request fields among the arguments of a method.
_ARGUMENTS = {
    "inputs": "texts",
    "prompt.name": "prompt_name",
    "prompt.text": "prompt",
    "data_type": "dtype",
}
# Arguments by the name of the field with the inputs.
_INPUT_FIELDS = {"inputs": "texts", "documents": "documents", "pairs": "pairs"}
_TEXT_FIELDS = {".text", ".text_pair"}
_MAX_NAMED = 3

# gRPC's message if the health service of a server does not report SERVING.
_UNHEALTHY = "backend unhealthy"
# gRPC's messages if a server or a proxy resets a call, as a proxy does when it loses the server.
_SIGNS_OF_RESET = ("Stream removed", "RST_STREAM")


@short_repr
@dataclass(frozen=True, slots=True)
class FieldViolation:
    """An invalid argument.

    Attributes:
        field: Path of the argument, such as `texts[7]` or `attention[0].layers[2]`.
        description: Problem, limit and remedy, worded to follow the path: `has 300 tokens, ...`.
        text_index: Index of the text, or None if the argument is not part of a text.
    """

    field: str
    description: str
    text_index: int | None = None


class AttnlensError(Exception):
    """Base class of all errors of calls. The `__cause__` is the grpc.RpcError, if there is one.

    Attributes:
        message: Problem and remedy.
        code: gRPC status code.
        reason: Name of an `attnlens.v1.ErrorReason` without its prefix, such as `INPUT_TOO_LONG`. Empty if
            the error does not come from an attnlens server.
        metadata: Details from the server, such as `{"num_tokens": "300"}`.
        violations: Invalid arguments. Text indices refer to the caller's texts.
        retry_delay_s: Retry delay in seconds from the server, or None.
        connection: Reason why no attnlens server answered, or None.
    """

    connection: "ConnectionFailure | None" = None

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
        # Pickling needs all arguments.
        super().__init__(message, code, reason, self.metadata, self.violations, retry_delay_s)

    def __str__(self) -> str:
        return self.message

    @property
    def text_index(self) -> int | None:
        """Index of the first invalid text, or None."""
        indices = (violation.text_index for violation in self.violations)
        return next((index for index in indices if index is not None), None)

    def _number(self, key: str) -> int:
        value = self.metadata.get(key, "")
        return int(value) if _NUMBER.fullmatch(value) else 0


class InvalidRequestError(AttnlensError):
    """The request is invalid. Retrying will not help."""


class InputTooLongError(InvalidRequestError):
    """A text has too many tokens for the model, and `truncate` is not set."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the text, including special tokens."""
        return self._number("num_tokens")

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens."""
        return self._number("max_tokens")


class ResponseTooLargeError(InvalidRequestError):
    """The result of one text exceeds the message size limit. Use `encode_stream` or `encode_stream_parts`."""

    @property
    def size_bytes(self) -> int:
        """Size of the response in bytes."""
        return self._number("size_bytes")

    @property
    def max_response_bytes(self) -> int:
        """Limit in bytes."""
        return self._number("max_response_bytes")


class RequestTooLargeError(InvalidRequestError):
    """The request needs more than the server's limit for all calls. Send smaller requests."""


class RequestTooExpensiveError(InvalidRequestError):
    """The estimated computation of the request exceeds the server's limit."""

    @property
    def computed_tokens(self) -> int:
        """Estimated computation in tokens."""
        return self._number("computed_tokens")

    @property
    def max_computed_tokens(self) -> int:
        """Limit in tokens."""
        return self._number("max_computed_tokens")


class NotSupportedError(AttnlensError):
    """The bundle does not support the request, or the feature is disabled on the server."""


class ModelNotFoundError(AttnlensError):
    """The requested model is not loaded."""

    @property
    def available(self) -> str:
        """Names of the loaded models."""
        return self.metadata.get("available", "")


class UnauthenticatedError(AttnlensError):
    """Credentials are missing or invalid. Clients send them as `metadata`."""


class PermissionDeniedError(AttnlensError):
    """The caller lacks permission."""


class OverloadedError(AttnlensError):
    """The server is overloaded, after all retries."""


class RateLimitedError(AttnlensError):
    """The caller exceeded its rate limit, after all retries."""


class UnavailableError(AttnlensError):
    """No server answers, or it is starting or stopping, after all retries."""


class DeadlineExceededError(AttnlensError):
    """The call took longer than `timeout_s`."""


class SlowConsumerError(AttnlensError):
    """The client did not read a stream in time."""


class ServerError(AttnlensError):
    """Internal error of the server."""

    @property
    def error_id(self) -> str:
        """Identifier of the error in the server's log. Empty if there is none."""
        return self.metadata.get("error_id", "")


class BadReplyError(ServerError):
    """The reply of a successful call is invalid or inconsistent with the request.

    Possible causes are another program at the address, a proxy that changes messages, or a model that was
    replaced between two calls.
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
# For errors without a known reason, from gRPC, a proxy or a newer server.
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
    """Return the exception for a failed call.

    `first_index` is the caller's index of the first text of the call. The server's indices start at 0.
    """
    call = cast("grpc.Call", error)  # errors of calls are also Calls, in both APIs
    code, message = call.code(), printable(call.details() or "")
    if message == _NO_MESSAGE:
        return undecodable_reply_error()
    rejected = _LARGER_THAN_MAX.search(message)
    if rejected is not None:
        kind = ResponseTooLargeError if rejected[1] == "CLIENT" else InvalidRequestError
        return kind(message, code, "", {"size_bytes": rejected[2], "max_response_bytes": rejected[3]})
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
    """Parse the trailer. A missing or invalid one is treated as empty."""
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
    name, bracket, rest = field.partition(f"[{message.input_index}]")
    if not bracket or name not in _INPUT_FIELDS:
        name, rest = "texts", field
    rest = "" if rest in _TEXT_FIELDS else rest
    return FieldViolation(f"{_INPUT_FIELDS.get(name, name)}[{index}]{rest}", description, index)


def _joined(violations: Sequence[FieldViolation]) -> str:
    parts = [f"{violation.field} {violation.description}" for violation in violations[:_MAX_NAMED]]
    parts += [f"and {len(violations) - _MAX_NAMED} more"] if len(violations) > _MAX_NAMED else []
    return "; ".join(parts)


def invalid_argument(
    description: str, *, field: str = "", text_index: int | None = None
) -> InvalidRequestError:
    """Return the error for an argument that the client rejects before the server would."""
    violation = FieldViolation(field or f"texts[{text_index}]", description, text_index)
    return InvalidRequestError(_joined([violation]), grpc.StatusCode.INVALID_ARGUMENT, violations=[violation])


def closed_error(cause: BaseException | None = None, *, closed: str = "client") -> AttnlensError:
    """Return the error of calls after the client was closed. `closed` names what was closed."""
    error = AttnlensError(f"the {closed} was closed: create another one", grpc.StatusCode.CANCELLED)
    error.__cause__ = cause
    return error


def other_loop_error() -> AttnlensError:
    """Return the error of calls in an event loop other than that of the first call."""
    return AttnlensError(
        "the client belongs to another event loop: create an AsyncClient in each loop, that is, in each "
        "call of asyncio.run",
        grpc.StatusCode.FAILED_PRECONDITION,
    )


def forked_error() -> AttnlensError:
    """Return the error of calls in a process that was forked from the process of the client."""
    return AttnlensError(
        "the client was used before this process was forked, and gRPC's connections do not survive a fork: "
        "create a client in each process",
        grpc.StatusCode.FAILED_PRECONDITION,
    )


def undecodable_reply_error() -> BadReplyError:
    """Return the error for a reply that cannot be parsed."""
    return BadReplyError("invalid reply: not a message of the expected type")


class ConnectionProblem(Enum):
    """Reason why no attnlens server answers."""

    NO_SERVER = auto()
    NO_SERVER_OR_TLS = auto()
    NO_SERVER_OR_CERTIFICATE = auto()
    NOT_REACHABLE = auto()
    LOST = auto()
    NO_ANSWER = auto()
    SLOW = auto()
    UNKNOWN_HOST = auto()
    NO_SOCKET = auto()
    NOT_PERMITTED = auto()
    PROXY = auto()
    OTHER_PROGRAM = auto()
    NO_TLS = auto()
    EXPIRED = auto()
    NOT_YET_VALID = auto()
    OTHER_NAME = auto()
    UNTRUSTED = auto()
    TLS_HANDSHAKE = auto()
    UNHEALTHY = auto()


_START = "start one with `attnlens serve DIR`, or use another address"
# What is wrong, and the remedy in Python.
_MESSAGES = {
    ConnectionProblem.NO_SERVER: ("no server answers at {address}", _START),
    ConnectionProblem.NO_SERVER_OR_TLS: (
        "no server answers at {address}",
        f"{_START}, or use credentials for TLS",
    ),
    ConnectionProblem.NO_SERVER_OR_CERTIFICATE: (
        "no server answers at {address}",
        f"{_START}, or use credentials with a valid client certificate of a CA that the server trusts",
    ),
    ConnectionProblem.NOT_REACHABLE: (
        "no server reachable at {address} for {elapsed_s:g} s",
        "start one with `attnlens serve DIR`, use another address, or see the server's log if it runs",
    ),
    ConnectionProblem.LOST: (
        "the connection to {address} was lost",
        "try again, or see the server's log if it has ended",
    ),
    ConnectionProblem.NO_ANSWER: (
        "no server answered at {address} within {elapsed_s:g} s",
        "start one there, use another address, or a larger timeout_s",
    ),
    ConnectionProblem.SLOW: (
        "a call to {address} took more than {elapsed_s:g} s",
        "use a larger timeout_s, or see the server's log if it never answers",
    ),
    ConnectionProblem.UNKNOWN_HOST: (
        "the host name of {address} cannot be resolved",
        "correct the name, or use an IP address",
    ),
    ConnectionProblem.NO_SOCKET: (
        "there is no socket at {address}",
        "start a server with `attnlens serve DIR --address {address}`, or use another path",
    ),
    ConnectionProblem.NOT_PERMITTED: (
        "no permission to connect to {address}",
        "run as a user who may write to the socket, or change its permissions",
    ),
    ConnectionProblem.PROXY: (
        "no connection to {address} through the proxy {proxy}",
        "start the server, or bypass the proxy: unset the variable, or add the host to no_proxy",
    ),
    ConnectionProblem.OTHER_PROGRAM: (
        "the program at {address} is not an attnlens server",
        "use another address, such as the gRPC port instead of the HTTP port, or credentials for TLS",
    ),
    ConnectionProblem.NO_TLS: (
        "the program at {address} does not use TLS",
        "omit the credentials, or use another address",
    ),
    ConnectionProblem.EXPIRED: (
        "the certificate of {address} has expired",
        "renew it, or correct the clock of this machine",
    ),
    ConnectionProblem.NOT_YET_VALID: (
        "the certificate of {address} is not valid yet",
        "replace it, or correct the clock of this machine",
    ),
    ConnectionProblem.OTHER_NAME: (
        "the certificate of {address} is for another name",
        "use an address in the certificate, or set grpc.ssl_target_name_override in channel_options",
    ),
    ConnectionProblem.UNTRUSTED: (
        "the certificate of {address} is not signed by a trusted CA",
        "use the certificate of the server's CA as root_certificates of the credentials",
    ),
    ConnectionProblem.TLS_HANDSHAKE: (
        "the TLS handshake with {address} failed",
        "check the credentials, or omit them for a server without TLS",
    ),
    ConnectionProblem.UNHEALTHY: (
        "no server at {address} is healthy",
        "wait until they have started, or see their logs",
    ),
}
_RESET = r"Socket closed|onnection reset|Broken pipe|GOAWAY"
# Patterns of gRPC's messages, and whether the client uses TLS, if this matters. The first match applies.
_PROBLEMS: tuple[tuple[str, bool | None, ConnectionProblem], ...] = (
    ("errors resolving|DNS resolution failed|address lookup failed", None, ConnectionProblem.UNKNOWN_HOST),
    ("unix.*No such file", None, ConnectionProblem.NO_SOCKET),
    ("unix.*Permission denied", None, ConnectionProblem.NOT_PERMITTED),
    ("HTTP proxy", None, ConnectionProblem.PROXY),
    ("certificate has expired", True, ConnectionProblem.EXPIRED),
    ("not yet valid", True, ConnectionProblem.NOT_YET_VALID),
    ("Hostname Verification", True, ConnectionProblem.OTHER_NAME),
    ("issuer certificate|self.signed|verify the first certificate", True, ConnectionProblem.UNTRUSTED),
    ("WRONG_VERSION_NUMBER", True, ConnectionProblem.NO_TLS),
    ("handshake|SSL|erification", True, ConnectionProblem.TLS_HANDSHAKE),
    ("HTTP/2|http2 header with status|http1.x|content-type|ALPN", None, ConnectionProblem.OTHER_PROGRAM),
    (_RESET, True, ConnectionProblem.NO_SERVER_OR_CERTIFICATE),
    (_RESET, False, ConnectionProblem.NO_SERVER_OR_TLS),
)


@dataclass(frozen=True, slots=True)
class ConnectionFailure:
    """Reason why no attnlens server answered a call.

    Attributes:
        problem: Kind of failure.
        cause: Relevant part of gRPC's message, or "".
        elapsed_s: Duration of the failure in seconds, or 0.
        proxy: Proxy from the environment and the variable that names it, or "".
    """

    problem: ConnectionProblem
    cause: str = ""
    elapsed_s: float = 0.0
    proxy: str = ""

    def message(self, address: str, remedies: Mapping[ConnectionProblem, str] | None = None) -> str:
        """Return what is wrong, the remedy and the cause. `remedies` replace those in Python."""
        statement, remedy = _MESSAGES[self.problem]
        remedy = (remedies or {}).get(self.problem, remedy)
        parts = {"address": address, "elapsed_s": round(self.elapsed_s, 1), "proxy": self.proxy}
        message = f"{statement}: {remedy}".format(**parts)
        return f"{message} ({self.cause})" if self.cause else message


def is_unhealthy(error: BaseException | None) -> bool:
    """Return whether gRPC did not send a call because the server is starting, stopping or not healthy."""
    return isinstance(error, grpc.RpcError) and _UNHEALTHY in (cast("grpc.Call", error).details() or "")


def is_reset(error: AttnlensError) -> bool:
    """Return whether a server or a proxy that stops, or loses its peer, has reset a call."""
    if error.reason:
        return False
    is_cancelled = error.code is grpc.StatusCode.CANCELLED
    return is_cancelled or any(sign in error.message for sign in _SIGNS_OF_RESET)


def connection_problem(
    error: BaseException | None, *, answered: bool, uses_tls: bool
) -> tuple[ConnectionProblem, str]:
    """Return the likely reason why no attnlens server answers, and the relevant part of gRPC's message.

    Args:
        error: `__cause__` of an UnavailableError or of a ServerError without a reason.
        answered: Whether some program has answered.
        uses_tls: Whether the client uses TLS.
    """
    details = (cast("grpc.Call", error).details() or "") if isinstance(error, grpc.RpcError) else ""
    cause = printable(details.rpartition("last error: ")[2])
    if is_unhealthy(error):
        return ConnectionProblem.UNHEALTHY, ""
    if answered:
        return ConnectionProblem.OTHER_PROGRAM, cause
    found = (
        problem
        for pattern, tls, problem in _PROBLEMS
        if tls in (None, uses_tls) and re.search(pattern, cause)
    )
    return next(found, ConnectionProblem.NO_SERVER), cause
