"""Errors are sent as trailers, which must fit the size limit whatever the error."""

import urllib.parse
from pathlib import Path

import grpc
import pytest

from attnlens.v1.error_pb2 import ErrorDetails, ErrorReason
from attnlens_server import errors
from attnlens_server.core.admission import Admission, Reservation
from attnlens_server.errors import FieldViolation
from attnlens_server.grpc_api.status import call_status, error_details

PAGE = Path(__file__).parents[3] / "docs" / "protocol.md"
MAX_TRAILER_BYTES = 8 << 10  # total trailer size that gRPC peers accept

ODD = "\N{GRINNING FACE}" * 1000


def size_on_the_wire(error: errors.RequestError) -> int:
    """Count like HTTP/2: 32 bytes of overhead each, base64 for `-bin`, percent-encoded message."""
    code, _, message, trailers = call_status(error)
    size = len(urllib.parse.quote(message)) + len("grpc-message") + len(f"grpc-status{code.value[0]}") + 64
    for name, value in trailers:
        size += len(name) + 32 + (4 * ((len(value) + 2) // 3) if name.endswith("-bin") else len(value))
    return size


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidFieldsError([FieldViolation(f"inputs[{i}].text", ODD, i) for i in range(500)]),
        errors.InvalidFieldsError([FieldViolation(f"inputs[{i}]", "is empty " * 20) for i in range(500)]),
        errors.ModelNotFoundError(ODD, "all-MiniLM-L6-v2"),
        errors.OverloadedError(ODD, retry_after_s=1),
        errors.InternalError("0" * 12),
        errors.InputTooLongError("inputs[0]", 10**9, 256, has_prompt=True),
    ],
    ids=lambda error: type(error).__name__,
)
def test_trailers_of_every_error_fit(error: errors.RequestError) -> None:
    assert size_on_the_wire(error) < MAX_TRAILER_BYTES


def test_violations_are_reported_up_to_the_size_limit() -> None:
    violations = [FieldViolation(f"inputs[{i}]", "is empty: set text or token_ids", i) for i in range(500)]
    error = errors.InvalidFieldsError(violations)
    assert len(error_details(error).violations) == 20
    assert "and 497 more" in error.message


def test_details_contain_fields_inputs_figures_and_retry_delay() -> None:
    error = errors.InputTooLongError("inputs[3]", 300, 256, input_index=3)
    trailers = dict(call_status(error).trailers)
    details = ErrorDetails.FromString(trailers["attnlens-error-bin"])  # type: ignore[arg-type]
    assert details.reason == ErrorReason.ERROR_REASON_INPUT_TOO_LONG
    assert trailers["attnlens-error-reason"] == "INPUT_TOO_LONG"
    [violation] = details.violations
    assert (violation.field, violation.input_index) == ("inputs[3]", 3)
    assert violation.description == "has 300 tokens, but the limit is 256: shorten it, or set truncate"
    assert details.metadata == {"num_tokens": "300", "max_tokens": "256"}
    assert not details.HasField("retry_delay")
    later = error_details(errors.OverloadedError("full", retry_after_s=0.25))
    assert later.retry_delay.ToMilliseconds() == 250
    trailers = dict(call_status(errors.OverloadedError("full", retry_after_s=0.25)).trailers)
    assert trailers["grpc-retry-pushback-ms"] == "250"


EVERY_ERROR = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and kind.__base__ is errors.RequestError
]


@pytest.mark.parametrize("kind", EVERY_ERROR)
def test_every_reason_and_status_is_in_the_protocol(kind: type[errors.RequestError]) -> None:
    assert ErrorReason.Value(f"ERROR_REASON_{kind.reason}") > 0
    assert grpc.StatusCode[kind.status] is not grpc.StatusCode.OK


@pytest.mark.parametrize("kind", EVERY_ERROR)
def test_every_reason_has_the_documented_status(kind: type[errors.RequestError]) -> None:
    rows = [line.split("|") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.count("|") > 3]
    [status] = [row[2] for row in rows if row[1].strip() == f"`{kind.reason}`"]
    if kind is errors.GraphUnavailableError:
        temporary = kind("The graph cannot be opened.", retry_after_s=1.0).status
        assert status.strip() == f"`{temporary}` with a retry delay, otherwise `{kind.status}`"
    else:
        assert status.strip() == f"`{kind.status}`"


def test_long_message_is_truncated_between_characters() -> None:
    assert errors.shortened("aé" * 10, 30) == "aé" * 10
    assert errors.shortened("aé" * 10, 29) == "aé" * 8 + "a" + "..."


def test_permanent_and_transient_limits_are_distinguished() -> None:
    admission = Admission(max_texts=1, max_bytes=256, retry_after_s=lambda _: 1.0)
    with pytest.raises(errors.RequestTooLargeError) as caught:
        Reservation(admission).grow(403)
    status = call_status(caught.value)
    assert status.code == grpc.StatusCode.INVALID_ARGUMENT
    assert "403" in status.message
    assert "--max-call-memory-bytes" in status.message
    assert ("attnlens-error-reason", "REQUEST_TOO_LARGE") in status.trailers
    assert error_details(caught.value).metadata == {"size_bytes": "403", "max_call_memory_bytes": "256"}
