"""Written vectors can be read back."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from attnlens_cli.files.text_lines import Line
from attnlens_cli.files.writers import JsonlWriter, NpyWriter

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_json_numbers_round_trip(dtype: type[np.floating], tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).normal(size=(50, 40)).astype(dtype)
    numbers[0, :4] = [0, 1, np.finfo(dtype).smallest_subnormal, np.finfo(dtype).max]
    with (tmp_path / "vectors.jsonl").open("wb") as file:
        writer = JsonlWriter(file, numbers)
        writer.write([Line("text", 1, 0)] * 50, numbers)
        writer.finish()
    lines = (tmp_path / "vectors.jsonl").read_text(encoding="utf-8").splitlines()
    read = np.array([json.loads(line)["embedding"] for line in lines], dtype)
    assert np.array_equal(read, numbers)


def test_npy_file_can_be_written_without_knowing_its_length(tmp_path: Path) -> None:
    rows = np.arange(30_000, dtype=np.float32).reshape(-1, 3)
    with (tmp_path / "vectors.npy").open("wb") as file:
        writer = NpyWriter(file, rows[:0])
        for start in range(0, len(rows), 999):
            writer.write([], rows[start : start + 999])
        writer.finish()
    assert np.array_equal(np.load(tmp_path / "vectors.npy", mmap_mode="r"), rows)
