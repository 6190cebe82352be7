"""Fixtures of the tests of HTTP APIs."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from http_client import HeadServer, HttpClient
from mounted import Mounted


@pytest.fixture(scope="session")
def http(viewer_url: str) -> Iterator[HttpClient]:
    """Return a client of the server that also serves the viewer."""
    with HttpClient(viewer_url) as client:
        yield client


@pytest.fixture(scope="session")
def mounted(minilm_bundle: Path) -> Iterator[Mounted]:
    """Return MiniLM in a Starlette application, shared by the tests of this package."""
    with Mounted(minilm_bundle) as mounted:
        yield mounted


@pytest.fixture(scope="session")
def reranker(classifier_bundle: Callable[[str], Path]) -> Iterator[HeadServer]:
    """Return a server of a small reranker."""
    with HeadServer(classifier_bundle("reranker")) as server:
        yield server


@pytest.fixture(scope="session")
def topics(classifier_bundle: Callable[[str], Path]) -> Iterator[HeadServer]:
    """Return a server of a small classifier with three labels."""
    with HeadServer(classifier_bundle("topics")) as server:
        yield server
