"""What earlier releases have written, with the code of today: bundles, requests, replies."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass

from attnlens.bundle import read_manifest, verify_files
from compatibility import recording
from compatibility.recording import SERVICE, Recorded
from served import ServerProcess

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RELEASES = sorted(HERE.glob("v*"))

# What is another server's or another run's own: neither kept nor promised.
NOT_KEPT = {"timings", "versions", "limits", "execution_providers", "error_id"}
TOLERANCE = 1e-5
TOLERANCE_FP16 = 2e-3


@pytest.fixture(scope="module", params=RELEASES, ids=lambda path: path.name)
def release(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.fixture(scope="module")
def server(release: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    bundle = shutil.copytree(release / "bundle", tmp_path_factory.mktemp("bundle") / "bundle")
    with ServerProcess(bundle) as process:
        yield process


def missing(recorded: object, found: object, path: str = "") -> Iterator[str]:
    """Yield what a reply of today lacks, or has otherwise, of a recorded one. It may have more."""
    if isinstance(recorded, dict):
        if "data" in recorded and "shape" in recorded and isinstance(found, dict):
            yield from _other_numbers(recorded, found, path)
            return
        for key, value in recorded.items():
            if key not in NOT_KEPT:
                there = found.get(key) if isinstance(found, dict) else None
                yield from missing(value, there, f"{path}.{key}")
    elif isinstance(recorded, list):
        if not isinstance(found, list) or len(found) < len(recorded):
            yield f"{path}: {found} instead of {recorded}"
            return
        for index, (value, there) in enumerate(zip(recorded, found, strict=False)):
            yield from missing(value, there, f"{path}[{index}]")
    elif recorded != found and not path.endswith(".description"):
        yield f"{path}: {found} instead of {recorded}"


def _other_numbers(recorded: dict[str, Any], found: dict[str, Any], path: str) -> Iterator[str]:
    if any(recorded.get(key) != found.get(key) for key in ("shape", "data_type")):
        yield f"{path}: {found.get('data_type')} {found.get('shape')}"
        return
    worst = max(abs(a - b) for a, b in zip(recorded["data"], found["data"], strict=True))
    if not worst <= (TOLERANCE_FP16 if recorded["data_type"].endswith("16") else TOLERANCE):
        yield f"{path}: numbers differ by {worst}"


def test_there_is_a_release() -> None:
    assert RELEASES


def test_the_server_answers_recorded_requests_as_they_were_answered(
    release: Path, server: ServerProcess
) -> None:
    with grpc.insecure_channel(server.address) as channel:
        for recorded in recording.read(release / "calls.json"):
            found = recording.call(channel, recorded.name, recorded.method, recorded.request)
            assert found.code == recorded.code, recorded.name
            if recorded.code == "OK":
                assert list(missing(recorded.replies(), found.replies())) == [], recorded.name
            else:
                assert list(missing(recorded.failure(), found.failure())) == [], recorded.name


def test_a_difference_would_be_noticed(release: Path) -> None:
    calls = {recorded.name: recorded for recorded in recording.read(release / "calls.json")}
    replies, other = (calls["embed"].replies() for _ in range(2))
    other[0]["embeddings"]["data"][3] += 1e-3
    assert list(missing(replies, other))
    del other[0]["usages"]
    assert any("usages" in line for line in missing(replies, other))


def test_every_method_and_kind_of_failure_is_recorded(release: Path) -> None:
    calls = recording.read(release / "calls.json")
    assert {recorded.method for recorded in calls} == set(SERVICE.methods_by_name)
    assert {recorded.code for recorded in calls} == {"OK", "INVALID_ARGUMENT", "NOT_FOUND"}


def test_the_bundle_is_what_it_was(release: Path) -> None:
    manifest = read_manifest(release / "bundle")
    assert len(verify_files(release / "bundle", manifest)) > 8


def test_the_bundle_still_passes_its_check(release: Path) -> None:
    command = [sys.executable, "-m", "attnlens_cli.main", "check", str(release / "bundle"), "--json"]
    result = subprocess.run(command, capture_output=True, check=False, text=True)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["passed"]


# --- the client with recorded replies -----------------------------------------------------------------


@contextmanager
def replayed(calls: list[Recorded]) -> Iterator[str]:
    """A server that answers each method with the given recorded call, whatever it is asked."""
    handlers = {}
    for recorded in calls:
        method = SERVICE.methods_by_name[recorded.method]
        handlers[recorded.method] = (
            grpc.unary_stream_rpc_method_handler(_answer_stream(recorded))
            if method.server_streaming
            else grpc.unary_unary_rpc_method_handler(_answer(recorded))
        )
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.full_name, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def _fail(recorded: Recorded, context: grpc.ServicerContext) -> None:
    if recorded.code != "OK":
        context.set_trailing_metadata((("attnlens-error-bin", recorded.error),))
        context.abort(grpc.StatusCode[recorded.code], "recorded")


def _answer(recorded: Recorded) -> Any:
    def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
        GetMessageClass(SERVICE.methods_by_name[recorded.method].input_type).FromString(request)
        _fail(recorded, context)
        return recorded.responses[0]

    return answer


def _answer_stream(recorded: Recorded) -> Any:
    def answer(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        del request
        _fail(recorded, context)
        yield from recorded.responses

    return answer
