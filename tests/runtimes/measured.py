"""Helpers of the runtime tests: measurement of a bundle in a runtime, and a bundle with errors."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from attnlens_export.graph.names import ATTENTIONS_PATH, embeddings_path
from attnlens_export.graph.parameters import rebuild_encoder
from attnlens_export.parity.grid import Case, small_grid
from attnlens_export.parity.measure import Subject
from attnlens_export.parity.stored import References
from attnlens_export.runtimes import RuntimeOptions, RuntimeResult, find_runtimes, measure_runtime
from attnlens_model import read_config
from attnlens_runtimes import Installed

# Runtimes in the extra `dev`. npm packages have separate tests.
PYTHON_RUNTIMES = ["onnx.reference", "onnxruntime", "onnxruntime-bert", "opencv", "openvino", "tract"]
TOLERANCE = 1e-5


def extended_except(names: list[str], *kept: str) -> list[Any]:
    """Return parameters of a test, of which only `kept` are part of `make test`."""
    return [name if name in kept else pytest.param(name, marks=pytest.mark.extended) for name in names]


def measure(
    bundle: Path, runtime: Installed, cases: list[Case] | None = None, altered: Path | None = None
) -> RuntimeResult:
    """Measure the graphs of `altered`, or the bundle's own, in fp32 against the weights of the bundle."""
    in_fp32 = dataclasses.replace(runtime, command=runtime.fp32_command or runtime.command)
    [result] = measure_all(bundle, in_fp32, cases, altered)
    return result


def measure_all(
    bundle: Path, runtime: Installed, cases: list[Case] | None = None, altered: Path | None = None
) -> list[RuntimeResult]:
    """Measure them in the runtime's default precision, and in fp32 if that is another."""
    config = read_config(bundle / "config.json")
    references = References(rebuild_encoder(bundle / embeddings_path(bundle), config))
    cases = cases or small_grid(config.max_tokens)
    subject = Subject(altered or bundle, references, config, "test", cases)
    return measure_runtime(subject, runtime, 120, lambda _detail, _done, _total: None)


def found(name: str, node_modules: Path | None = None) -> Installed:
    """Find a runtime that must be there."""
    [runtime], _ = find_runtimes(RuntimeOptions((name,), node_modules))
    return runtime


def alter(bundle: Path, target: Path) -> Path:
    """Copy a bundle, and multiply the last layer's scores in the attention graph by 1.001."""
    altered = Path(shutil.copytree(bundle, target))
    path = altered / ATTENTIONS_PATH
    model = onnx.load(path, load_external_data=False)
    # The scale of the scores of the last layer.
    softmax = [node for node in model.graph.node if node.op_type == "Softmax"][-1]
    model.graph.node.insert(
        list(model.graph.node).index(softmax),
        onnx.helper.make_node("Mul", [softmax.input[0], "almost_one"], ["scaled"]),
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1.001], np.float32), "almost_one"))
    softmax.input[0] = "scaled"
    path.write_bytes(model.SerializeToString())
    return altered
