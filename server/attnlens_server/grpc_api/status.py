"""gRPC status and trailers of failed calls."""

from typing import Any, NamedTuple, TypeVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from attnlens.v1 import error_pb2 as pb
from attnlens_server.errors import MalformedRequestError, RequestError

AnyMessage = TypeVar("AnyMessage", bound=Message)

ERROR_DOMAIN = "attnlens"
# Peers accept 8 KiB of trailers in total. They contain the message twice, percent-encoded (3 bytes per
# non-ASCII byte) and in base64, and the violations twice in base64.
MAX_VIOLATION_BYTES = 1280


class CallStatus(NamedTuple):
    """Final status of a call. `reason` is also in the trailers."""

    code: grpc.StatusCode
    reason: str
    message: str
    trailers: tuple[tuple[str, str | bytes], ...]


def call_status(error: RequestError) -> CallStatus:
    """Return the status and trailers for an error.

    Trailers: `attnlens-error-bin` (`attnlens.v1.ErrorDetails`), `attnlens-error-reason` (plain text),
    `grpc-status-details-bin` (google.rpc.Status, gRPC's richer error model), and `grpc-retry-pushback-ms`
    (for gRPC's built-in retries, gRFC A6).
    """
    code, details = grpc.StatusCode[error.status], error_details(error)
    packed = []
    for detail in _google_details(error.reason, details):
        any_detail = any_pb2.Any()
        any_detail.Pack(detail)
        packed.append(any_detail)
    status = status_pb2.Status(code=code.value[0], message=error.message, details=packed)
    trailers: list[tuple[str, str | bytes]] = [
        ("attnlens-error-bin", details.SerializeToString()),
        ("attnlens-error-reason", error.reason),
        ("grpc-status-details-bin", status.SerializeToString()),
    ]
    if error.retry_after_s is not None:
        trailers.append(("grpc-retry-pushback-ms", str(max(1, int(error.retry_after_s * 1000)))))
    return CallStatus(code, error.reason, error.message, tuple(trailers))


async def parse_or_abort(
    message_class: type[AnyMessage], data: bytes, context: grpc.aio.ServicerContext[Any, Any]
) -> AnyMessage:
    """Parse a request, or abort the call with INVALID_ARGUMENT. For services that do not use `Calls`.

    The deserializer of grpc.aio would end the call with UNKNOWN and an exception's class name.
    """
    try:
        return message_class.FromString(data)
    except DecodeError:
        status = call_status(MalformedRequestError(len(data), message_class.DESCRIPTOR.full_name))
    await context.abort(status.code, status.message, status.trailers)
    raise AssertionError  # abort does not return


def error_details(error: RequestError) -> pb.ErrorDetails:
    """Return the machine-readable details of an error, with the first violations that fit in the trailers."""
    violations: list[pb.FieldViolation] = []
    size = 0
    for violation in error.violations:
        message = pb.FieldViolation(
            field=violation.field,
            description=violation.description,
            input_index=violation.input_index,
        )
        size += message.ByteSize()
        if size > MAX_VIOLATION_BYTES:
            break
        violations.append(message)
    delay = None
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
    return pb.ErrorDetails(
        reason=pb.ErrorReason.Value(f"ERROR_REASON_{error.reason}"),
        violations=violations,
        metadata=error.metadata,
        retry_delay=delay,
    )


def _google_details(reason: str, details: pb.ErrorDetails) -> list[Message]:
    """Return the equivalent google.rpc messages."""
    messages: list[Message] = [
        error_details_pb2.ErrorInfo(reason=reason, domain=ERROR_DOMAIN, metadata=dict(details.metadata))
    ]
    if details.violations:
        request = error_details_pb2.BadRequest()
        for violation in details.violations:
            request.field_violations.add(field=violation.field, description=violation.description)
        messages.append(request)
    if details.HasField("retry_delay"):
        messages.append(error_details_pb2.RetryInfo(retry_delay=details.retry_delay))
    return messages
