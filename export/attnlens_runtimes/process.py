"""The parent's side: a runtime's process, its answers, and what can go wrong with it."""

import json
import math
import os
import selectors
import signal
import subprocess
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from attnlens_runtimes.runtime import FP32, STORED, Feed, Installed

_MAX_REASON_LENGTH = 300


class RuntimeFailureError(Exception):
    """A runtime did not answer; the message is its own reason, on one line."""


class GraphProcess:
    """One graph, open in the process of one runtime for the time of a `with` block.

    Opening may raise RuntimeFailureError, like `run`. After that the process is of no more use.

    Attributes:
        directory: where tensors are exchanged, once it is open.
        precision: what the runtime computes in, once it is open: fp32, bf16 or fp16.
        processor: where, once it is open: the processor's own name; empty where the runtime does not tell it.
    """

    def __init__(self, runtime: Installed, graph: Path, timeout_s: float) -> None:
        self._runtime = runtime
        self._graph = graph
        self._timeout_s = timeout_s

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            exchange = stack.enter_context(tempfile.TemporaryDirectory(prefix="attnlens-runtime-"))
            self.directory = Path(exchange)
            self._process = self._start()
            stack.callback(self._kill)
            opened = self._receive()
            self.precision = str(opened.get("precision", FP32))
            self.processor = str(opened.get("processor", ""))
            self._resources = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    def run(self, feed: Feed) -> list[npt.NDArray[np.float32]]:
        """Return every output of the graph.

        Raises:
            RuntimeFailureError: the runtime refused, crashed, or did not answer in time.
        """
        for name, array in feed.items():
            array.astype(STORED[array.dtype.name], copy=False).tofile(self.directory / f"{name}.bin")
        self._send({name: (array.dtype.name, *array.shape) for name, array in feed.items()})
        shapes = self._receive()["outputs"]
        return [
            np.fromfile(self.directory / f"{index}.bin", "<f4", math.prod(shape)).reshape(shape)
            for index, shape in enumerate(shapes)
        ]

    def _start(self) -> subprocess.Popen[bytes]:
        with (self.directory / "stderr").open("wb") as stderr:
            return subprocess.Popen(  # noqa: S603 - our own worker
                [*self._runtime.command, str(self._graph.resolve()), str(self.directory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=self.directory,  # some write files where they are
                start_new_session=True,  # so that a compiler which it starts ends with it
            )

    def _kill(self) -> None:
        # It, and all that it started, may have ended already.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def _send(self, content: dict[str, tuple[str | int, ...]]) -> None:
        assert self._process.stdin is not None  # noqa: S101 - a pipe was requested
        try:
            self._process.stdin.write(json.dumps(content).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise RuntimeFailureError(self._why_it_ended()) from error

    def _receive(self) -> dict[str, Any]:
        line = self._read_line()
        if not line.endswith(b"\n"):
            raise RuntimeFailureError(self._why_it_ended())
        try:
            content: dict[str, Any] = json.loads(line)
        except ValueError as error:
            # A library that prints past the worker, or a program that is no worker.
            text = " ".join(line.decode(errors="replace").split())
            raise RuntimeFailureError(_shortened(f"printed instead of an answer: {text}")) from error
        if "error" in content:
            raise RuntimeFailureError(_shortened(content["error"]))
        return content

    def _read_line(self) -> bytes:
        """Read up to the end of a line, or of the process's output."""
        assert self._process.stdout is not None  # noqa: S101 - a pipe was requested
        deadline = time.monotonic() + self._timeout_s
        line = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise RuntimeFailureError(f"no answer in {self._timeout_s:g} s")
                part = os.read(self._process.stdout.fileno(), 65536)
                if not part:
                    break
                line += part
        return bytes(line)

    def _why_it_ended(self) -> str:
        try:
            code = self._process.wait(self._timeout_s)
        except subprocess.TimeoutExpired:
            return f"no answer in {self._timeout_s:g} s"
        if code < 0:
            return f"crashed: signal {-code} ({signal.Signals(-code).name})"
        lines = (self.directory / "stderr").read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        return _shortened(f"ended with exit code {code}: {last}")


def _shortened(reason: str) -> str:
    return reason if len(reason) <= _MAX_REASON_LENGTH else f"{reason[:_MAX_REASON_LENGTH]}..."
