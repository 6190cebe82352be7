"""The tables of docs/design/v1.md agree with the code."""

import re
from pathlib import Path

import pytest

from attnlens.v1.error_pb2 import ErrorReason
from attnlens_server import errors

PAGE = Path(__file__).parents[2] / "docs" / "design" / "v1.md"
ERRORS = {
    reason: (grpc_status, http_status)
    for reason, grpc_status, http_status in re.findall(
        r"^\| `([A-Z_]+)` \| `([A-Z_]+)` \| ([^|]+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
}


ERROR_CLASSES = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and kind.__base__ is errors.RequestError
]


def test_every_reason_has_a_grpc_and_an_http_status() -> None:
    reasons = {name.removeprefix("ERROR_REASON_") for name, number in ErrorReason.items() if number}
    assert set(ERRORS) == reasons


@pytest.mark.parametrize("error", ERROR_CLASSES, ids=lambda error: error.__name__)
def test_errors_have_the_statuses_on_the_page(error: type[errors.RequestError]) -> None:
    grpc_status, http_status = ERRORS[error.reason]
    assert grpc_status == error.status
    if error is not errors.SlowConsumerError:  # the connection is closed
        assert http_status == str(error.http_status)
