"""Runs a graph with the ONNX Runtime profiler and parses the JSON trace."""

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from attnlens_analysis.profile.parts import Part, parts_of
from attnlens_analysis.structure import read_proto, structure_of

_SUFFIX = "_kernel_time"


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the graph.

    Attributes:
        total_us: Duration in microseconds.
        node_us: Part and duration in microseconds of each node, in execution order.
        largest_bytes: Size of the largest node output of each part.
        peak_bytes: Peak allocator usage above the usage before the run, i.e. without parameters.
    """

    total_us: float
    node_us: tuple[tuple[Part, float], ...]
    largest_bytes: dict[Part, int]
    peak_bytes: int


def trace_runs(
    graph: Path,
    feeds: Sequence[dict[str, npt.NDArray[np.int64]]],
    num_runs: int,
    threads: int,
    progress: Callable[[int], None],
) -> list[list[Run]]:
    """Run a graph `num_runs` times on each feed, after one warm-up run.

    Args:
        graph: Path of the ONNX file.
        feeds: Inputs to run.
        num_runs: Number of timed runs per feed.
        threads: Number of ONNX Runtime threads.
        progress: Called before each run with the number of runs, in units of all runs of a feed.

    Returns:
        The runs of each feed. The first is the warm-up run: its time is not representative, but its memory is
        not yet allocated as one block.
    """
    with TemporaryDirectory() as name:
        directory = Path(name)
        session = _open(graph, directory, threads)
        names = [value.name for value in session.get_inputs()]
        # Feeds take turns, so that a busy second does not affect all runs of one of them.
        for run in range(num_runs + 1):
            for index, feed in enumerate(feeds):
                progress((run * len(feeds) + index) // (num_runs + 1))
                session.run(None, {each: feed[each] for each in names})
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
        structure = structure_of(read_proto(directory / "optimized.onnx"))
    parts_by_name: dict[str, list[Part]] = defaultdict(list)
    for node, part in zip(structure.nodes, parts_of(structure), strict=True):
        parts_by_name[node.name].append(part)
    runs = [_read_run(run, nodes, parts_by_name) for run, nodes in _split(events)]
    return [runs[index :: len(feeds)] for index in range(len(feeds))]


def _open(graph: Path, directory: Path, threads: int) -> ort.InferenceSession:
    """Open a graph with the server's options and profiling, and write the optimized graph to `directory`."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    options.enable_profiling, options.profile_file_prefix = True, str(directory / "trace")
    options.optimized_model_filepath = str(directory / "optimized.onnx")
    # Keep weights out of the file, since protobuf files are limited to 2 GiB.
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights")
    options.add_session_config_entry(
        "session.optimized_model_external_initializers_min_size_in_bytes", "1024"
    )
    return ort.InferenceSession(
        str(graph), options, providers=["CPUExecutionProvider"], disabled_optimizers=["SkipLayerNormFusion"]
    )


def _split(events: list[dict[str, Any]]) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Return the event of each run with the events of its nodes."""
    nodes = [event for event in events if event.get("cat") == "Node" and event["name"].endswith(_SUFFIX)]
    runs = [event for event in events if event.get("name") == "model_run"]
    return [
        (run, [node for node in nodes if run["ts"] <= node["ts"] <= run["ts"] + run["dur"]])
        for run in sorted(runs, key=lambda run: float(run["ts"]))
    ]


def _read_run(run: dict[str, Any], nodes: list[dict[str, Any]], parts_by_name: dict[str, list[Part]]) -> Run:
    times: list[tuple[Part, float]] = []
    largest: dict[Part, int] = defaultdict(int)
    seen = dict.fromkeys(parts_by_name, 0)
    for node in nodes:
        name = node["name"].removesuffix(_SUFFIX)
        part: Part = "rest"
        if name in parts_by_name:
            # Fused nodes of different layers may share a name. They run in graph order.
            part = parts_by_name[name][seen[name] % len(parts_by_name[name])]
            seen[name] += 1
        times.append((part, float(node["dur"])))
        largest[part] = max(largest[part], int(node["args"]["output_size"]))
    used = [int(node["args"]["mem_bytes_requested_in_use"]) for node in nodes]
    before = used[0] - int(nodes[0]["args"]["mem_requested_in_use_delta"])
    peak = max(used) - before
    return Run(float(run["dur"]), tuple(times), dict(largest), max(0, peak))
