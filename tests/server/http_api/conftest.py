"""Fixtures of the HTTP tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mounted import Mounted


@pytest.fixture(scope="session")
def mounted(minilm_bundle: Path) -> Iterator[Mounted]:
    """Return a MiniLM in a Starlette application, shared by the tests of this package."""
    with Mounted(minilm_bundle) as mounted:
        yield mounted
