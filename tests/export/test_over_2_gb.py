"""A real encoder that is too large for one protobuf message: files, memory and results.

Disk: 1.2 GB for the checkpoint in half precision, 2.4 GB for the bundle; both are deleted at the end.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
import safetensors.torch
import torch
import transformers

from attnlens_client import AttentionQuery, Client
from served import ServerProcess

pytestmark = pytest.mark.extended

# The table of words fills 2 GiB, so every other tensor is behind them. One layer takes the least time.
SIZES: dict[str, Any] = {
    "vocab_size": 2**18,
    "hidden_size": 2048,
    "num_hidden_layers": 1,
    "num_attention_heads": 16,
    "intermediate_size": 8192,
    "max_position_embeddings": 5,
}
WEIGHT_BYTES = 2_348_990_464
TOKEN_IDS = [2**18 - 1, 5, 2**17 + 1, 7, 44_444]
# PyTorch and ONNX Runtime themselves.
FLOOR_BYTES = 500_000_000

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Exported:
    checkpoint: Path
    bundle: Path
    exit_code: int
    output: str
    peak_bytes: int


def write_checkpoint(directory: Path) -> None:
    """Write BERT in half precision, its weights turns of one block of noise: drawing them takes long."""
    config = transformers.BertConfig(**SIZES)
    with torch.device("meta"):
        parameters = dict(transformers.BertModel(config, add_pooling_layer=False).named_parameters())
    # A prime number of values, so that no two rows and no two tensors are alike.
    block = 0.01 * torch.randn(1_048_583, generator=torch.Generator().manual_seed(0))
    tensors = {}
    for name, parameter in parameters.items():
        turned = block.roll(zlib.crc32(name.encode())).half()
        count = parameter.numel()
        tensor = turned.repeat(-(-count // len(turned)))[:count].view(parameter.shape)
        tensors[name] = tensor + 1 if name.endswith("LayerNorm.weight") else tensor
    assert 4 * sum(tensor.numel() for tensor in tensors.values()) == WEIGHT_BYTES
    config.save_pretrained(directory)
    safetensors.torch.save_file(tensors, directory / "model.safetensors")


def export(checkpoint: Path, bundle: Path) -> Exported:
    """Export in a process of its own, and measure its peak of memory."""
    command = [sys.executable, "-m", "attnlens_cli.main", "export", str(checkpoint)]
    command += ["--output", str(bundle), "--pooling", "mean"]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        peak_bytes = 0
        while process.poll() is None:
            peak_bytes = max(peak_bytes, anonymous_bytes(process.pid))
            time.sleep(0.05)  # filling a gigabyte takes longer
        output.seek(0)
        return Exported(checkpoint, bundle, process.returncode, output.read(), peak_bytes)


def anonymous_bytes(pid: int) -> int:
    """Return the resident memory of a process without file pages, which vary with the page cache."""
    status = Path(f"/proc/{pid}/status").read_text()
    # Zombie processes have no such line.
    return sum(
        1024 * int(kibibytes) for kibibytes in re.findall(r"^RssAnon:\s*(\d+) kB$", status, re.MULTILINE)
    )


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exported]:
    """The export, in a directory that is deleted after these tests instead of after all tests."""
    with tempfile.TemporaryDirectory(dir=tmp_path_factory.getbasetemp()) as name:
        checkpoint, bundle = Path(name) / "checkpoint", Path(name) / "bundle"
        write_checkpoint(checkpoint)
        yield export(checkpoint, bundle)
    assert not Path(name).exists()


@pytest.fixture(scope="module")
def expected(exported: Exported) -> list[Array]:
    """Hidden states and maps of one text in transformers."""
    model: Any = transformers.BertModel.from_pretrained(
        exported.checkpoint, dtype=torch.float32, attn_implementation="eager", add_pooling_layer=False
    )
    with torch.no_grad():
        output = model.eval()(torch.tensor([TOKEN_IDS]), output_attentions=True)
    return [tensor.numpy() for tensor in (output.last_hidden_state, *output.attentions)]


def test_parity_passes_with_weights_in_a_separate_file(exported: Exported) -> None:
    assert exported.exit_code == 0, exported.output
    onnx_dir = exported.bundle / "onnx"
    sizes = {path.name: path.stat().st_size for path in onnx_dir.iterdir()}
    graphs = ("model.onnx", "model_attentions.onnx", "model_contributions.onnx")
    assert sizes.keys() == {*graphs, "model.onnx_data"}
    assert sizes["model.onnx_data"] >= WEIGHT_BYTES > 2**31
    assert max(sizes[name] for name in graphs[:2]) < 100_000
    assert sizes[graphs[2]] < 300_000  # it has a matrix that says which component belongs to which head
    for name in graphs:
        onnx.checker.check_model(onnx_dir / name)
        tensors = onnx.load(onnx_dir / name, load_external_data=False).graph.initializer
        entries = [entry for tensor in tensors for entry in tensor.external_data]
        assert {entry.value for entry in entries if entry.key == "location"} == {"model.onnx_data"}
        # Beyond the range of 31 bits.
        assert max(int(entry.value) for entry in entries if entry.key == "offset") > 2**31
    config = json.loads((exported.bundle / "config.json").read_text())
    assert config["transformers.js_config"] == {"use_external_data_format": True}


def test_export_takes_little_more_than_the_weights(exported: Exported) -> None:
    """The encoder once, and ONNX Runtime's copies of the matrices of the layer: no second table."""
    print(f"peak of the export: {exported.peak_bytes / 1e9:.2f} GB")  # noqa: T201 - shown by `pytest -rP`
    assert WEIGHT_BYTES < exported.peak_bytes < 1.3 * WEIGHT_BYTES + FLOOR_BYTES


@pytest.mark.parametrize("name", ["model.onnx", "model_attentions.onnx"])
def test_onnx_runtime_matches_transformers(name: str, exported: Exported, expected: list[Array]) -> None:
    session = onnxruntime.InferenceSession(
        exported.bundle / "onnx" / name, providers=["CPUExecutionProvider"]
    )
    ids = np.array([TOKEN_IDS])
    inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    outputs = session.run(None, inputs)
    assert len(outputs) == (1 if name == "model.onnx" else 1 + SIZES["num_hidden_layers"])
    for measured, tensor in zip(outputs, expected, strict=False):
        assert np.abs(measured - tensor).max() < 1e-5


def test_server_compares_the_hashes_and_matches_transformers(
    exported: Exported, expected: list[Array]
) -> None:
    with ServerProcess(exported.bundle) as server, Client(server.address) as client:
        [result] = client.encode([TOKEN_IDS], attention=AttentionQuery(layers=[0], heads=[7]))
    assert result.last_hidden_state is not None
    assert np.abs(result.last_hidden_state - expected[0][0]).max() < 1e-5
    assert np.abs(result.weights[0, 0] - expected[1][0, 7]).max() < 1e-5
