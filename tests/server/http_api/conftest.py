"""Fixtures of the tests of HTTP APIs."""

from collections.abc import Iterator

import pytest

from http_client import HttpClient


@pytest.fixture(scope="session")
def http(viewer_url: str) -> Iterator[HttpClient]:
    """Return a client of the server that also serves the viewer."""
    with HttpClient(viewer_url) as client:
        yield client
