"""How a request that is refused or failed is told: the status and the trailers of a gRPC call."""

from typing import NamedTuple

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from attnlens_server.errors import FieldViolation, RequestError

ERROR_DOMAIN = "attnlens"
# All trailers together should stay below 8 KiB, which is as much as peers accept. There the message stands
# twice: as `grpc-message`, where each byte that is not ASCII takes three, and in the details, in base64.
MAX_VIOLATION_BYTES = 2048


class CallStatus(NamedTuple):
    """How a call ends, as gRPC wants it."""

    code: grpc.StatusCode
    message: str
    trailers: tuple[tuple[str, str | bytes], ...]


def call_status(error: RequestError) -> CallStatus:
    """Turn an error into the status and the details of a call."""
    return CallStatus(grpc.StatusCode[error.status], error.message, trailers(error))


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
    status = status_pb2.Status(code=grpc.StatusCode[error.status].value[0], message=error.message, details=packed)
    result: list[tuple[str, str | bytes]] = [
        ("grpc-status-details-bin", status.SerializeToString()),
        ("attnlens-error-reason", error.reason),
    ]
    for key, text in error.metadata.items():
        result.append((f"attnlens-error-{key.replace('_', '-')}", _printable_ascii(text)))
    if error.retry_after_s is not None:
        result.append(("grpc-retry-pushback-ms", str(max(1, int(error.retry_after_s * 1000)))))
    return tuple(result)


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


def _printable_ascii(text: str) -> str:
    """Escape what a trailer can't hold: a call that is aborted with such a trailer never ends."""
    return "".join(character if " " <= character <= "~" else ascii(character)[1:-1] for character in text)
