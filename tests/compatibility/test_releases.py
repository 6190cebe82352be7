"""Bundles, requests and responses of each release, and of the current version, work with the current code."""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest
from google.protobuf.message_factory import GetMessageClass

from attnlens.bundle import read_manifest, verify_files
from attnlens_client import AttentionQuery, Client, InputTooLongError
from compatibility import recording
from compatibility.cases import FIRST, MODELS, SECOND
from compatibility.record import record_release
from compatibility.recording import SERVICE, Recorded
from served import ServerProcess

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RELEASES = sorted(HERE.glob("v*"))

# Values that depend on the server or the run. They are not part of the compatibility promise.
RUN_SPECIFIC = {"timings", "versions", "limits", "execution_providers", "error_id"}
TOLERANCE = 1e-5
# Methods added after a release.
SINCE: dict[str, set[str]] = {}
TOLERANCE_FP16 = 2e-3


@pytest.fixture(scope="module", params=[*RELEASES, Path("current")], ids=lambda path: path.name)
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a recorded release, or the current version, recorded now as a release would be."""
    path: Path = request.param
    if path in RELEASES:
        return path
    current = tmp_path_factory.mktemp("releases") / path
    record_release(current)
    return current


@pytest.fixture(scope="module", params=MODELS)
def recorded_model(release: Path, request: pytest.FixtureRequest) -> Path:
    """Return the directory of a recorded model: its bundle and calls."""
    path: Path = release / request.param
    return path


@pytest.fixture(scope="module")
def server(recorded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    bundle = shutil.copytree(recorded_model / "bundle", tmp_path_factory.mktemp("bundle") / "bundle")
    with ServerProcess(bundle) as process:
        yield process


def missing(recorded: object, found: object, path: str = "") -> Iterator[str]:
    """Yield each recorded value that is missing or different in the current response. Additions are fine."""
    if isinstance(recorded, dict):
        if "data" in recorded and "shape" in recorded and isinstance(found, dict):
            yield from _other_numbers(recorded, found, path)
            return
        for key, value in recorded.items():
            if key not in RUN_SPECIFIC:
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


def test_server_reproduces_recorded_responses(recorded_model: Path, server: ServerProcess) -> None:
    with grpc.insecure_channel(server.address) as channel:
        for recorded in recording.read(recorded_model / "calls.json"):
            found = recording.call(channel, recorded.name, recorded.method, recorded.request)
            assert found.code == recorded.code, recorded.name
            if recorded.code == "OK":
                assert list(missing(recorded.replies(), found.replies())) == [], recorded.name
            else:
                assert list(missing(recorded.failure(), found.failure())) == [], recorded.name


def test_differences_are_detected(release: Path) -> None:
    calls = {recorded.name: recorded for recorded in recording.read(release / "embedder" / "calls.json")}
    replies, other = (calls["embed"].replies() for _ in range(2))
    other[0]["embeddings"]["data"][3] += 1e-3
    assert list(missing(replies, other))
    del other[0]["usages"]
    assert any("usages" in line for line in missing(replies, other))


def test_recording_covers_every_method_and_failure(release: Path) -> None:
    calls = [call for model in MODELS for call in recording.read(release / model / "calls.json")]
    since = SINCE.get(release.name, set())
    assert {recorded.method for recorded in calls} == set(SERVICE.methods_by_name) - since
    assert {recorded.code for recorded in calls} == {"OK", "INVALID_ARGUMENT", "NOT_FOUND"}


def test_recorded_bundle_is_unchanged(recorded_model: Path) -> None:
    manifest = read_manifest(recorded_model / "bundle")
    assert len(verify_files(recorded_model / "bundle", manifest)) > 8


def test_recorded_bundle_passes_the_current_check(release: Path) -> None:
    bundle = release / "embedder" / "bundle"
    command = [sys.executable, "-m", "attnlens_cli.main", "check", str(bundle), "--json"]
    result = subprocess.run(command, capture_output=True, check=False, text=True)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["passed"]


# --- the client with recorded responses --------------------------------------------------------------


@contextmanager
def replayed(calls: list[Recorded]) -> Iterator[str]:
    """Serve the given recorded calls, one per method, regardless of the request."""
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {}
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


def arrays(recorded: Recorded) -> list[npt.NDArray[Any]]:
    """Tensors of a recorded response, in order of appearance."""
    found: list[npt.NDArray[Any]] = []

    def collect(values: object) -> None:
        if isinstance(values, dict) and "shape" in values:
            found.append(np.array(values["data"]).reshape([int(size) for size in values["shape"]]))
        elif isinstance(values, dict):
            for value in values.values():
                collect(value)
        elif isinstance(values, list):
            for value in values:
                collect(value)

    collect(recorded.replies())
    return found


LAST_TWO = AttentionQuery(layers=[-1, 0], heads=[1])
MEAN = AttentionQuery(layers=[1], view="head_mean")
READ: dict[str, Callable[[Client], list[Any]]] = {
    "embed": lambda client: [client.embed([FIRST, SECOND, ""])],
    "embed pairs": lambda client: [client.embed([(FIRST, SECOND), ("", SECOND), FIRST])],
    "encode": lambda client: [text.last_hidden_state for text in client.encode([FIRST])],
    "encode attention": lambda client: [
        array
        for text in client.encode([FIRST, "rain"], attention=[LAST_TWO, MEAN])
        for array in (text.last_hidden_state, *(found.weights for found in text.attention))
    ],
}


@pytest.mark.parametrize("name", READ)
def test_client_reads_recorded_responses(release: Path, name: str) -> None:
    calls = {recorded.name: recorded for recorded in recording.read(release / "embedder" / "calls.json")}
    with replayed([calls["get model"], calls[name]]) as address, Client(address) as client:
        found = READ[name](client)
    expected = arrays(calls[name])
    assert len(found) == len(expected) > 0
    for array, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(array, wanted)


def test_client_reads_a_recorded_stream(release: Path) -> None:
    calls = {recorded.name: recorded for recorded in recording.read(release / "embedder" / "calls.json")}
    with replayed([calls["get model"], calls["stream"]]) as address, Client(address) as client:
        texts = list(client.encode_stream([FIRST, (FIRST, "rain")], attention=[LAST_TWO, MEAN]))
    parts = [array for text in texts for found in text.attention for array in found.weights]
    expected = [array for array in arrays(calls["stream"]) if array.ndim == 4]  # one layer each
    assert len(parts) == len(expected) == 6
    for array, wanted in zip(parts, expected, strict=True):
        np.testing.assert_array_equal(array, wanted[0])
    assert {token.source for token in texts[1].tokens} == {"special", "prompt", "text", "second_text"}


def test_client_reads_recorded_tokens_models_and_failures(release: Path) -> None:
    calls = {recorded.name: recorded for recorded in recording.read(release / "embedder" / "calls.json")}
    chosen = [calls[name] for name in ("get model", "tokenize", "too long")]
    with replayed(chosen) as address, Client(address) as client:
        model = client.get_model()
        long, pair = client.tokenize([SECOND * 4, ("rain", FIRST)], prompt_name="query")
        with pytest.raises(InputTooLongError) as caught:
            client.embed([FIRST, SECOND * 4])
    manifest = release / "embedder" / "bundle" / "manifest.json"
    assert model.version == hashlib.sha256(manifest.read_bytes()).hexdigest()
    assert (model.name, model.supports_text_pairs, model.prompts) == (
        "small",
        True,
        {"query": "find: ", "passage": "the "},
    )
    assert (long.exceeds_max_tokens, pair.exceeds_max_tokens) == (True, False)
    assert [token.text for token in pair.tokens if token.source == "second_text"][:1] == ["the"]
    assert caught.value.text_index == 1
    assert caught.value.num_tokens > caught.value.max_tokens == 40
