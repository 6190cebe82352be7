"""OpenVINO in a subprocess.

OpenVINO sets a signal stack for the thread that compiles a model and may free it too early. A later signal
then crashes the process.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = dict[str, npt.NDArray[Any]]


def run_openvino(path: Path, options: dict[str, str], feed: Arrays) -> tuple[list[str], Arrays]:
    """Run a model and return its input shapes and its outputs by name."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        return executor.submit(_run, path, options, feed).result()


def _run(path: Path, options: dict[str, str], feed: Arrays) -> tuple[list[str], Arrays]:
    import openvino  # noqa: PLC0415 - only in the subprocess

    compiled = openvino.compile_model(path, "CPU", options)
    outputs = compiled(feed)
    shapes = [str(value.partial_shape) for value in compiled.inputs]
    return shapes, {value.get_any_name(): np.array(outputs[value]) for value in compiled.outputs}
