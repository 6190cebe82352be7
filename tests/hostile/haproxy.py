"""Whether HAProxy is installed."""

import pytest

from bench.studies.proxied import find_haproxy


def require_haproxy() -> None:
    """Skip a test if HAProxy is not installed."""
    if find_haproxy() is None:
        pytest.skip("haproxy is not installed")
