"""The parity check in the runtimes of npm, installed in tests/node: `make test-ecosystem`."""

from pathlib import Path

import pytest

from attnlens_export.graph.names import ATTENTIONS_PATH
from attnlens_runtimes import GraphProcess, RuntimeFailureError
from runtimes.measured import TOLERANCE, alter, found, measure

NODE_MODULES = Path(__file__).parents[1] / "node" / "node_modules"

pytestmark = pytest.mark.ecosystem


@pytest.mark.parametrize("name", ["onnxruntime-node", "onnxruntime-web"])
def test_minilm_is_the_same_model_in_node(name: str, minilm_bundle: Path) -> None:
    result = measure(minilm_bundle, found(name, NODE_MODULES))
    assert result.failures() == []
    errors = [errors.max_abs_error for errors in result.worst_errors()]
    assert len(errors) == 3
    assert 0 < max(errors) <= TOLERANCE
    assert result.num_cases == 5


@pytest.mark.parametrize("name", ["onnxruntime-node", "onnxruntime-web"])
def test_altered_graph_is_noticed_in_node(name: str, tiny_bundle: Path, tmp_path: Path) -> None:
    result = measure(tiny_bundle, found(name, NODE_MODULES), altered=alter(tiny_bundle, tmp_path / "altered"))
    assert not result.passed
    assert {each.graph for each in result.comparisons if not each.passed} == {ATTENTIONS_PATH}


def test_invalid_graph_file_is_rejected_in_one_line(tmp_path: Path) -> None:
    graph = tmp_path / "model.onnx"
    graph.write_bytes(b"nothing")
    for name in ("onnxruntime-node", "onnxruntime-web"):
        refused = GraphProcess(found(name, NODE_MODULES), graph, timeout_s=60)
        with pytest.raises(RuntimeFailureError, match="rror"), refused:
            pytest.fail("it is open")
