"""Graphs in ONNX Runtime on the CPU, opened and timed."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime

MAX_ROUNDS = 5
MAX_ROUND_DIFFERENCE = 0.15

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


@dataclass(frozen=True)
class Timings:
    """Seconds per run of several sessions, measured in turns.

    Attributes:
        seconds: Minimum per session. Other programs on the machine only ever add to a time.
        is_reliable: Whether the last two rounds agree within `MAX_ROUND_DIFFERENCE`.
    """

    seconds: dict[str, float]
    is_reliable: bool


def measure_seconds(
    sessions: Mapping[str, onnxruntime.InferenceSession], feed: Feed, repetitions: int
) -> Timings:
    """Time sessions in turns, in rounds of `repetitions`, until two rounds agree or `MAX_ROUNDS` are over.

    The first run of each session is not counted.
    """
    for session in sessions.values():
        session.run(None, feed)
    rounds: list[dict[str, float]] = []
    while len(rounds) < MAX_ROUNDS:
        rounds.append(dict.fromkeys(sessions, math.inf))
        for _ in range(repetitions):
            for name, session in sessions.items():
                started = time.perf_counter()
                session.run(None, feed)
                rounds[-1][name] = min(rounds[-1][name], time.perf_counter() - started)
        if len(rounds) > 1 and _agree(rounds[-2], rounds[-1]):
            break
    seconds = {name: min(found[name] for found in rounds) for name in sessions}
    return Timings(seconds, _agree(rounds[-2], rounds[-1]))


def _agree(first: Mapping[str, float], second: Mapping[str, float]) -> bool:
    return all(
        abs(seconds - second[name]) <= MAX_ROUND_DIFFERENCE * min(seconds, second[name])
        for name, seconds in first.items()
    )
