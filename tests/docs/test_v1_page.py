"""The tables of docs/design/v1.md agree with the code."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnlens.v1.error_pb2 import ErrorReason
from attnlens_server.errors import RequestError

PAGE = Path(__file__).parents[2] / "docs" / "design" / "v1.md"
ERRORS = {
    reason: (grpc_status, http_status)
    for reason, grpc_status, http_status in re.findall(
        r"^\| `([A-Z_]+)` \| `([A-Z_]+)` \| ([^|]+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
}


def error_classes(parent: type[RequestError] = RequestError) -> Iterator[type[RequestError]]:
    for child in parent.__subclasses__():
        yield child
        yield from error_classes(child)


def test_every_reason_has_a_grpc_and_an_http_status() -> None:
    reasons = {name.removeprefix("ERROR_REASON_") for name, number in ErrorReason.items() if number}
    assert set(ERRORS) == reasons


@pytest.mark.parametrize("error", list(error_classes()), ids=lambda error: error.__name__)
def test_errors_have_the_grpc_status_on_the_page(error: type[RequestError]) -> None:
    assert ERRORS[error.reason][0] == error.status
