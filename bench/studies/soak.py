"""Attacks a server while good clients use it: `python -m bench.studies.soak BUNDLE --minutes 30`.

First each attack runs alone, then all run together, without and with floods of frames, each time with good
clients. A good client compares each response with the one that it received before any other client started.
Only a proxy can limit the memory of floods (docs/threat-model.md), so it is not judged. Requires Linux.
"""

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens_server.access.keys import new_key
from bench.lines import ROOT
from bench.servers import RunningServer, attnlens_server
from bench.studies.hostile import p99
from bench.studies.proxied import Ports, free_ports
from bench.studies.soak_clients import ROLES, Counts, compute_expected, credentials, status_of

PROBE = "one text"
GOOD = ["good, gRPC", "good, HTTP"]
MAX_SLOWDOWN = 5.0
MAX_GROWTH = 1.05
STEADY_MINUTES = 10.0  # shorter runs do not judge the growth of memory
STALL_TIMEOUT_S = 3
MAX_MEMORY_MIB = 1536
MAX_EXCESS = 1.1  # of the peak over the limit
ALONE, EACH, MOST, ALL = 0.04, 0.40, 0.37, 0.15  # shares of the time
FLOODS = {"rapid reset", "PING flood", "PING flood, acknowledgements unread", "SETTINGS flood"}
GRACE_S = 90.0
HELLO = pb.EmbedRequest(inputs=[pb.Input(text="hello")])


@dataclass
class Row:
    """Result of one phase."""

    name: str
    good: Counts = field(default_factory=Counts)
    bad: Counts = field(default_factory=Counts)
    tracebacks: int = 0
    latencies_ms: list[float] = field(default_factory=list)
    statuses: dict[str, Counter[str]] = field(default_factory=dict)
    refused: int = 0
    p99_alone_ms: float = 0.0
    rss_early_mib: float = 0.0
    rss_end_mib: float = 0.0
    rss_peak_mib: float = 0.0
    judges_growth: bool = False
    judges_peak: bool = True

    @property
    def unexpected(self) -> int:
        return self.good.unexpected + self.bad.unexpected

    @property
    def defects(self) -> list[str]:
        """Names of all columns that must be 0 and are not."""
        counted = {
            "wrong": self.good.wrong,
            "lost": self.good.lost,
            "UNKNOWN/INTERNAL": self.unexpected,
            "tracebacks": self.tracebacks,
        }
        return [name for name, number in counted.items() if number]

    @property
    def verdict(self) -> str:
        problems = self.defects
        if self.p99_alone_ms and p99(self.latencies_ms) > MAX_SLOWDOWN * self.p99_alone_ms:
            problems.append("p99")
        if self.refused:
            problems.append(f"{self.refused} refused")
        if self.judges_growth and self.rss_end_mib > MAX_GROWTH * self.rss_early_mib:
            problems.append("RSS")
        if self.judges_peak and self.rss_peak_mib > MAX_EXCESS * MAX_MEMORY_MIB:
            problems.append("peak RSS")
        return "NO: " + ", ".join(problems) if problems else "yes"

    def __str__(self) -> str:
        alone = f"{self.p99_alone_ms:.0f}" if self.p99_alone_ms else ""
        cells = [
            *(
                self.name,
                f"{self.bad.requests:,}",
                f"{self.good.requests:,}",
                self.good.wrong,
                self.good.lost,
            ),
            *(self.unexpected, self.tracebacks),
            *(f"{statistics.median(self.latencies_ms):.0f}", f"{p99(self.latencies_ms):.0f}", alone),
            *(f"{self.rss_early_mib:,.0f}", f"{self.rss_end_mib:,.0f}"),
            *(f"{self.rss_peak_mib:,.0f}", self.verdict),
        ]
        return f"| {' | '.join(map(str, cells))} |"


