"""Errors as trailers: whatever is wrong with a request, they fit."""

import urllib.parse

import grpc
import pytest

from attnlens_server import errors
from attnlens_server.errors import FieldViolation

MAX_TRAILER_BYTES = 8 << 10  # what peers accept, all trailers together

ODD = "\N{GRINNING FACE}" * 1000


def size_on_the_wire(error: errors.RequestError) -> int:
    """Count as HTTP/2 does, 32 bytes of overhead each: `-bin` is base64, the message is percent-encoded."""
    code, message, trailers = errors.call_status(error)
    size = len(urllib.parse.quote(message)) + len("grpc-message") + len(f"grpc-status{code.value[0]}") + 64
    for name, value in trailers:
        size += len(name) + 32 + (4 * ((len(value) + 2) // 3) if name.endswith("-bin") else len(value))
    return size


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidFieldsError([FieldViolation(f"inputs[{i}].text", ODD) for i in range(500)]),
        errors.InvalidFieldsError([FieldViolation(f"inputs[{i}]", "is empty " * 20) for i in range(500)]),
        errors.ModelNotFoundError(ODD, "all-MiniLM-L6-v2"),
        errors.OverloadedError(ODD, retry_after_s=1),
        errors.InputTooLongError("inputs[0]", 10**9, 256, has_prompt=True),
    ],
    ids=lambda error: type(error).__name__,
)
def test_trailers_fit_whatever_is_wrong(error: errors.RequestError) -> None:
    assert size_on_the_wire(error) < MAX_TRAILER_BYTES


def test_of_many_violations_as_many_are_told_as_fit() -> None:
    violations = [FieldViolation(f"inputs[{i}]", "is empty: set text or token_ids") for i in range(500)]
    error = errors.InvalidFieldsError(violations)
    [details] = [value for name, value in errors.trailers(error) if name == "grpc-status-details-bin"]
    assert isinstance(details, bytes)
    assert details.count(b"set text or token_ids") >= 20
    assert "and 497 more" in error.message


def test_a_long_text_is_cut_between_characters() -> None:
    assert errors.shortened("aé" * 10, 30) == "aé" * 10
    assert errors.shortened("aé" * 10, 29) == "aé" * 8 + "a" + "..."


def test_what_never_fits_is_told_with_both_numbers_and_a_remedy() -> None:
    status = errors.call_status(errors.NeverFitsError(403, 256))
    assert status.code == grpc.StatusCode.INVALID_ARGUMENT
    assert "403" in status.message
    assert "--max-reply-bytes" in status.message
    assert ("attnlens-error-reason", "RESPONSE_TOO_LARGE") in status.trailers
