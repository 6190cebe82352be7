"""The parity check in all installed Python runtimes, and in fake runtimes that fail."""

import shutil
from pathlib import Path

import pytest

from attnlens_export.graph.names import ATTENTIONS_PATH, CONTRIBUTIONS_PATH, EMBEDDINGS_PATH
from attnlens_export.parity.grid import Case, Padding
from attnlens_export.runtimes import RuntimeOptions, find_runtimes
from attnlens_runtimes import RUNTIMES, NotInstalledError, UnknownRuntimeError
from runtimes.measured import PYTHON_RUNTIMES, TOLERANCE, alter, extended_except, found, measure
from runtimes.stand_in import stand_in

pytestmark = pytest.mark.extended  # other runtimes


@pytest.mark.extended
@pytest.mark.parametrize("name", PYTHON_RUNTIMES)
def test_minilm_is_the_same_model_in_every_runtime(name: str, minilm_bundle: Path) -> None:
    result = measure(minilm_bundle, found(name))
    # docs/runtimes.md: OpenCV has wrong contributions for MiniLM. A version that has right ones fails here.
    wrong = [line for line in result.failures() if CONTRIBUTIONS_PATH in line]
    assert bool(wrong) == (name == "opencv"), wrong
    assert len(result.failures()) == len(wrong)
    errors = [errors.max_abs_error for errors in result.worst_errors()]
    assert len(errors) == 3
    assert 0 < max(errors) <= TOLERANCE
    assert result.num_cases == 5


@pytest.mark.parametrize("name", extended_except(PYTHON_RUNTIMES, "onnx.reference", "openvino"))
def test_altered_graph_is_noticed_in_every_runtime(name: str, tiny_bundle: Path, tmp_path: Path) -> None:
    altered = alter(tiny_bundle, tmp_path / "altered")
    result = measure(tiny_bundle, found(name), altered=altered)
    assert not result.passed
    failed = {each.graph for each in result.comparisons if not each.passed}
    assert failed - ({CONTRIBUTIONS_PATH} if name == "opencv" else set()) == {ATTENTIONS_PATH}


def test_reference_implementation_reads_weights_behind_a_link(tiny_bundle: Path, tmp_path: Path) -> None:
    """`onnx.load` would not."""
    bundle = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    (tmp_path / "link").hardlink_to(bundle / EMBEDDINGS_PATH)
    assert measure(bundle, found("onnx.reference")).failures() == []


@pytest.mark.parametrize(
    ("behavior", "reason"),
    [
        ("crashes", "stopped at 2x33 right: crashed: signal 11 (SIGSEGV)"),
        ("refuses an input", "stopped at 2x33 right: RuntimeError: 33 is no good"),
        ("refuses the graph", "can't be opened: NotImplementedError: operator Erf"),
    ],
)
def test_runtime_that_stops_is_a_failure_with_a_reason(tiny_bundle: Path, behavior: str, reason: str) -> None:
    result = measure(tiny_bundle, stand_in(behavior))
    assert not result.passed
    assert result.stops == dict.fromkeys((EMBEDDINGS_PATH, ATTENTIONS_PATH, CONTRIBUTIONS_PATH), reason)
    assert result.failures()[0] == f"stand-in: {next(iter(result.stops))}: {reason}"
    assert result.num_cases == (0 if "open" in reason else 4)
    assert len(result.worst_errors()) == (0 if "open" in reason else 3)


def test_output_too_few_is_a_failure(tiny_bundle: Path) -> None:
    stops = measure(tiny_bundle, stand_in("drops an output")).stops
    assert stops[EMBEDDINGS_PATH].endswith("outputs of the shapes [] instead of [(2, 33, 48)]")
    assert stops[ATTENTIONS_PATH].startswith("stopped at 2x33 right: outputs of the shapes")


@pytest.mark.parametrize(
    ("behavior", "failure"),
    [
        ("is a little off", " is 0.001 (limit 1e-05)"),
        ("gives NaN for padding", "number of outputs with NaN or infinity"),
    ],
)
def test_wrong_numbers_are_a_failure(tiny_bundle: Path, behavior: str, failure: str) -> None:
    result = measure(tiny_bundle, stand_in(behavior))
    assert not result.passed
    assert not result.stops
    assert any(failure in line for line in result.failures())
    assert all(" on 2x33 right" in line for line in result.failures())


def test_maps_that_are_too_large_are_omitted(tiny_bundle: Path) -> None:
    cases = [Case(1, 33, Padding.NONE), Case(2, 33, Padding.LEFT, with_attentions=False)]
    result = measure(tiny_bundle, stand_in("works"), cases)
    assert result.passed
    assert result.num_cases == 1
    assert f"not compared, too large: {ATTENTIONS_PATH} on 2x33 left" in result.remarks[-1]


def test_runtimes_are_discovered() -> None:
    others = {"iree", "mnn", "onnxruntime-fp16", "onnxruntime-node", "onnxruntime-web", "tvm"}
    assert set(RUNTIMES) == {*PYTHON_RUNTIMES, *others}
    with pytest.raises(UnknownRuntimeError, match=r"unknown runtime 'openvno'.*did you mean 'openvino'"):
        find_runtimes(RuntimeOptions(("openvno",)))


def test_missing_runtime_is_an_error_only_if_named(tmp_path: Path) -> None:
    remedy = r"onnxruntime-web is not installed: npm install onnxruntime-web \(looked in "
    with pytest.raises(NotInstalledError, match=remedy):
        find_runtimes(RuntimeOptions(("onnxruntime-web",), node_modules=tmp_path))
    installed, missing = find_runtimes(RuntimeOptions(("all",), node_modules=tmp_path))
    assert {each.name for each in installed} >= set(PYTHON_RUNTIMES)
    assert {each.name for each in missing} >= {"onnxruntime-node", "onnxruntime-web"}


def test_node_packages_are_found_above_the_directory_and_by_node_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "project" / "node_modules" / "onnxruntime-web"
    package.mkdir(parents=True)
    (package / "package.json").write_text('{"version": "9.8.7"}')
    inside, outside = tmp_path / "project" / "src", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    monkeypatch.setattr("shutil.which", lambda _name: "/usr/bin/node")
    monkeypatch.chdir(inside)
    assert found("onnxruntime-web").version == "9.8.7"
    monkeypatch.chdir(outside)
    monkeypatch.setenv("NODE_PATH", str(package.parent))
    assert found("onnxruntime-web").version == "9.8.7"