HEADER = (
    "| attack on one client with one text | attempts | good requests | wrong | lost | UNKNOWN/INTERNAL "
    "| tracebacks | p50 ms | p99 ms | p99 alone | RSS after 1/6, MiB | at the end | peak | verdict |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass
class Soak:
    """A server under attack."""

    server: RunningServer
    ports: Ports
    log: Path
    facts: Path
    key: str
    seed: int

    def phase(self, name: str, roles: dict[str, int], seconds: float) -> Row:
        """Run each role in a number of threads, while a client sends one text at a time."""
        row = Row(name)
        logged = self._tracebacks()
        self.server.forget_peak()
        with ExitStack() as stack:
            processes = {
                role: stack.enter_context(self._role(role, threads, seconds))
                for role, threads in roles.items()
            }
            reader = threading.Thread(target=self._watch_memory, args=[row, seconds])
            reader.start()
            self._probe(row, seconds)
            reader.join()
            for role, process in processes.items():
                counts = collect(process)
                (row.good if role in GOOD else row.bad).add(counts)
                row.statuses[role] = counts.statuses
        row.rss_peak_mib = self.server.peak_rss_mib
        row.tracebacks = self._tracebacks() - logged
        return row

    @contextmanager
    def _role(self, role: str, threads: int, seconds: float) -> Iterator[subprocess.Popen[str]]:
        arguments = [role, f"127.0.0.1:{self.ports.grpc}", f"127.0.0.1:{self.ports.http}", seconds, self.seed]
        arguments += [threads, self.facts]
        command = [sys.executable, "-m", "bench.studies.soak_clients", *map(str, arguments)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield process
            finally:
                process.kill()

    def _probe(self, row: Row, seconds: float) -> None:
        end = time.monotonic() + seconds
        with grpc.insecure_channel(self.server.address) as channel:
            stub = EncoderServiceStub(channel)
            while time.monotonic() < end or len(row.latencies_ms) < 2:
                started = time.perf_counter()
                try:
                    stub.Embed(HELLO, timeout=60, metadata=credentials(self.key))
                except grpc.RpcError as error:
                    row.refused += 1
                    row.good.statuses[status_of(error)] += 1
                row.latencies_ms.append(1e3 * (time.perf_counter() - started))
                time.sleep(0.01)

    def _watch_memory(self, row: Row, seconds: float) -> None:
        time.sleep(seconds / 6)
        row.rss_early_mib = self.server.rss_mib
        time.sleep(seconds * 5 / 6 - 0.1)
        row.rss_end_mib = self.server.rss_mib

    def _tracebacks(self) -> int:
        return self.log.read_text("utf-8").count("Traceback")


def collect(process: subprocess.Popen[str]) -> Counts:
    """Return the counts of a role. If it does not end, its clients are lost."""
    try:
        output, _ = process.communicate(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        return Counts(lost=1)
    if process.returncode != 0:
        raise RuntimeError(f"{process.args!r} failed with code {process.returncode}")
    fields = json.loads(output)
    counts = Counts(fields["requests"], fields["wrong"], fields["lost"])
    counts.statuses.update(fields["statuses"])
    return counts


def soak(bundle: Path, minutes: float, seed: int) -> Iterator[Row]:
    """Attack a new server. Yield a row for each phase."""
    seconds = 60 * minutes
    attacks = {role: threads for role, (_, threads) in ROLES.items() if role not in GOOD}
    one_each = dict.fromkeys(GOOD, 1)
    with tempfile.TemporaryDirectory() as directory:
        ports, log = Ports(*free_ports(3)), Path(directory) / "server.log"
        keys, lines = create_keys([*ROLES, PROBE])
        keys_file = Path(directory) / "keys.txt"
        keys_file.write_text("\n".join(lines), "utf-8")
        options = [*ports.options, "--stall-timeout-s", str(STALL_TIMEOUT_S), "--api-keys", str(keys_file)]
        options += ["--max-memory-bytes", str(MAX_MEMORY_MIB << 20)]
        with attnlens_server(bundle, "fp32", 0, log, *options) as server:
            facts = Path(directory) / "facts.json"
            expected = compute_expected(server.address, keys[PROBE])
            facts.write_text(json.dumps({"expected": expected, "keys": keys}), "utf-8")
            run = Soak(server, ports, log, facts, keys[PROBE], seed)
            alone = run.phase("nothing", {}, ALONE * seconds)
            yield alone
            yield run.phase("two good clients", one_each, ALONE * seconds)
            for name, threads in attacks.items():
                row = run.phase(name, {**one_each, name: threads}, EACH * seconds / len(attacks))
                row.p99_alone_ms = p99(alone.latencies_ms)
                yield row
            everything = {role: threads for role, (_, threads) in ROLES.items()}
            most = {role: threads for role, threads in everything.items() if role not in FLOODS}
            row = run.phase("all but floods of frames", most, MOST * seconds)
            row.judges_growth = minutes >= STEADY_MINUTES
            row.p99_alone_ms = p99(alone.latencies_ms)
            yield row
            row = run.phase("all together", everything, ALL * seconds)
            row.judges_peak = False
            row.p99_alone_ms = p99(alone.latencies_ms)
            yield row


def create_keys(roles: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Return the key of each role, and the lines of the file of keys. Each role is a client of its own."""
    created = {role: new_key(re.sub(r"\W+", "-", role)) for role in roles}
    return {role: key for role, (key, _) in created.items()}, [line for _, line in created.values()]


def report(rows: Iterator[Row], seed: int) -> list[Row]:
    """Print a table and the statuses, and return the rows."""
    print(
        f"{os.cpu_count()} CPUs, seed {seed}, --max-memory-bytes {MAX_MEMORY_MIB} MiB\n{HEADER}", flush=True
    )
    found = []
    for row in rows:
        print(row, flush=True)
        found.append(row)
    print("Statuses when all run together:")
    for role, statuses in found[-1].statuses.items():
        counted = ", ".join(f"{number:,} {status}" for status, number in statuses.most_common())
        print(f"- {role}: {counted or 'none'}")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.studies.soak", description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 16))
    options = parser.parse_args(arguments)
    rows = report(soak(options.bundle, options.minutes, options.seed), options.seed)
    sys.exit(any(row.verdict != "yes" for row in rows))


if __name__ == "__main__":
    main()
