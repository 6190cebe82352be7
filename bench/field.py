"""Starts the processes and servers, one by one, and makes the cases that measure them."""

import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.cases import Case, InProcessCase, MatMulCase, RowKey, ServerCase
from bench.contestants import EMBED, MAPS, Contestant, contestants
from bench.environments import ALONE, DIRECTORY, python_of
from bench.lines import LineProcess, ProcessError
from bench.servers import RunningServer, attnlens_server, infinity_server
from bench.setting import Setting

SERVER, INFINITY = "attnlens server", "Infinity server"
SERVED = (("embed", "mixed"), ("tokens", "mixed"), *MAPS)
CLIENTS = (1, 16, 64)
MANY = 64  # the clients of targets and of open loops
SAMPLE = 24  # texts of two workloads whose vectors are compared with ours


@dataclass
class Field:
    """All processes and servers that take part; leaving `stack` ends them.

    Attributes:
        rows: a regular expression for the rows that are wanted.
        cases: the rows; the cases of a process that did not start have failed.
        versions: the versions of the packages that matter, by process.
        agreement: how near the vectors of a process are to those of our engine in fp32.
    """

    setting: Setting
    rows: str
    stack: ExitStack
    cases: list[Case] = field(default_factory=list)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    agreement: dict[str, dict[str, float]] = field(default_factory=dict)

    def fill(self) -> None:
        """Start all of them."""
        self._add_ceiling()
        ours, *others = contestants(self.setting)
        self.engine = self._start(ours.label, sys.executable, ours.module, ours.arguments)
        self._add_cases(ours, self.engine, self._wanted(ours.keys()))
        for contestant in others:
            if wanted := self._wanted(contestant.keys()):
                self._add_contestant(contestant, wanted)
        self.load = self._start("load generator", sys.executable, "bench.load.generator", ())
        self._add_server("fp32", SERVED)
        self._add_server("int8", SERVED[:1])
        self._add_infinity()

    def _wanted(self, keys: Sequence[RowKey]) -> list[RowKey]:
        return [key for key in keys if re.search(self.rows, str(key))]

    def _add_ceiling(self) -> None:
        process = self._start("matmul", sys.executable, "bench.matmul", (self.setting.threads,))
        sizes = self.setting.manifest.architecture
        width, units = sizes.hidden_size, sizes.intermediate_size
        shapes = ((width, width), (width, units), (units, width))
        self.cases += [MatMulCase(process, 512, k, n) for k, n in shapes]

    def _add_contestant(self, contestant: Contestant, keys: list[RowKey]) -> None:
        try:
            python = python_of(contestant.environment) if contestant.environment else sys.executable
            process = self._start(contestant.label, python, contestant.module, contestant.arguments)
            if contestant.rows == EMBED:
                self.agreement[contestant.label] = self._compare(process)
        except ProcessError as error:
            self.cases += [Case(key, str(error)) for key in keys]
        else:
            self._add_cases(contestant, process, keys)

    def _add_cases(self, contestant: Contestant, process: LineProcess, keys: list[RowKey]) -> None:
        workloads, architecture = self.setting.workloads, self.setting.manifest.architecture
        self.cases += [
            InProcessCase(process, key, workloads[key.workload], contestant.batch_sizes, architecture)
            for key in keys
        ]

    def _add_server(self, precision: str, rows: tuple[tuple[str, str], ...]) -> None:
        keys = self._wanted(
            [RowKey(SERVER, precision, *row, clients) for row in rows for clients in CLIENTS]
            + ([RowKey(SERVER, precision, "embed", "passages", MANY)])
        )
        if not keys:
            return
        label, setting = f"{SERVER} {precision}", self.setting
        bundle = setting.int8_bundle if precision == "int8" else setting.bundle
        print(f"Starting {label} ...", file=sys.stderr, flush=True)
        try:
            server = self.stack.enter_context(
                attnlens_server(bundle, precision, setting.our_threads, log_of(label))
            )
        except ProcessError as error:
            self.cases += [Case(key, str(error)) for key in keys]
        else:
            self.cases += [self._server_case(server, key) for key in keys]

    def _add_infinity(self) -> None:
        singles = RowKey(INFINITY, "fp32", "embed", "mixed", MANY)
        bulk = RowKey(INFINITY, "fp32", "embed, 64 texts a request", "mixed", 1)
        keys, setting = self._wanted([singles, bulk]), self.setting
        if not keys:
            return
        print(f"Starting {INFINITY} ...", file=sys.stderr, flush=True)
        environment = setting.environment | ALONE
        try:
            server = self.stack.enter_context(
                infinity_server(python_of("infinity"), setting.checkpoint, environment, log_of(INFINITY))
            )
        except ProcessError as error:
            self.cases += [Case(key, str(error)) for key in keys]
            return
        # One round of 64 clients takes seconds: counting starts later than for our server.
        slow = {"protocol": "http", "settle_s": 3.0, "seconds": max(setting.seconds, 4.0)}
        self.cases += [
            self._server_case(server, key, texts_per_request=64 if key == bulk else 1, **slow) for key in keys
        ]

    def _server_case(self, server: RunningServer, key: RowKey, **options: Any) -> ServerCase:  # noqa: ANN401
        setting = self.setting
        return ServerCase(
            self.load,
            server,
            key,
            setting.workloads[key.workload],
            setting.manifest.architecture,
            threads=setting.threads,
            **{"seconds": setting.seconds, **options},
        )

    def _start(self, label: str, python: Path | str, module: str, arguments: Sequence[object]) -> LineProcess:
        print(f"Starting {label} ...", file=sys.stderr, flush=True)
        command = [python, "-m", module, *arguments]
        environment = self.setting.environment | ({} if python == sys.executable else ALONE)
        process = self.stack.enter_context(LineProcess(command, environment, log_of(label)))
        self.versions[label] = process.hello.get("versions", {})
        return process

    def _compare(self, process: LineProcess) -> dict[str, float]:
        """Return the mean and the smallest cosine between a process's vectors and our engine's."""
        workloads = self.setting.workloads
        texts = workloads["mixed"].texts[:SAMPLE] + workloads["passages"].texts[:SAMPLE]
        request = {"texts": texts, "what": "embed", "batch_size": 8, "return_vectors": True}
        vectors = np.array(process.ask(**request)["vectors"])
        ours = np.array(self.engine.ask(**request)["vectors"])
        cosines = (vectors * ours).sum(1) / np.linalg.norm(vectors, axis=1) / np.linalg.norm(ours, axis=1)
        return {"mean_cosine": float(cosines.mean()), "min_cosine": float(cosines.min())}


def log_of(label: str) -> Path:
    """Return the log of a process: everything that it prints except its answers."""
    return DIRECTORY / "logs" / f"{label.replace(' ', '-')}.log"
