"""Servers with fp16 or int8 embeddings, compared with an fp32 server of the same bundle."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner

from attnlens_cli.commands.asking.info import info
from attnlens_client import AttentionQuery, Client
from attnlens_server.bundle import open_bundle
from attnlens_server.config import ConfigError, ServerConfig
from attnlens_server.engine import Engine
from attnlens_server.engine.runtimes.onnx_session import CPU, CUDA
from attnlens_server.errors import StartupError
from served import ServerProcess

TEXTS = ["a cat", "the cat sat on the mat", "cat", ""]


@pytest.fixture(scope="module")
def half_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from attnlens_export import Fp16  # noqa: PLC0415 - imports torch
    from small_bundles import export_small  # noqa: PLC0415

    return export_small("wordpiece", tmp_path_factory.mktemp("fp16"), precisions=[Fp16()])


@pytest.fixture(scope="module")
def half_server(half_bundle: Path) -> Iterator[ServerProcess]:
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ATTNLENS_SERVE_PRECISION", "fp16")
            server = stack.enter_context(ServerProcess(half_bundle, "--provider", "cpu"))
        yield server


@pytest.fixture(scope="module")
def clients(half_bundle: Path, half_server: ServerProcess) -> Iterator[tuple[Client, Client]]:
    """Clients of the fp16 and fp32 servers."""
    with (
        ServerProcess(half_bundle, "--provider", "cpu") as server,
        Client(half_server.address) as half,
        Client(server.address) as exact,
    ):
        yield half, exact


def smallest_cosine(actual: npt.NDArray[np.floating], expected: npt.NDArray[np.floating]) -> float:
    norms = np.linalg.norm(actual, axis=-1) * np.linalg.norm(expected, axis=-1)
    return float(((actual * expected).sum(axis=-1) / norms).min())


def test_fp16_vectors_match_fp32_up_to_rounding(clients: tuple[Client, Client]) -> None:
    actual, expected = (client.embed(TEXTS) for client in clients)
    assert actual.dtype == np.float32
    assert smallest_cosine(actual, expected) >= 0.9999
    assert np.abs(actual - expected).max() > 1e-5  # proves that the fp32 graph did not run


def test_encode_results_are_fp32(clients: tuple[Client, Client]) -> None:
    half, _ = clients
    [alone] = half.encode(TEXTS[1:2])
    [actual], [expected] = (client.encode(TEXTS[1:2], attention=AttentionQuery()) for client in clients)
    assert np.array_equal(actual.weights, expected.weights)
    assert alone.last_hidden_state is not None
    assert actual.last_hidden_state is not None
    assert expected.last_hidden_state is not None
    assert np.array_equal(actual.last_hidden_state, expected.last_hidden_state)
    assert 1e-5 < np.abs(alone.last_hidden_state - actual.last_hidden_state).max() < 1e-1


def test_model_info_reports_the_precision(clients: tuple[Client, Client], half_server: ServerProcess) -> None:
    assert [client.get_model().precision for client in clients] == ["fp16", "fp32"]
    result = CliRunner().invoke(info, ["--address", half_server.address])
    assert "fp16, attention in fp32" in result.stdout


def test_fp16_on_a_cpu_logs_a_warning(half_server: ServerProcess) -> None:
    assert half_server.log().count("precision is fp16 on a CPU") == 1


def test_bundle_without_fp16_is_rejected(small_bundle: Callable[[str], Path]) -> None:
    bundle = small_bundle("wordpiece")
    command = [*ServerProcess(bundle).command, "--precision", "fp16"]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (1, "")
    assert f"{bundle} has no graph in fp16: export it again with --precision fp16" in result.stderr


@pytest.fixture(scope="module")
def int8_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from attnlens_export import Gate, Int8  # noqa: PLC0415 - imports torch
    from small_bundles import export_small  # noqa: PLC0415

    gate = Gate(min_mean_cosine=0.99, min_cosine=0.9)
    return export_small("wordpiece", tmp_path_factory.mktemp("int8"), precisions=[Int8(gate)])


def test_int8_vectors_are_close_and_independent_of_the_batch(int8_bundle: Path) -> None:
    texts = [*TEXTS, "the cat on the mat sat on the other mat"]
    with (
        ServerProcess(int8_bundle, "--provider", "cpu", "--precision", "int8") as server,
        ServerProcess(int8_bundle, "--provider", "cpu") as other,
        Client(server.address) as client,
        Client(other.address) as exact,
    ):
        actual, expected = client.embed(texts), exact.embed(texts)
        assert smallest_cosine(actual, expected) >= 0.9
        assert np.abs(actual - expected).max() > 1e-5  # proves that the fp32 graph did not run
        alone = np.concatenate([client.embed([text]) for text in texts])
        assert np.abs(alone - actual).max() <= 1e-5
        assert client.get_model().precision == "int8"
        actual, expected = (
            each.encode(texts[1:2], attention=AttentionQuery())[0].weights for each in (client, exact)
        )
        assert np.array_equal(actual, expected)


def test_int8_runs_on_the_cpu_even_when_other_devices_exist(
    int8_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "attnlens_server.engine.runtimes.onnx_runtime.ort.get_available_providers", lambda: [CUDA, CPU]
    )
    bundle = open_bundle(int8_bundle, "int8")
    assert Engine(bundle, ServerConfig(bundle=int8_bundle, precision="int8")).runtime.device == "CPU"
    with pytest.raises(StartupError, match="precision int8 requires a CPU"):
        Engine(bundle, ServerConfig(bundle=int8_bundle, precision="int8", provider="cuda"))


def test_unknown_precision_is_rejected() -> None:
    with pytest.raises(ConfigError, match="precision is 'int4': use one of fp32, fp16, int8, bf16"):
        ServerConfig(bundle=Path(), precision="int4")  # type: ignore[arg-type]
