"""Graphs in ONNX Runtime on the CPU, opened and timed."""

import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime

Feed = Mapping[str, npt.NDArray[np.generic]]


def open_session(
    path: Path, *, threads: int = 0, optimized_path: Path | None = None
) -> onnxruntime.InferenceSession:
    """Open a graph as attnlens-server opens it on a CPU with VNNI; on others it asks for slower instructions.

    Args:
        path: the graph.
        threads: those of a batch; 0: every core. Time with 1, as the server runs batches side by
            side.
        optimized_path: where to write the graph that ONNX Runtime makes of it; None: nowhere.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3  # errors come as exceptions
    if optimized_path is not None:
        options.optimized_model_filepath = str(optimized_path)
    return onnxruntime.InferenceSession(
        path, options, providers=["CPUExecutionProvider"], disabled_optimizers=["SkipLayerNormFusion"]
    )


def measure_seconds(
    sessions: Mapping[str, onnxruntime.InferenceSession], feed: Feed, repetitions: int
) -> dict[str, list[float]]:
    """Time sessions in turns, after a first turn that is not counted, and return all times of each."""
    seconds: dict[str, list[float]] = {name: [] for name in sessions}
    for _ in range(repetitions + 1):
        for name, session in sessions.items():
            started = time.perf_counter()
            session.run(None, feed)
            seconds[name].append(time.perf_counter() - started)
    return {name: each[1:] for name, each in seconds.items()}
