"""Embeddings and memory of an engine, measured in a separate process.

All memory of the process then belongs to the engine, and an engine that crashes, for example because of an
unsupported processor, does not end the benchmark.
"""

import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from attnlens.pooling import finish
from attnlens_server.bundle import Bundle
from attnlens_server.config import ConfigError, ServerConfig
from attnlens_server.engine import Item, RequestedOutput, TokenPooling
from attnlens_server.errors import StartupError
from attnlens_server.tuning.throughput import running

_PROGRAM = "from attnlens_server.tuning.probe import main; main()"
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, slots=True)
class Probe:
    """Result of a probe.

    Attributes:
        embeddings: (N, E), one for each text. For a classifier, the logits (C, N) of each label.
        memory_bytes: Resident memory of the process after computing them. None on systems other than Linux.
    """

    embeddings: npt.NDArray[np.float32]
    memory_bytes: int | None


def probe_in_subprocess(
    bundle: Bundle, config: ServerConfig, texts: Sequence[npt.NDArray[np.int64]]
) -> Probe:
    """Embed texts, (T,) int64 each, in a new process.

    Raises:
        StartupError: The engine cannot run with this configuration, or crashed.
    """
    child = subprocess.run(  # noqa: S603 - runs this module, without a shell
        [sys.executable, "-P", "-c", _PROGRAM],
        input=pickle.dumps((bundle, config, tuple(texts))),
        capture_output=True,
        check=False,
        start_new_session=True,  # Only the parent receives Ctrl-C. It then ends the child.
    )
    if child.returncode < 0:
        raise StartupError(
            f"it crashed: signal {-child.returncode} ({signal.Signals(-child.returncode).name})"
        )
    if child.returncode:
        last_line = child.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise StartupError(f"its process ended with exit code {child.returncode}: {last_line}")
    result: Probe | str = pickle.loads(child.stdout)  # noqa: S301 - written by the child process
    if isinstance(result, str):
        raise StartupError(result)
    return result


def main() -> None:
    """Read the arguments of `probe` from stdin, and write its result or error message to stdout."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as output:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Libraries may print.
        bundle, config, texts = pickle.load(sys.stdin.buffer)  # noqa: S301 - written by the parent process
        try:
            result: Probe | str = probe(bundle, config, texts)
        except (StartupError, ConfigError) as error:
            result = str(error)
        pickle.dump(result, output)


def probe(bundle: Bundle, config: ServerConfig, texts: Sequence[npt.NDArray[np.int64]]) -> Probe:
    """Embed texts, (T,) int64 each, in this process.

    Raises:
        StartupError: The engine cannot run with this configuration.
        ConfigError: The configuration is inconsistent.
    """
    with running(bundle, config) as engine:
        items = [Item(input_ids, main_output(bundle)) for input_ids in texts]
        futures = engine.submit(items, kind=bundle.model.main_kind)
        vectors = np.stack([future.result().arrays[0] for future in futures])  # (N, D) or (N, C)
        if bundle.model.classifier is None:
            vectors = finish(vectors, bundle.dense, normalize_last=True)
        else:
            vectors = vectors.T  # one vector per label, since a single logit has no direction
        return Probe(vectors, _resident_bytes())


def main_output(bundle: Bundle) -> tuple[RequestedOutput]:
    """Return the output of the engine for embeddings, pooled token vectors, or for logits."""
    if (logits := bundle.model.outputs.logits) is not None:
        return (RequestedOutput(logits.name, logits.layout),)
    hidden = bundle.model.outputs.hidden_state("embeddings")
    return (RequestedOutput(hidden.name, hidden.layout, TokenPooling(bundle.model.pooling)),)


def _resident_bytes() -> int | None:
    if not _STATUS.exists():
        return None
    match = re.search(r"^VmRSS:\s*([0-9]+) kB$", _STATUS.read_text(encoding="ascii"), re.MULTILINE)
    return None if match is None else 1024 * int(match[1])
