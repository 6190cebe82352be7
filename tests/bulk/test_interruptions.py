"""Runs that are killed, and disks that are full: the same call continues."""

import os
import random
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import bulk_runs
from attnlens_bulk import OutputError, RunOptions, embed_files
from attnlens_server.in_process import Local
from served import ServerProcess

OPTIONS = RunOptions(rows_per_part=8, keep=("number",), batch_size=4, in_flight=3)
TOKENS = replace(OPTIONS, vectors="tokens")
NUM_PARTS = 24
NUM_ROWS = 8 * NUM_PARTS


@pytest.fixture
def source(tmp_path: Path) -> Path:
    chance = random.Random(1)
    texts = [f"Text {chance.randrange(150)} " + "and more " * chance.randrange(5) for _ in range(NUM_ROWS)]
    path = tmp_path / "texts.parquet"
    pq.write_table(pa.table({"text": texts, "number": range(NUM_ROWS)}), path, row_group_size=50)
    return path


def _kill_repeatedly(
    source: Path, output: Path, target: Path | str, num_kills: int, options: RunOptions = OPTIONS
) -> int:
    """Kill runs at random moments, then complete the run. Return how many kills have interrupted a run."""
    chance, during = random.Random(2), 0
    for _ in range(num_kills):
        process, receiving = bulk_runs.start_run(source, output, target, options)
        assert receiving.recv() == "ready"
        num_parts = _num_parts(output) + chance.randrange(2)  # a run loses the parts that it computes
        while _num_parts(output) < num_parts and process.is_alive():
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.02))
        process.kill()
        process.join()
        during += _num_parts(output) < NUM_PARTS
    process, receiving = bulk_runs.start_run(source, output, target, options)
    assert [receiving.recv(), receiving.recv()] == ["ready", "done"]
    process.join()
    return during


def _num_parts(output: Path) -> int:
    return len(list(output.glob("parts/part-*")))


@pytest.mark.parametrize("options", [OPTIONS, TOKENS], ids=["embeddings", "tokens"])
@pytest.mark.parametrize(
    "num_kills", [pytest.param(3, id="few"), pytest.param(20, id="many", marks=pytest.mark.extended)]
)
def test_killed_runs_have_the_bytes_of_an_uninterrupted_one(
    source: Path, tmp_path: Path, model: Local, minilm_bundle: Path, num_kills: int, options: RunOptions
) -> None:
    embed_files([str(source)], str(tmp_path / "whole"), [model], options)
    during = _kill_repeatedly(source, tmp_path / "killed", minilm_bundle, num_kills, options)
    assert during >= num_kills // 2
    assert bulk_runs.contents(tmp_path / "killed") == bulk_runs.contents(tmp_path / "whole")


def test_killed_runs_through_a_server_have_the_same_rows_in_order(
    source: Path, tmp_path: Path, model: Local, minilm_server: ServerProcess
) -> None:
    embed_files([str(source)], str(tmp_path / "whole"), [model], OPTIONS)
    assert _kill_repeatedly(source, tmp_path / "killed", minilm_server.address, 3) > 0
    killed, whole = (pq.read_table(tmp_path / name / "parts") for name in ("killed", "whole"))
    assert killed.drop_columns("embedding").equals(whole.drop_columns("embedding"))
    assert killed["row"].to_pylist() == list(range(NUM_ROWS))
    difference = bulk_runs.vectors_of(tmp_path / "killed") - bulk_runs.vectors_of(tmp_path / "whole")
    assert np.abs(difference).max() <= 1e-5


def test_files_over_the_size_limit_are_refused_and_the_run_continues(
    source: Path, tmp_path: Path, model: Local, minilm_bundle: Path
) -> None:
    output = tmp_path / "limited"
    embed_files([str(source)], str(tmp_path / "whole"), [model], OPTIONS)
    process, receiving = bulk_runs.start_run(source, output, minilm_bundle, OPTIONS, max_file_bytes=10_000)
    assert receiving.recv() == "ready"
    message = receiving.recv()
    process.join()
    assert message.startswith(f"{output}/parts cannot be written: File too large. Free some space and repeat")
    assert not list(output.rglob(".*.partial"))
    embed_files([str(source)], str(output), [model], OPTIONS)
    assert bulk_runs.contents(output) == bulk_runs.contents(tmp_path / "whole")


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="only root can mount a disk")
def test_full_disk_keeps_finished_parts(source: Path, tmp_path: Path, model: Local) -> None:
    embed_files([str(source)], str(tmp_path / "whole"), [model], OPTIONS)
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=120k", "tmpfs", disk], check=False).returncode:
        pytest.skip("this environment does not permit mounts")
    try:
        with pytest.raises(OutputError, match=r"cannot be written: No space left on device. Free some space"):
            embed_files([str(source)], str(disk / "run"), [model], OPTIONS)
        kept = bulk_runs.contents(disk / "run")
        assert 0 < sum(name.startswith("parts/") for name in kept) < NUM_PARTS
        subprocess.run(["mount", "-o", "remount,size=10m", disk], check=True)
        report = embed_files([str(source)], str(disk / "run"), [model], OPTIONS)
        assert report.num_written < report.num_parts
        assert bulk_runs.contents(disk / "run") == bulk_runs.contents(tmp_path / "whole")
    finally:
        subprocess.run(["umount", disk], check=True)
