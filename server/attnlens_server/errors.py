"""What can go wrong with a request, and how it is told.

    RequestError
    |- InvalidFieldsError      INVALID_ARGUMENT     INVALID_FIELD
    |- InputTooLongError       INVALID_ARGUMENT     INPUT_TOO_LONG
    |- ResponseTooLargeError   INVALID_ARGUMENT     RESPONSE_TOO_LARGE
    |- NeverFitsError          INVALID_ARGUMENT     RESPONSE_TOO_LARGE
    |- MalformedRequestError   INVALID_ARGUMENT     MALFORMED_REQUEST
    |- ModelNotFoundError      NOT_FOUND            MODEL_NOT_FOUND
    |- OverloadedError         RESOURCE_EXHAUSTED   OVERLOADED
    |- GraphUnavailableError   FAILED_PRECONDITION  GRAPH_UNAVAILABLE
    |- NotReadyError           UNAVAILABLE          NOT_READY
    |- ShuttingDownError       UNAVAILABLE          SHUTTING_DOWN
    |- DeadlineError           DEADLINE_EXCEEDED    DEADLINE_EXCEEDED
    |- SlowReaderError         ABORTED              SLOW_READER
    `- InternalError           INTERNAL             INTERNAL

    StartupError               the process can't serve: printed, exit code 1
    `- UnusableGraphError      a graph that no other try will make usable

Each class knows its gRPC status and its reason; `trailers` turns one into google.rpc details.
"""

from dataclasses import dataclass
from typing import NamedTuple

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

ERROR_DOMAIN = "attnlens"
# All trailers together should stay below 8 KiB, which is as much as peers accept. There the message stands
# twice: as `grpc-message`, where each byte that is not ASCII takes three, and in the details, in base64.
MAX_VIOLATIONS = 20
MAX_MESSAGE_BYTES = 768
MAX_VIOLATION_BYTES = 2048


class StartupError(Exception):
    """The server can't start: the message says why and what to do."""


class UnusableGraphError(StartupError):
    """A graph was altered, or is not what its manifest says: to try again brings nothing."""


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """A field of a request, as a path like `inputs[3].text`, and what is wrong with it."""

    field: str
    description: str


class RequestError(Exception):
    """A request that is refused or failed. Subclasses fix the status and the reason."""

    status = grpc.StatusCode.UNKNOWN
    reason = "ERROR_REASON_UNSPECIFIED"

    def __init__(
        self,
        message: str,
        *,
        metadata: dict[str, str] | None = None,
        violations: tuple[FieldViolation, ...] = (),
        retry_after_s: float | None = None,
    ) -> None:
        self.message = shortened(message, MAX_MESSAGE_BYTES)
        super().__init__(self.message)
        self.metadata = metadata or {}
        self.violations = violations
        self.retry_after_s = retry_after_s


class InvalidFieldsError(RequestError):
    """One or more fields have values that they can't have."""

    status = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_FIELD"

    def __init__(self, violations: list[FieldViolation]) -> None:
        told = tuple(violations[:MAX_VIOLATIONS])
        message = "; ".join(f"{violation.field} {violation.description}" for violation in told[:3])
        if len(violations) > 3:  # noqa: PLR2004 - the rest stands in the details
            message += f"; and {len(violations) - 3} more"
        super().__init__(message, violations=told)


class InputTooLongError(RequestError):
    """A text has more tokens than the model takes, and the request does not allow truncation."""

    status = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INPUT_TOO_LONG"

    def __init__(
        self,
        field: str,
        num_tokens: int,
        max_tokens: int,
        *,
        can_truncate: bool = True,
        has_prompt: bool = False,
    ) -> None:
        tokens = f"{num_tokens} tokens with the prompt" if has_prompt else f"{num_tokens} tokens"
        description = f"has {tokens}, the model takes {max_tokens}: " + (
            "shorten it, or set truncate" if can_truncate else "shorten it"
        )
        super().__init__(
            f"{field} {description}",
            metadata={"num_tokens": str(num_tokens), "max_tokens": str(max_tokens)},
            violations=(FieldViolation(field, description),),
        )


class ResponseTooLargeError(RequestError):
    """The reply would not fit into a message."""

    status = grpc.StatusCode.INVALID_ARGUMENT
    reason = "RESPONSE_TOO_LARGE"

    def __init__(self, what: str, size_bytes: int, max_message_bytes: int, remedy: str) -> None:
        super().__init__(
            f"{what} would be {size_bytes} bytes, a message may have {max_message_bytes}: {remedy}",
            metadata={"size_bytes": str(size_bytes), "max_message_bytes": str(max_message_bytes)},
        )


