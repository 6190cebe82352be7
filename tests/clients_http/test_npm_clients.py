"""npm packages that call the HTTP APIs get the vectors of gRPC, and throw errors of their own.

The checks are in tests/node/http_clients.mjs, and run in one process.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from clients_http import server_under_test as constants

# Minutes on a busy machine.
pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

NODE_PROJECT = Path(__file__).parents[1] / "node"
SCRIPT = NODE_PROJECT / "http_clients.mjs"
CHECKS = re.findall(r"^  async (\w+)\(\) \{$", SCRIPT.read_text("utf-8"), re.MULTILINE)

Results = dict[str, str | None]


@pytest.fixture(scope="module")
def results(server_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Return the errors of the checks."""
    tmp_path = tmp_path_factory.mktemp("npm")
    if not (NODE_PROJECT / "node_modules").exists():
        pytest.fail("the packages of the clients are missing: make test-clients")
    settings = json.loads(server_file.read_text("utf-8")) | {
        "texts": constants.TEXTS,
        "query": constants.QUERY,
        "some": constants.SOME,
        "long": constants.LONG,
        "rerank_query": constants.RERANK_QUERY,
        "slow": constants.SLOW,
        "max_call_memory_bytes": constants.MAX_CALL_MEMORY_BYTES,
        "body_copies": constants.BODY_COPIES,
        "holders": constants.HOLDERS,
    }
    (tmp_path / "server.json").write_text(json.dumps(settings), encoding="utf-8")
    finished = subprocess.run(
        ["node", SCRIPT, tmp_path / "server.json", tmp_path / "results.json"],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    found: Results = json.loads((tmp_path / "results.json").read_text("utf-8"))
    return found


@pytest.mark.parametrize("check", CHECKS)
def test_client(check: str, results: Results) -> None:
    if problem := results[check]:
        pytest.fail(problem, pytrace=False)
