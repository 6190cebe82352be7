"""Compares attacks on a server with and without HAProxy: `python -m bench.studies.proxied BUNDLE`.

During each attack, a client sends one text at a time. HAProxy runs with deploy/haproxy.cfg. Requires Linux
and the Debian package haproxy.
"""

import argparse
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from bench.lines import ROOT
from bench.servers import RunningServer, attnlens_server, running
from bench.studies.attackers import ATTACKS, attacking
from bench.studies.hostile import p99

CONFIG = ROOT / "deploy" / "haproxy.cfg"
LOG = Path(tempfile.gettempdir()) / "attnlens-proxied.log"
PAUSE_S = 0.01
HELLO = pb.EmbedRequest(inputs=[pb.Input(text="hello")])


@dataclass(frozen=True)
class Ports:
    """Ports of a server behind a proxy, on 127.0.0.1."""

    grpc: int
    http: int
    operations: int

    @property
    def options(self) -> list[str]:
        """Options of `attnlens serve`."""
        return f"--port {self.grpc} --http-port {self.http} --metrics-port {self.operations}".split()


@dataclass(frozen=True)
class Proxy:
    """A running HAProxy.

    Attributes:
        address: Address without TLS.
        tls_address: Address with TLS.
        process: Memory and CPU time.
    """

    address: str
    tls_address: str
    process: RunningServer


def free_ports(count: int) -> list[int]:
    """Return ports that no process listens on."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@contextmanager
def haproxy(
    ports: Ports,
    certificate: Path | None,
    log: Path,
    environment: Mapping[str, str] | None = None,
    others: Sequence[Ports] = (),
) -> Iterator[Proxy]:
    """Run HAProxy with deploy/haproxy.cfg, in which only ports and paths are replaced.

    Args:
        ports: Ports of the server.
        certificate: Private key and certificates in PEM format. Without it, TLS is left out.
        log: File for its log. Its folder contains `attnlens-keys.map` if the environment enables tokens.
        environment: Additional environment variables.
        others: Ports of further servers, for which the `server` lines are repeated.
    """
    plain, tls = free_ports(2)
    replaced = {
        "127.0.0.1:8000": f"127.0.0.1:{plain}",
        ":443 ssl crt /etc/haproxy/attnlens.pem": f"127.0.0.1:{tls} ssl crt {certificate}",
        "/etc/haproxy/attnlens-keys.map": str(log.with_name("attnlens-keys.map")),
    }
    content = CONFIG.read_text("utf-8")
    for old, new in replaced.items():
        assert old in content, old
        content = content.replace(old, new)
    content = re.sub(r"(?m)^ +server local .*\n", partial(_server_lines, [ports, *others]), content)
    if certificate is None:
        content = re.sub(r"(?m)^ +bind .* ssl .*\n", "", content)
    config = log.with_suffix(".cfg")
    config.write_text(content, "utf-8")
    program = find_haproxy()
    if program is None:
        raise FileNotFoundError("haproxy is not installed: run `apt-get install haproxy` on Debian")
    with running([program, "-f", str(config)], environment or {}, log, subprocess.DEVNULL) as process:
        address = f"127.0.0.1:{plain}"
        wait_until_listening(address, process)
        yield Proxy(address, f"127.0.0.1:{tls}", RunningServer(address, process.pid))


def _server_lines(servers: Sequence[Ports], line: re.Match[str]) -> str:
    """Return the line of a server for each of several ones."""
    lines = []
    for number, ports in enumerate(servers):
        replaced = {
            "local": f"local{number}",
            "127.0.0.1:50051": f"127.0.0.1:{ports.grpc}",
            "127.0.0.1:8080": f"127.0.0.1:{ports.http}",
            "port 9090": f"port {ports.operations}",
        }
        text = line[0]
        for old, new in replaced.items():
            text = text.replace(old, new)
        lines.append(text)
    return "".join(lines)


def find_haproxy() -> str | None:
    """Return the path of HAProxy, which Debian installs outside the PATH of ordinary users."""
    return shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin")


def wait_until_listening(address: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until a process accepts connections. Raises RuntimeError if it has exited."""
    host, port = address.rsplit(":", 1)
    while process.poll() is None:
        try:
            socket.create_connection((host, int(port))).close()
        except ConnectionRefusedError:
            time.sleep(0.02)
        else:
            return
    raise RuntimeError(f"{process.args!r} exited with code {process.returncode}")


def latencies(address: str, seconds: float) -> list[float]:
    """Embed one text again and again, and return the latencies in seconds. Raises RpcError on any failure."""
    times: list[float] = []
    end = time.monotonic() + seconds
    with grpc.insecure_channel(address) as channel:
        stub = EncoderServiceStub(channel)
        while time.monotonic() < end or len(times) < 2:
            started = time.perf_counter()
            stub.Embed(HELLO, timeout=30)
            times.append(time.perf_counter() - started)
            time.sleep(PAUSE_S)
    return times


def measure(bundle: Path, name: str, seconds: float, *, through_proxy: bool) -> str:
    """Attack a new server and return a row of the table."""
    ports = Ports(*free_ports(3))
    with (
        attnlens_server(bundle, "fp32", 0, LOG, *ports.options) as server,
        haproxy(ports, None, LOG.with_name("haproxy.log")) as proxy,
    ):
        address = proxy.address if through_proxy else server.address
        latencies(address, 1)
        alone = p99(latencies(address, seconds))
        server.forget_peak()
        used = (server.cpu_s, proxy.process.cpu_s)
        with attacking(name, address, seconds + 2):
            time.sleep(1)
            beside = latencies(address, seconds)
        used = (server.cpu_s - used[0], proxy.process.cpu_s - used[1])
        return " | ".join(
            (
                f"| {name}",
                "proxy" if through_proxy else "direct",
                f"{1e3 * alone:.0f} ms",
                f"{1e3 * statistics.median(beside):.0f} ms",
                f"{1e3 * p99(beside):.0f} ms",
                f"{used[0]:.1f} s",
                f"{used[1]:.1f} s" if through_proxy else "",
                f"{server.peak_rss_mib:,.0f} MiB |",
            )
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.studies.proxied", description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--seconds", type=float, default=10.0, help="Duration of each measurement.")
    parser.add_argument("--rows", default="", help=f"Regular expression of attacks: {', '.join(ATTACKS)}")
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} CPUs, {arguments.seconds:g} s for each attack")
    print("| attack | path | p99 alone | p50 | p99 | CPU, server | CPU, HAProxy | peak RSS, server |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for name in ATTACKS:
        for through_proxy in (False, True):
            if re.search(arguments.rows, name):
                print(measure(arguments.bundle, name, arguments.seconds, through_proxy=through_proxy))
                sys.stdout.flush()


if __name__ == "__main__":
    main()
