"""Server shared by all attacks. Each attack must leave it unharmed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hostile.target import Target
from served import ServerProcess

STALL_TIMEOUT_S = 1


@pytest.fixture(scope="session")
def attacked_server(minilm_bundle: Path) -> Iterator[ServerProcess]:
    with ServerProcess(minilm_bundle, "--stall-timeout-s", str(STALL_TIMEOUT_S)) as server:
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.log()


@pytest.fixture
def target(attacked_server: ServerProcess) -> Iterator[Target]:
    """Yield the server under attack, and check it again after the test."""
    target = Target(attacked_server)
    target.remember()
    yield target
    target.check_unharmed()
