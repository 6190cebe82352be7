"""The protocol against that of every release."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROTOS = Path(__file__).parents[2] / "protos"
BUF = Path(sys.executable).parent / "buf"
BASELINES = sorted((PROTOS / "baseline").glob("*.binpb"))
CHANGES = {
    "a field goes": ("  repeated Usage usages = 4;\n", ""),
    "a number changes": ("repeated Usage usages = 4;", "repeated Usage usages = 9;"),
    "a type changes": ("  int32 dimensions = 7;", "  int64 dimensions = 7;"),
    "a method goes": ("  rpc Tokenize(TokenizeRequest) returns (TokenizeResponse);\n", ""),
}


def breaking(directory: Path, baseline: Path) -> subprocess.CompletedProcess[str]:
    command = [str(BUF), "breaking", "--against", str(baseline)]
    return subprocess.run(command, cwd=directory, capture_output=True, check=False, text=True)


@pytest.mark.parametrize("baseline", BASELINES, ids=lambda path: path.stem)
def test_the_protocol_breaks_no_release(baseline: Path) -> None:
    result = breaking(PROTOS, baseline)
    assert result.returncode == 0, result.stdout


@pytest.fixture(scope="module")
def today(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The protocol of the sources, as a release would record it."""
    path = tmp_path_factory.mktemp("today") / "today.binpb"
    command = [str(BUF), "build", "--exclude-source-info", "-o", str(path)]
    subprocess.run(command, cwd=PROTOS, capture_output=True, check=True)
    return path


@pytest.mark.parametrize(("old", "new"), CHANGES.values(), ids=CHANGES)
def test_a_change_that_breaks_would_be_noticed(old: str, new: str, today: Path, tmp_path: Path) -> None:
    changed = Path(shutil.copytree(PROTOS, tmp_path / "protos"))
    path = changed / "attnlens" / "v1" / "encoder_service.proto"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    result = breaking(changed, today)
    assert "encoder_service.proto" in result.stdout
    assert result.returncode != 0


def test_additions_are_welcome(today: Path, tmp_path: Path) -> None:
    changed = Path(shutil.copytree(PROTOS, tmp_path / "protos"))
    path = changed / "attnlens" / "v1" / "error.proto"
    text = path.read_text(encoding="utf-8")
    path.write_text(
        text.replace("_RATE_LIMITED = 16;", "_RATE_LIMITED = 16;\n  // New.\n  ERROR_REASON_NEW = 99;"),
        encoding="utf-8",
    )
    assert breaking(changed, today).returncode == 0
