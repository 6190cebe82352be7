"""The committed library and its types match their sources and the server."""

import gzip
import json
import subprocess
import tomllib
from pathlib import Path

from typescript.conftest import CLIENT, LIBRARY, ROOT, Server

MAX_BYTES = 10_000
TSC = ROOT / "viewer" / "node_modules" / ".bin" / "tsc"


def test_library_is_up_to_date(node_modules: Path, tmp_path: Path) -> None:
    assert node_modules.exists()
    result = subprocess.run(
        ["node", CLIENT / "build.mjs", tmp_path], check=False, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    built = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert built == {path.name: path.read_bytes() for path in LIBRARY.parent.iterdir()}, (
        "run `make typescript`"
    )


def test_types_match_the_openapi_document(node_modules: Path, server: Server, tmp_path: Path) -> None:
    assert node_modules.exists()
    generated = tmp_path / "schema.ts"
    url = f"{server.url}openapi.json"
    subprocess.run(["node", CLIENT / "schema.mjs", url, generated], check=True)
    committed = CLIENT / "src" / "schema.ts"
    assert generated.read_text("utf-8") == committed.read_text("utf-8"), "run `npm run schema -- URL`"


def test_types_describe_arguments_and_results(node_modules: Path) -> None:
    assert node_modules.exists()
    example = Path(__file__).parent / "types.mts"
    options = ("--noEmit", "--strict", "--target", "es2022", "--module", "nodenext", "--types", "")
    result = subprocess.run([TSC, *options, example], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_package_has_the_version_of_attnlens_and_is_not_published() -> None:
    package = json.loads((CLIENT / "package.json").read_text("utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert (package["version"], package["private"]) == (project["version"], True)
    assert package["license"] == "Apache-2.0"
    assert "dependencies" not in package


def test_library_is_small() -> None:
    assert len(gzip.compress(LIBRARY.read_bytes(), mtime=0)) <= MAX_BYTES
