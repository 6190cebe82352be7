"""Fixtures of the bulk tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import attnlens_server
from attnlens_server.in_process import Local


@pytest.fixture(scope="session")
def model(minilm_bundle: Path) -> Iterator[Local]:
    """MiniLM in this process."""
    with attnlens_server.local(minilm_bundle, threads=1) as model:
        yield model


@pytest.fixture(scope="session")
def short_model(minilm_bundle: Path) -> Iterator[Local]:
    """MiniLM in this process with a limit of 32 tokens."""
    with attnlens_server.local(minilm_bundle, threads=1, max_tokens=32) as model:
        yield model