class NeverFitsError(RequestError):
    """A call needs more memory than all calls together may take."""

    status = grpc.StatusCode.INVALID_ARGUMENT
    reason = "RESPONSE_TOO_LARGE"

    def __init__(self, size_bytes: int, max_reply_bytes: int) -> None:
        super().__init__(
            f"the call needs {size_bytes} bytes of memory, all calls together may take {max_reply_bytes}: "
            "ask for fewer texts, layers or heads, or start the server with a larger --max-reply-bytes",
            metadata={"size_bytes": str(size_bytes), "max_reply_bytes": str(max_reply_bytes)},
        )


class MalformedRequestError(RequestError):
    """The bytes of a request are not a message of its type."""

    status = grpc.StatusCode.INVALID_ARGUMENT
    reason = "MALFORMED_REQUEST"

    def __init__(self, size_bytes: int, message_type: str) -> None:
        super().__init__(
            f"the {size_bytes} bytes of the request are not a message of type {message_type}: send one, made "
            "from the server's .proto file and not compressed"
        )


class ModelNotFoundError(RequestError):
    """The request names a model that is not here."""

    status = grpc.StatusCode.NOT_FOUND
    reason = "MODEL_NOT_FOUND"

    def __init__(self, model: str, available: str) -> None:
        shown = shortened(model, 83)
        super().__init__(
            f"no model {shown!r} here: ask for {available!r}, or leave the name empty",
            metadata={"model": shown, "available": available},
        )


class OverloadedError(RequestError):
    """As many texts wait, as much memory is taken, or as many calls run as may."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "OVERLOADED"


class GraphUnavailableError(RequestError):
    """A graph of the bundle can't be used: for good, or with `retry_after_s` until it is tried again."""

    status = grpc.StatusCode.FAILED_PRECONDITION
    reason = "GRAPH_UNAVAILABLE"


class NotReadyError(RequestError):
    """The server is still starting."""

    status = grpc.StatusCode.UNAVAILABLE
    reason = "NOT_READY"


class ShuttingDownError(RequestError):
    """The server takes no new requests."""

    status = grpc.StatusCode.UNAVAILABLE
    reason = "SHUTTING_DOWN"


class DeadlineError(RequestError):
    """The deadline passed while the request waited."""

    status = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"


class SlowReaderError(RequestError):
    """The client does not read what it asked for."""

    status = grpc.StatusCode.ABORTED
    reason = "SLOW_READER"


class InternalError(RequestError):
    """A fault of ours. The client gets an id, the log gets the rest."""

    status = grpc.StatusCode.INTERNAL
    reason = "INTERNAL"


def _details(error: RequestError) -> list[Message]:
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=error.metadata)
    ]
    if error.violations:
        details.append(_bad_request(error.violations))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return details


def _bad_request(violations: tuple[FieldViolation, ...]) -> error_details_pb2.BadRequest:
    """Return as many of the violations, the first ones, as trailers have room for."""
    request = error_details_pb2.BadRequest()
    for violation in violations:
        request.field_violations.add(field=violation.field, description=violation.description)
        if request.ByteSize() > MAX_VIOLATION_BYTES:
            del request.field_violations[-1]
            break
    return request


def shortened(text: str, max_bytes: int) -> str:
    """Cut a text that is longer than `max_bytes` of UTF-8; three dots show it."""
    encoded = text.encode()
    if len(encoded) <= max_bytes:
        return text
    return encoded[: max_bytes - 3].decode(errors="ignore") + "..."


def _printable_ascii(text: str) -> str:
    """Escape what a trailer can't hold: a call that is aborted with such a trailer never ends."""
    return "".join(each if " " <= each <= "~" else ascii(each)[1:-1] for each in text)


class CallStatus(NamedTuple):
    """How a call ends, as gRPC wants it."""

    code: grpc.StatusCode
    message: str
    trailers: tuple[tuple[str, str | bytes], ...]


def call_status(error: RequestError) -> CallStatus:
    """Turn an error into the status and the details of a call."""
    return CallStatus(error.status, error.message, trailers(error))


def trailers(error: RequestError) -> tuple[tuple[str, str | bytes], ...]:
    """Return the trailing metadata that carries the error's details.

    `grpc-status-details-bin` holds google.rpc.Status (gRPC's convention for rich errors), and
    `grpc-retry-pushback-ms` is what gRPC's own retries obey (gRFC A6). The reason and its metadata are
    repeated as plain text for clients without the google.rpc messages.
    """
    packed = []
    for detail in _details(error):
        any_detail = any_pb2.Any()
        any_detail.Pack(detail)
        packed.append(any_detail)
    status = status_pb2.Status(code=error.status.value[0], message=error.message, details=packed)
    result: list[tuple[str, str | bytes]] = [
        ("grpc-status-details-bin", status.SerializeToString()),
        ("attnlens-error-reason", error.reason),
    ]
    for key, text in error.metadata.items():
        result.append((f"attnlens-error-{key.replace('_', '-')}", _printable_ascii(text)))
    if error.retry_after_s is not None:
        result.append(("grpc-retry-pushback-ms", str(max(1, int(error.retry_after_s * 1000)))))
    return tuple(result)
