"""Session fixtures: the built wheel and environments with it."""

import fnmatch
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from installed.environment import ROOT, Environment


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from the files in the Docker build context."""
    directory = tmp_path_factory.mktemp("wheel")
    source = directory / "source"
    for pattern in (ROOT / ".dockerignore").read_text("utf-8").splitlines():
        if pattern.startswith("!"):
            kept = ROOT / pattern[1:]
            (source / pattern[1:]).parent.mkdir(parents=True, exist_ok=True)
            if kept.is_dir():
                shutil.copytree(kept, source / pattern[1:], ignore=_left_out)
            else:
                shutil.copy(kept, source / pattern[1:])
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(directory), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    [wheel] = directory.glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def bare_environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return an environment with the base install, i.e. the client."""
    environment = Environment(tmp_path_factory.mktemp("bare"), wheel)
    environment.install("")
    return environment


@pytest.fixture(scope="session")
def server_environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return an environment with the extras of the image."""
    environment = Environment(tmp_path_factory.mktemp("server"), wheel)
    environment.install("[http,server]")
    return environment


def _left_out(_directory: str, names: list[str]) -> set[str]:
    return set(fnmatch.filter(names, "__pycache__"))
