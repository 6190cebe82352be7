"""The recipes run once, in a separate environment, and the tests check their results."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnlens_client import Client
from integrations.asked import RECIPES
from served import ServerProcess

HERE = Path(__file__).parent
PYTHON = HERE.parents[1] / ".integrations" / "bin" / "python"


@pytest.fixture(scope="session")
def client(minilm_server: ServerProcess) -> Iterator[Client]:
    with Client(minilm_server.address) as client:
        yield client


@pytest.fixture(scope="session")
def answers(client: Client, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Output and results of `asked.py` by recipe."""
    directory = tmp_path_factory.mktemp("recipes")
    lines = (RECIPES / "corpus.jsonl").read_text("utf-8").splitlines()
    # Output of `attnlens embed corpus.jsonl --output vectors.npy`.
    np.save(directory / "vectors.npy", client.embed([json.loads(line)["text"] for line in lines]))
    if not PYTHON.exists():
        pytest.fail("the environment of the recipes is missing: make test-integrations")
    # Disable telemetry of Chroma and Haystack.
    quiet = {"ANONYMIZED_TELEMETRY": "False", "HAYSTACK_TELEMETRY_ENABLED": "False"}
    arguments: list[str | Path] = [str(client.address), directory / "vectors.npy", directory / "answers.json"]
    result = subprocess.run(
        [PYTHON, HERE / "asked.py", *arguments],
        env=os.environ | quiet,
        capture_output=True,
        check=False,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    answered: dict[str, dict[str, Any]] = json.loads((directory / "answers.json").read_text("utf-8"))
    return answered
