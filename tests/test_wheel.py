"""What a user installs: the built wheel in a fresh environment, extra by extra."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


class Environment:
    """A fresh virtual environment outside the project."""

    def __init__(self, directory: Path, wheel: Path) -> None:
        self.directory = directory
        self.wheel = wheel
        subprocess.run([sys.executable, "-m", "venv", directory / "venv"], check=True)

    def install(self, extras: str) -> None:
        """Install the wheel with `extras`, like `[server]`, in the versions of constraints.txt."""
        constraints = ROOT / "constraints.txt"
        pip = ("python", "-m", "pip", "install", "-q", "--no-compile", "-c", constraints)
        self.run(*pip, f"{self.wheel}{extras}")

    def run(self, program: str, *args: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment, away from the project's files."""
        environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        ended = subprocess.run(
            [self.directory / "venv" / "bin" / program, *map(str, args)],
            cwd=self.directory,
            env=environment,
            check=False,
            capture_output=True,
            text=True,
        )
        assert ended.returncode == code, ended.stderr
        return ended

    def packages(self) -> set[str]:
        """The names of the installed packages."""
        listed = self.run("python", "-m", "pip", "list", "--format", "freeze").stdout
        return {line.split("==")[0].lower().replace("_", "-") for line in listed.splitlines()}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(directory), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    [wheel] = directory.glob("*.whl")
    return Environment(directory, wheel)


def test_the_wheel_serves_and_exports_extra_by_extra(
    environment: Environment, minilm_dir: Path, minilm_bundle: Path
) -> None:
    environment.install("")
    needed = environment.packages() - {"pip", "setuptools", "attnlens"}
    assert needed == {"grpcio", "numpy", "protobuf", "typing-extensions"}  # the last by grpcio
    environment.run("python", "-W", "error", "-c", "from attnlens_client import Client, AsyncClient")
    assert "pip install '.[cli]'" in environment.run("attnlens", "--version", code=2).stderr

    environment.install("[server]")
    assert environment.packages().isdisjoint({"torch", "transformers", "onnx", "sentence-transformers"})
    assert re.fullmatch(r"attnlens \d+\.\d+\.\d+\n", environment.run("attnlens", "--version").stdout)
    first = embed(environment, minilm_bundle)

    environment.install("[export]")
    exported = environment.directory / "exported"
    # Few shapes are compared: `minilm_bundle` has been at every length.
    environment.run("attnlens", "export", minilm_dir, "--output", exported, "--parity-tokens", 16)
    np.testing.assert_allclose(embed(environment, exported), first, atol=1e-6)


def test_the_wheel_holds_what_is_not_python(environment: Environment) -> None:
    with zipfile.ZipFile(environment.wheel) as wheel:
        names = set(wheel.namelist())
    heads = "attnlens_analysis/heads"
    assert {
        "attnlens_runtimes/node/worker.mjs",
        f"{heads}/page.html",
        f"{heads}/data/ud_en_ewt_dev_500.tsv.gz",
        f"{heads}/data/LICENSE.md",
    } <= names
    assets = {name for name in names if name.startswith("attnlens_viewer/assets/")}
    assert assets == {
        f"attnlens_viewer/assets/{name}" for name in ("live.js", "page.css", "page.js", "widget.js")
    }


def embed(environment: Environment, bundle: Path) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Serve a bundle and embed two lines, with the installed command alone."""
    texts = environment.directory / "texts.txt"
    texts.write_text("A cat.\nA dog.\n")
    attnlens = str(environment.directory / "venv" / "bin" / "attnlens")
    with subprocess.Popen(
        [attnlens, "serve", bundle, "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=environment.directory,
    ) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split(" is ready at ")[1].split(": ")[0]
            environment.run("attnlens", "embed", texts, "--address", address, "--output", "vectors.npy")
        finally:
            server.terminate()
    assert server.returncode == 0
    vectors: np.ndarray[tuple[int, int], np.dtype[np.float32]] = np.load(
        environment.directory / "vectors.npy"
    )
    assert vectors.shape == (2, 384)
    return vectors
