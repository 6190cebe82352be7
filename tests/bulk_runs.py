"""Files of runs, and processes that compute them, for the bulk tests."""

import resource
import signal
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

import attnlens_server
from attnlens_bulk import BulkError, RunOptions, embed_files
from attnlens_client import Client

# The server process imports the packages once; its forks open models.
CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["attnlens_bulk", "attnlens_server.in_process", "pyarrow.parquet"])


def contents(run: Path) -> dict[str, bytes]:
    """Return the files of a run by their names. Locks and temporary files are hidden."""
    files = (path for path in run.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def vectors_of(run: Path) -> npt.NDArray[np.float32]:
    """Return the embeddings (N, D) of a run, in the order of its parts."""
    table = pq.read_table(run / "parts")
    embeddings = table["embedding"].combine_chunks()
    return np.asarray(embeddings.flatten()).reshape(len(table), -1)


def start_run(
    source: Path, output: Path, target: Path | str, options: RunOptions, max_file_bytes: int = 0
) -> tuple[BaseProcess, Connection]:
    """Start a process that runs `embed_files` with a bundle or a server.

    Returns:
        The process, and a connection that receives "ready" when the model is open, then "done" or an error.
    """
    receiving, sending = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_embed, args=(source, output, target, options, max_file_bytes, sending))
    process.start()
    sending.close()
    return process, receiving


def _embed(
    source: Path,
    output: Path,
    target: Path | str,
    options: RunOptions,
    max_file_bytes: int,
    sending: Connection,
) -> None:
    if max_file_bytes:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    model: Any = Client(target) if isinstance(target, str) else attnlens_server.local(target, threads=1)
    with model:
        sending.send("ready")
        if max_file_bytes:
            resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
        try:
            embed_files([str(source)], str(output), [model], options)
        except BulkError as error:
            sending.send(str(error))
        else:
            sending.send("done")
