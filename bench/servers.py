"""Server processes: start, resource usage and shutdown."""

import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from attnlens_client import Client
from bench.lines import ROOT, ProcessError

START_S = 120.0
MIB = 1 << 20


@dataclass(frozen=True)
class RunningServer:
    """A server process that is ready."""

    address: str
    pid: int

    @property
    def rss_mib(self) -> float:
        """Resident memory, in MiB."""
        return self._status_mib("VmRSS")

    @property
    def peak_rss_mib(self) -> float:
        """Peak resident memory since `forget_peak`, in MiB."""
        return self._status_mib("VmHWM")

    def forget_peak(self) -> None:
        """Reset `peak_rss_mib` to the current resident memory."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")  # proc(5)

    @property
    def cpu_s(self) -> float:
        """CPU time used so far, in seconds."""
        return _cpu_s(Path(f"/proc/{self.pid}/stat"))

    @property
    def loop_cpu_s(self) -> float:
        """The processor time of its main thread, where the event loop is."""
        return _cpu_s(Path(f"/proc/{self.pid}/task/{self.pid}/stat"))

    def _status_mib(self, name: str) -> float:
        found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text())
        assert found is not None
        return int(found[1]) / 1024


def _cpu_s(path: Path) -> float:
    fields = path.read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def attnlens_server(
    bundle: Path, precision: str, threads: int, log: Path, *args: str
) -> Iterator[RunningServer]:
    """Run `attnlens serve`. With `threads=0`, the server chooses the number of threads."""
    command = [sys.executable, "-m", "attnlens_cli.main", "serve", str(bundle), "--port", "0"]
    command += ["--precision", precision, "--threads", str(threads), *args]
    with running(command, {}, log) as process:
        assert process.stdout is not None
        ready = re.search(r" is ready at (\S+): ", process.stdout.readline().decode())
        if ready is None:
            raise ProcessError(f"the server did not start: {log.read_text(encoding='utf-8')[-300:].strip()}")
        yield RunningServer(ready[1], process.pid)


@contextmanager
def infinity_server(
    python: Path, checkpoint: Path, environment: Mapping[str, str], log: Path
) -> Iterator[RunningServer]:
    """Run an Infinity server with PyTorch and default settings."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(python.with_name("infinity_emb")), "v2", "--model-id", str(checkpoint)]
    command += ["--served-model-name", "bundle", "--engine", "torch", "--device", "cpu"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "error", "--no-model-warmup"]
    offline = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    with running(command, {**environment, **offline}, log, stdout=subprocess.DEVNULL) as process:
        wait_until_healthy(f"http://127.0.0.1:{port}/health", process, log)
        yield RunningServer(f"127.0.0.1:{port}", process.pid)


@contextmanager
def running(
    command: Sequence[str], environment: Mapping[str, str], log: Path, stdout: int = subprocess.PIPE
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process for the duration of the block, with stderr redirected to a log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **environment}, stdout=stdout, stderr=stderr
        ) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a server responds.

    Raises:
        ProcessError: If the process exits or START_S passes.
    """
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    raise ProcessError(f"not healthy within {START_S:g} s: {log.read_text(encoding='utf-8')[-300:].strip()}")


def time_to_first_response(bundle: Path, threads: int, log: Path) -> float:
    """Return the time to start a server and embed one text, in seconds."""
    started = time.perf_counter()
    with attnlens_server(bundle, "fp32", threads, log) as server, Client(server.address) as client:
        client.embed(["How long does it take?"])
        return time.perf_counter() - started
