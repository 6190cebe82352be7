"""OpenVINO: bf16 rounding and storage of weights, and detection of bf16 instructions."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import openvino
import pytest
import torch

from attnlens import openvino as settings
from attnlens.openvino import (
    OpenvinoPrecision,
    compile_properties,
    multiplies_bf16,
    store_weights_in_bf16,
    to_bf16,
)

PRINT_MEMORY = """
import re, sys
from pathlib import Path
import openvino
from attnlens.openvino import store_weights_in_bf16

model = openvino.Core().read_model(sys.argv[1])
if sys.argv[2] == "bf16":
    store_weights_in_bf16(model)
properties = {"INFERENCE_PRECISION_HINT": "bf16", "NUM_STREAMS": "1"}
compiled = openvino.Core().compile_model(model, "CPU", properties)
print(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.parametrize(
    ("device", "precision", "has_bf16", "hint"),
    [
        ("CPU", "fp32", True, "f32"),
        ("CPU", "bf16", True, "bf16"),
        ("CPU", "int8", True, "bf16"),
        ("CPU", "int8", False, "f32"),
        ("CPU", "int8", None, "f32"),
        ("GPU", "int8", True, "f32"),
    ],
)
def test_rest_of_an_int8_graph_is_computed_in_bf16_if_the_processor_has_it(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    precision: OpenvinoPrecision,
    has_bf16: bool | None,
    hint: str,
) -> None:
    monkeypatch.setattr(settings, "multiplies_bf16", lambda: has_bf16)
    properties = compile_properties(device, precision, threads=2, num_streams=1)
    assert properties["INFERENCE_PRECISION_HINT"] == hint


def test_bf16_rounding_equals_pytorch() -> None:
    values = np.random.default_rng(0).standard_normal(10_000, np.float32) * np.float32(1e3)
    ties = np.array([0x3F808000, 0x3F818000, 0x80000000, 0x00018000, 0xBF7FFFFF], np.uint32).view(np.float32)
    for array in (values, ties, values.reshape(100, 100).T):
        expected = torch.tensor(array).bfloat16().view(torch.uint16).numpy()
        np.testing.assert_array_equal(to_bf16(array), expected)


def test_only_large_matrices_are_stored_in_bf16(minilm_bundle: Path) -> None:
    graph = minilm_bundle / "onnx" / "model.onnx"
    model, original = openvino.Core().read_model(graph), openvino.Core().read_model(graph)
    constants = [node for node in original.get_ops() if node.get_type_name() == "Constant"]
    large = [node.data for node in constants if len(node.shape) == 2 and node.data.size >= 2**17]
    num_matrices = 6 * 6  # per layer: query, key, value, output, two of the feed-forward network

    assert store_weights_in_bf16(model) == num_matrices + 1  # and the token embeddings
    stored = [node for node in model.get_ops() if node.get_element_type() == openvino.Type.bf16]
    actual = sorted(node.get_data(dtype=np.float32).tobytes() for node in stored)
    expected = [torch.tensor(data).bfloat16().float().numpy() for data in large if data.shape != (512, 384)]
    assert actual == sorted(array.tobytes() for array in expected)


@pytest.mark.skipif(not multiplies_bf16(), reason="the processor lacks bf16 instructions")
def test_bf16_weights_need_less_memory(minilm_bundle: Path) -> None:
    memory_bytes = {}
    for precision in ("fp32", "bf16"):
        command = [sys.executable, "-c", PRINT_MEMORY, str(minilm_bundle / "onnx" / "model.onnx"), precision]
        result = subprocess.run(command, capture_output=True, check=True, text=True)
        memory_bytes[precision] = int(result.stdout) * 2**10
    # At least half of 22 million 4-byte weights. In fp32, embedding tables are also stored twice.
    assert memory_bytes["fp32"] - memory_bytes["bf16"] > 40e6


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16 vnni\n", True),
        ("flags\t\t: fpu amx_bf16 amx_tile\n", True),
        ("flags\t\t: fpu avx512f avx512_vnni\n", False),
        ("Features\t: fp asimd bf16\n", True),
        ("Features\t: fp asimd\n", False),
        ("processor: 0\n", None),
    ],
)
def test_bf16_instructions_are_detected_by_whole_flag_names(
    text: str, expected: bool | None, tmp_path: Path
) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    assert multiplies_bf16(path) is expected


def test_bf16_instructions_are_unknown_without_cpuinfo(tmp_path: Path) -> None:
    assert multiplies_bf16(tmp_path / "none") is None
