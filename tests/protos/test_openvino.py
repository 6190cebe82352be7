"""Weights in bf16 for OpenVINO: the nearest numbers, in every large matrix, and less memory."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import openvino
import pytest
import torch

from attnlens.openvino import multiplies_bf16, store_weights_in_bf16, to_bf16

OPENED = """
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


def test_the_nearest_bf16_is_that_of_pytorch() -> None:
    numbers = np.random.default_rng(0).standard_normal(10_000, np.float32) * np.float32(1e3)
    ties = np.array([0x3F808000, 0x3F818000, 0x80000000, 0x00018000, 0xBF7FFFFF], np.uint32).view(np.float32)
    for values in (numbers, ties, numbers.reshape(100, 100).T):
        expected = torch.tensor(values).bfloat16().view(torch.uint16).numpy()
        np.testing.assert_array_equal(to_bf16(values), expected)


def test_every_large_matrix_is_stored_in_bf16_and_nothing_else(minilm_bundle: Path) -> None:
    graph = minilm_bundle / "onnx" / "model.onnx"
    model, original = openvino.Core().read_model(graph), openvino.Core().read_model(graph)
    constants = [node for node in original.get_ops() if node.get_type_name() == "Constant"]
    large = [node.data for node in constants if len(node.shape) == 2 and node.data.size >= 2**17]
    products = 6 * 6  # layers; queries, keys, values, output, two of the feed-forward network

    assert store_weights_in_bf16(model) == products + 1  # the table of tokens
    stored = [node for node in model.get_ops() if node.get_element_type() == openvino.Type.bf16]
    found = sorted(node.get_data(dtype=np.float32).tobytes() for node in stored)
    expected = [torch.tensor(data).bfloat16().float().numpy() for data in large if data.shape != (512, 384)]
    assert found == sorted(array.tobytes() for array in expected)


@pytest.mark.skipif(not multiplies_bf16(), reason="this processor has no bf16")
def test_weights_in_bf16_take_less_memory(minilm_bundle: Path) -> None:
    taken = {}
    for held in ("fp32", "bf16"):
        command = [sys.executable, "-c", OPENED, str(minilm_bundle / "onnx" / "model.onnx"), held]
        result = subprocess.run(command, capture_output=True, check=True, text=True)
        taken[held] = int(result.stdout) * 2**10
    # Half of 22 million weights in 4 bytes, at the least: tables were stored twice, too.
    assert taken["fp32"] - taken["bf16"] > 40e6
