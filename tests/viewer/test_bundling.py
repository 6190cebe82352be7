"""The committed assets match their TypeScript and CSS sources."""

import subprocess
from pathlib import Path

VIEWER = Path(__file__).parents[2] / "viewer"
ASSETS = VIEWER / "attnlens_viewer" / "assets"
MAX_LINES = 400


def test_assets_are_up_to_date(node_modules: Path, tmp_path: Path) -> None:
    assert node_modules.exists()
    subprocess.run(["node", VIEWER / "build.mjs", tmp_path], check=True)
    built = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert built == {path.name: path.read_bytes() for path in ASSETS.iterdir()}, "run `make viewer`"


def test_sources_pass_type_checking(node_modules: Path) -> None:
    result = subprocess.run(
        [node_modules / ".bin" / "tsc", "--noEmit"], cwd=VIEWER, check=False, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout


def test_no_source_file_is_too_long() -> None:
    sources = [path for path in (VIEWER / "src").rglob("*") if path.is_file()]
    long = [path.name for path in sources if len(path.read_text("utf-8").splitlines()) > MAX_LINES]
    assert sources
    assert not long
