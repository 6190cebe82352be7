"""Parsing of error details."""

import re
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from attnlens.v1.error_pb2 import ErrorDetails, ErrorReason


@dataclass
class Failure:
    """A failed call with its google.rpc details."""

    code: grpc.StatusCode
    message: str
    trailers: dict[str, Any]
    reason: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    violations: dict[str, str] = field(default_factory=dict)
    retry_delay_s: float | None = None


def read_failure(error: grpc.RpcError) -> Failure:
    """Unpack `grpc-status-details-bin` and check that it matches the status."""
    assert isinstance(error, grpc.Call | grpc.aio.AioRpcError)
    trailers: dict[str, Any] = dict(error.trailing_metadata() or ())
    failure = Failure(error.code(), error.details() or "", trailers)
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    assert status.code == failure.code.value[0]
    assert status.message == failure.message
    for detail in status.details:
        info, request, retry = (
            error_details_pb2.ErrorInfo(),
            error_details_pb2.BadRequest(),
            error_details_pb2.RetryInfo(),
        )
        if detail.Unpack(info):
            assert info.domain == "attnlens"
            failure.reason, failure.metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(request):
            failure.violations = {each.field: each.description for each in request.field_violations}
        elif detail.Unpack(retry):
            failure.retry_delay_s = retry.retry_delay.ToNanoseconds() / 1e9
    assert trailers["attnlens-error-reason"] == failure.reason
    details = ErrorDetails.FromString(trailers["attnlens-error-bin"])
    assert ErrorReason.Name(details.reason) == f"ERROR_REASON_{failure.reason}"
    assert dict(details.metadata) == failure.metadata
    assert {each.field: each.description for each in details.violations} == failure.violations
    for violation in details.violations:
        index = re.match(r"inputs\[(\d+)\]", violation.field)
        assert (violation.input_index if violation.HasField("input_index") else None) == (
            int(index[1]) if index else None
        )
    return failure
