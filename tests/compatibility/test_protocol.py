"""The protocol stays compatible with each release, and its final messages with the previous commit."""

import io
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from attnlens.v1 import encoder_service_pb2, explanation_pb2, manifest_pb2, model_pb2, tensor_pb2

PROTOS = Path(__file__).parents[2] / "protos"
BUF = Path(sys.executable).parent / "buf"
BASELINES = sorted((PROTOS / "baseline").glob("*.binpb"))
V1_PAGE = PROTOS.parent / "docs" / "design" / "v1.md"
CHANGES = {
    "field removed": ("  repeated Usage usages = 4;\n", ""),
    "field number changed": ("repeated Usage usages = 4;", "repeated Usage usages = 9;"),
    "field type changed": ("  int32 dimensions = 7;", "  int64 dimensions = 7;"),
    "method removed": ("  rpc Tokenize(TokenizeRequest) returns (TokenizeResponse);\n", ""),
}


# Field numbers set aside for future methods. `reserved` in the .proto files would block them forever.
FREE_NUMBERS = {
    "ExplainRequest": (16, 17),
    "CompareRequest": (13,),
    "Activation": (9,),
    "PairMatrix": (4,),
    "GraphPurpose": (5, 6, 7),
    "OutputRole": (10, 11, 12, 13),
}


def breaking(directory: Path, baseline: Path) -> subprocess.CompletedProcess[str]:
    command = [str(BUF), "breaking", "--against", str(baseline)]
    return subprocess.run(command, cwd=directory, capture_output=True, check=False, text=True)


def final_messages() -> list[str]:
    """Return the names in the section "Final messages" of docs/design/v1.md."""
    [section] = V1_PAGE.read_text(encoding="utf-8").split("## Final messages")[1:]
    return re.findall(r"`([A-Z]\w+)`", section)


def build_final(source: str, output: Path) -> subprocess.CompletedProcess[str]:
    types = [f"--type=attnlens.v1.{name}" for name in final_messages()]
    command = [str(BUF), "build", source, "--exclude-source-info", "-o", str(output), *types]
    return subprocess.run(command, cwd=PROTOS, capture_output=True, check=False, text=True)


def test_final_messages_are_compatible_with_the_previous_commit(tmp_path: Path) -> None:
    previous = subprocess.run(
        ["git", "archive", "HEAD~1", "protos"], cwd=PROTOS.parent, capture_output=True, check=False
    )
    if previous.returncode != 0:
        pytest.skip("needs the previous commit")
    with tarfile.open(fileobj=io.BytesIO(previous.stdout)) as archive:
        archive.extractall(tmp_path, filter="data")
    old, new = tmp_path / "old.binpb", tmp_path / "new.binpb"
    for source, image in ((str(tmp_path / "protos"), old), (str(PROTOS), new)):
        built = build_final(source, image)
        assert built.returncode == 0, built.stderr
    command = [str(BUF), "breaking", str(new), "--against", str(old)]
    result = subprocess.run(command, cwd=PROTOS, capture_output=True, check=False, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("name", FREE_NUMBERS)
def test_field_numbers_of_future_methods_are_unused(name: str) -> None:
    modules = (encoder_service_pb2, explanation_pb2, manifest_pb2, model_pb2, tensor_pb2)
    [descriptor] = [
        types[name]
        for module in modules
        for types in (module.DESCRIPTOR.message_types_by_name, module.DESCRIPTOR.enum_types_by_name)
        if name in types
    ]
    is_message = hasattr(descriptor, "fields_by_number")
    used = descriptor.fields_by_number if is_message else descriptor.values_by_number
    assert not set(used) & set(FREE_NUMBERS[name])


@pytest.fixture(scope="module")
def today(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The current protocol, recorded as a release would be."""
    path = tmp_path_factory.mktemp("today") / "today.binpb"
    command = [str(BUF), "build", "--exclude-source-info", "-o", str(path)]
    subprocess.run(command, cwd=PROTOS, capture_output=True, check=True)
    return path


@pytest.mark.parametrize("baseline", [*BASELINES, None], ids=lambda path: path.stem if path else "current")
def test_protocol_is_compatible_with_every_release(baseline: Path | None, today: Path) -> None:
    result = breaking(PROTOS, baseline or today)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(("old", "new"), CHANGES.values(), ids=CHANGES)
def test_breaking_change_is_detected(old: str, new: str, today: Path, tmp_path: Path) -> None:
    changed = Path(shutil.copytree(PROTOS, tmp_path / "protos"))
    path = changed / "attnlens" / "v1" / "encoder_service.proto"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    result = breaking(changed, today)
    assert "encoder_service.proto" in result.stdout
    assert result.returncode != 0


def test_additions_are_not_breaking(today: Path, tmp_path: Path) -> None:
    changed = Path(shutil.copytree(PROTOS, tmp_path / "protos"))
    path = changed / "attnlens" / "v1" / "error.proto"
    text = path.read_text(encoding="utf-8")
    path.write_text(
        text.replace("_RATE_LIMITED = 16;", "_RATE_LIMITED = 16;\n  // New.\n  ERROR_REASON_NEW = 99;"),
        encoding="utf-8",
    )
    assert breaking(changed, today).returncode == 0
