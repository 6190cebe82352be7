"""Clean virtual environments with the built wheel."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Environment:
    """A clean virtual environment outside the project."""

    def __init__(self, directory: Path, wheel: Path) -> None:
        self.directory = directory
        self.wheel = wheel
        subprocess.run([sys.executable, "-m", "venv", directory / "venv"], check=True)

    def install(self, extras: str) -> None:
        """Install the wheel with `extras`, such as `[server]`, and the versions in constraints.txt."""
        constraints = ROOT / "constraints.txt"
        pip = ("python", "-m", "pip", "install", "-q", "--no-compile", "-c", constraints)
        self.run(*pip, f"{self.wheel}{extras}")

    def add(self, packages: Path) -> None:
        """Append a directory of packages to the import path. Its .pth files are ignored."""
        [site] = (self.directory / "venv").glob("lib/python*/site-packages")
        (site / "added.pth").write_text(f"{packages}\n")

    def program(self, name: str) -> str:
        """Return the path of a program in the environment."""
        return str(self.directory / "venv" / "bin" / name)

    def run(self, program: str, *args: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a program in the environment, outside the project directory."""
        ended = subprocess.run(
            [self.program(program), *map(str, args)],
            cwd=self.directory,
            env=without_project(),
            check=False,
            capture_output=True,
            text=True,
        )
        assert ended.returncode == code, ended.stderr
        return ended

    def packages(self) -> set[str]:
        """Return the names of the installed packages."""
        listed = self.run("python", "-m", "pip", "list", "--format", "freeze").stdout
        return {line.split("==")[0].lower().replace("_", "-") for line in listed.splitlines()}


def without_project() -> dict[str, str]:
    """Return the environment variables without those that add the project to Python's import path."""
    return {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}


@contextmanager
def serving(command: list[str], directory: Path, env: dict[str, str]) -> Iterator[str]:
    """Run a server, yield its address, stop it with SIGTERM and check that it exits with 0."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=directory, env=env) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().split(" is ready at ")[1].split(": ")[0]
        finally:
            server.terminate()
    assert server.returncode == 0
