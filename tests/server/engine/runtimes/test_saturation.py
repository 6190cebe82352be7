"""Detection of saturating 8-bit arithmetic, and the resulting session options."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from attnlens_server.engine.runtimes import onnx_session, saturation
from attnlens_server.engine.runtimes.saturation import int8_products_saturate


def make_graph() -> onnx.ModelProto:
    """Build the graph that `saturation.onnx` was saved from."""
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["input", "weight"], ["product"])],
        "saturation",
        [helper.make_tensor_value_info("input", TensorProto.UINT8, [1, 64])],
        [helper.make_tensor_value_info("product", TensorProto.INT32, [1, 16])],
        [numpy_helper.from_array(np.full((64, 16), 127, np.int8), "weight")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_packaged_graph_matches_its_source() -> None:
    assert onnx.load(saturation._GRAPH) == make_graph()


def test_vnni_is_exact() -> None:
    flags = Path("/proc/cpuinfo")
    if not flags.exists() or "vnni" not in flags.read_text():
        pytest.skip("needs Linux and a processor with VNNI")
    assert not int8_products_saturate()


@pytest.mark.parametrize(("saturates", "value"), [(True, "1"), (False, None)])
def test_other_instructions_are_requested_only_if_sums_saturate(
    saturates: bool, value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_session, "int8_products_saturate", lambda: saturates)
    opened = onnx_session.open_graph(saturation._GRAPH, "cpu", threads=1, device_id=0)
    options = opened.get_session_options()
    if value is None:
        with pytest.raises(RuntimeError, match="x64quantprecision"):
            options.get_session_config_entry("session.x64quantprecision")
    else:
        assert options.get_session_config_entry("session.x64quantprecision") == value


def test_saturated_sum_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = make_graph()
    graph.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.full((64, 16), 126, np.int8), "weight"))
    onnx.save(graph, tmp_path / "saturation.onnx")
    monkeypatch.setattr(saturation, "_GRAPH", tmp_path / "saturation.onnx")
    assert int8_products_saturate.__wrapped__()
