"""Parent side of the process of a runtime: starts it, exchanges tensors, and reports failures."""

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
    """A runtime failed, crashed or timed out. The message is the reason, in one line."""


class GraphProcess:
    """Context manager that opens a graph in the process of a runtime.

    Entering the context and `run` raise RuntimeFailureError on failure. After a failure, the process is
    unusable. The attributes are available after entering the context.

    Attributes:
        directory: Directory of exchanged tensors.
        precision: Precision of the runtime: fp32, bf16 or fp16.
        processor: Processor name, or "" if the runtime does not report it.
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
        """Run the graph and return all outputs.

        Raises:
            RuntimeFailureError: The runtime failed, crashed or timed out.
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
                cwd=self.directory,  # some runtimes write to the working directory
                start_new_session=True,  # so that compilers started by the runtime are killed, too
            )

    def _kill(self) -> None:
        # The process group may have exited already.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def _send(self, content: dict[str, tuple[str | int, ...]]) -> None:
        assert self._process.stdin is not None  # noqa: S101 - is a pipe
        try:
            self._process.stdin.write(json.dumps(content).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise RuntimeFailureError(self._exit_reason()) from error

    def _receive(self) -> dict[str, Any]:
        line = self._read_line()
        if not line.endswith(b"\n"):
            raise RuntimeFailureError(self._exit_reason())
        try:
            content: dict[str, Any] = json.loads(line)
        except ValueError as error:
            # A library printed to stdout, or the program is not a worker.
            text = " ".join(line.decode(errors="replace").split())
            raise RuntimeFailureError(_shortened(f"printed instead of a response: {text}")) from error
        if "error" in content:
            raise RuntimeFailureError(_shortened(content["error"]))
        return content

    def _read_line(self) -> bytes:
        """Read until the end of a line or of the output."""
        assert self._process.stdout is not None  # noqa: S101 - is a pipe
        deadline = time.monotonic() + self._timeout_s
        line = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise RuntimeFailureError(f"no response in {self._timeout_s:g} s")
                part = os.read(self._process.stdout.fileno(), 65536)
                if not part:
                    break
                line += part
        return bytes(line)

    def _exit_reason(self) -> str:
        try:
            code = self._process.wait(self._timeout_s)
        except subprocess.TimeoutExpired:
            return f"no response in {self._timeout_s:g} s"
        if code < 0:
            return f"crashed: signal {-code} ({signal.Signals(-code).name})"
        lines = (self.directory / "stderr").read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no error message")
        return _shortened(f"exited with code {code}: {last}")


def _shortened(reason: str) -> str:
    return reason if len(reason) <= _MAX_REASON_LENGTH else f"{reason[:_MAX_REASON_LENGTH]}..."
