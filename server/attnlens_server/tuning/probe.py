"""What an engine makes of texts, and the memory that it takes, measured in a process of its own.

Only in a new process is all memory that is in use this engine's. And an engine that crashes, on a processor
that it was not built for, ends that process alone.
"""

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attnlens.pooling import finish
from attnlens_server.bundle import Bundle
from attnlens_server.config import ConfigError, ServerConfig
from attnlens_server.engine import Item, TokenPooling, Wanted
from attnlens_server.errors import StartupError
from attnlens_server.tuning.memory import resident_bytes
from attnlens_server.tuning.running import running

_PROGRAM = "from attnlens_server.tuning.probe import answer; answer()"


@dataclass(frozen=True, slots=True)
class Probe:
    """What came out.

    Attributes:
        embeddings: of each text, (N, E).
        memory_bytes: what the process had in memory after these texts; None: the system does not tell.
    """

    embeddings: npt.NDArray[np.float32]
    memory_bytes: int | None


def probe_apart(bundle: Bundle, config: ServerConfig, texts: Sequence[npt.NDArray[np.int64]]) -> Probe:
    """Run texts, (T,) int64 each, through an engine in a process that is started for it.

    Raises:
        StartupError: the engine can't run as asked, or has crashed.
    """
    child = subprocess.run(  # noqa: S603 - our own program; no shell reads the arguments
        [sys.executable, "-P", "-c", _PROGRAM],
        input=pickle.dumps((bundle, config, tuple(texts))),
        capture_output=True,
        check=False,
        start_new_session=True,  # Ctrl-C comes to the parent alone, which then ends it
    )
    if child.returncode < 0:
        raise StartupError(
            f"it crashed: signal {-child.returncode} ({signal.Signals(-child.returncode).name})"
        )
    if child.returncode:
        last_line = child.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise StartupError(f"its process ended with exit code {child.returncode}: {last_line}")
    answered: Probe | str = pickle.loads(child.stdout)  # noqa: S301 - our own child wrote it
    if isinstance(answered, str):
        raise StartupError(answered)
    return answered


def answer() -> None:
    """Do what `probe_apart` asks on stdin, and write the answer to stdout: a probe, or why there is none."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as reply:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # for a library that prints
        bundle, config, texts = pickle.load(sys.stdin.buffer)  # noqa: S301 - our own parent wrote it
        try:
            answered: Probe | str = probe(bundle, config, texts)
        except (StartupError, ConfigError) as error:
            answered = str(error)
        pickle.dump(answered, reply)


def probe(bundle: Bundle, config: ServerConfig, texts: Sequence[npt.NDArray[np.int64]]) -> Probe:
    """Run texts, (T,) int64 each, through an engine in this process.

    Raises:
        StartupError: the engine can't run as asked.
        ConfigError: the settings don't fit together.
    """
    with running(bundle, config) as engine:
        items = [embedding_item(bundle, input_ids) for input_ids in texts]
        futures = engine.submit(items, kind="embeddings")
        pooled = np.stack([future.result().arrays[0] for future in futures])  # (N, D)
        return Probe(finish(pooled, bundle.dense, normalize_last=True), resident_bytes())


def embedding_item(bundle: Bundle, input_ids: npt.NDArray[np.int64]) -> Item:
    """Return what the engine gets of a text, (T,) int64, whose embedding is wanted."""
    hidden = bundle.model.outputs.hidden_state("embeddings")
    return Item(input_ids, (Wanted(hidden.name, hidden.layout, TokenPooling(bundle.model.pooling)),))
