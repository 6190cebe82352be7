"""Errors of a runtime process are reported in one line."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from attnlens_runtimes import GraphProcess, RuntimeFailureError
from attnlens_runtimes.runtime import Feed
from runtimes.stand_in import LENGTH, stand_in


def feed(length: int) -> Feed:
    ones = np.ones((2, length), dtype=np.int64)
    return {"input_ids": 5 * ones, "attention_mask": ones, "token_type_ids": 0 * ones}


@pytest.fixture
def graph(tiny_bundle: Path) -> Path:
    return tiny_bundle / "onnx" / "model_attentions.onnx"


def is_running(pid: int) -> bool:
    """Whether a process is there and not killed: that is there until its new parent has noticed."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.split()[2] not in "ZX"


def test_process_runs_one_input_after_another(graph: Path) -> None:
    with GraphProcess(stand_in("works"), graph, timeout_s=60) as process:
        for length in (3, LENGTH, 1):
            shapes = [output.shape for output in process.run(feed(length))]
            assert shapes == [(2, length, 48), *[(2, 4, length, length)] * 2]


@pytest.mark.parametrize(
    ("behavior", "reason"),
    [
        ("crashes", r"crashed: signal 11 \(SIGSEGV\)"),
        ("exits", "exited with code 1: out of luck"),
        ("refuses an input", "RuntimeError: 33 is no good"),
    ],
)
def test_failure_of_the_runtime_is_reported(graph: Path, behavior: str, reason: str) -> None:
    with GraphProcess(stand_in(behavior), graph, timeout_s=60) as process:
        process.run(feed(5))
        with pytest.raises(RuntimeFailureError, match=reason):
            process.run(feed(LENGTH))
        with pytest.raises(RuntimeFailureError, match=r"crashed|exited with code"):
            process.run(feed(5))  # it is not there any more


def test_graph_that_is_rejected_is_never_open(graph: Path) -> None:
    refused = GraphProcess(stand_in("refuses the graph"), graph, timeout_s=60)
    with pytest.raises(RuntimeFailureError, match="NotImplementedError: operator Erf"), refused:
        pytest.fail("it is open")


def test_invalid_response_is_quoted(graph: Path) -> None:
    with (
        GraphProcess(stand_in("prints"), graph, timeout_s=60) as process,
        pytest.raises(RuntimeFailureError, match="printed instead of a response: a remark"),
    ):
        process.run(feed(LENGTH))


def test_silence_ends_with_the_time_limit_and_leaves_no_process(graph: Path) -> None:
    child = 0
    try:
        with GraphProcess(stand_in("hangs"), graph, timeout_s=3) as process:
            directory = process.directory
            try:
                with pytest.raises(RuntimeFailureError, match="no response in 3 s"):
                    process.run(feed(LENGTH))
            finally:
                child = int((directory / "child").read_text())
            assert is_running(child)
        assert not directory.exists()
        end = time.monotonic() + 10  # a signal takes effect when the process is scheduled
        while is_running(child) and time.monotonic() < end:
            time.sleep(0.01)
        assert not is_running(child)
    finally:
        if child and is_running(child):
            os.kill(child, signal.SIGKILL)
