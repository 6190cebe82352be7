"""Starts the contestants and servers and creates their benchmark cases."""

import re
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.cases import (
    MINILM,
    Case,
    InProcessCase,
    MatMulCase,
    OneByOneCase,
    Reference,
    RowKey,
    ServerCase,
)
from bench.contestants import MAPS, ONE_BY_ONE, OPENVINO, SERVER, Contestant, contestants
from bench.lines import LineProcess, ProcessError
from bench.made.environments import DIRECTORY, ISOLATED, environment_python
from bench.servers import RunningServer, attnlens_server, infinity_server
from bench.setting import Setting

INFINITY = "Infinity server"
OUR_SERVERS = (("onnxruntime", "fp32"), ("openvino", "bf16"), ("onnxruntime", "int8"))
CLIENTS = (1, 16, 64)
MANY = 64  # number of clients in targets and open loops


@dataclass
class Field:
    """Processes and servers measured with one model. They are stopped when `stack` is closed.

    Attributes:
        rows: Regular expression that selects the rows.
        cases: Cases, including failed cases for processes that did not start.
        versions: Package versions by process.
    """

    setting: Setting
    rows: str
    stack: ExitStack
    cases: list[Case] = field(default_factory=list)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)

    def fill(self) -> None:
        """Start all processes and servers and create their cases."""
        self._add_ceiling()
        ours, *others = contestants(self.setting)
        self.engine = self._start(ours.label, sys.executable, ours.module, ours.arguments())
        self.reference = Reference(self.engine)
        self._add_cases(self.engine, ours, self._selected(ours.keys(self.setting)))
        for contestant in others:
            if keys := self._selected(contestant.keys(self.setting)):
                self._add_contestant(contestant, keys)
        if self.setting.model != MINILM:
            return
        self.load = self._start("load generator", sys.executable, "bench.load.generator", ())
        for engine, precision in OUR_SERVERS:
            self._add_server(engine, precision)
        self._add_infinity()

    def _selected(self, keys: Sequence[RowKey]) -> list[RowKey]:
        return [key for key in keys if re.search(self.rows, str(key))]

    def _add_ceiling(self) -> None:
        process = self._start("matmul", sys.executable, "bench.matmul", (self.setting.threads,))
        sizes = self.setting.manifest.architecture
        width, units = sizes.hidden_size, sizes.intermediate_size
        shapes = ((width, width), (width, units), (units, width))
        self.cases += [MatMulCase(process, self.setting.model, 512, k, n) for k, n in shapes]

    def _add_contestant(self, contestant: Contestant, keys: list[RowKey]) -> None:
        try:
            python = environment_python(contestant.environment) if contestant.environment else sys.executable
            process = self._start(contestant.label, python, contestant.module, contestant.arguments())
        except ProcessError as error:
            self.cases += [Case(key, str(error)) for key in keys]
        else:
            self._add_cases(process, contestant, keys)

    def _add_cases(self, process: LineProcess, contestant: Contestant, keys: list[RowKey]) -> None:
        workloads, architecture = self.setting.workloads, self.setting.manifest.architecture
        for key in keys:
            workload = workloads[key.workload]
            self.cases.append(
                OneByOneCase(process, key, workload, architecture, self.reference)
                if key.what == ONE_BY_ONE
                else InProcessCase(process, key, workload, contestant.choices, architecture, self.reference)
            )

    def _add_server(self, engine: str, precision: str) -> None:
        keys = self._selected(server_keys(engine, precision))
        if not keys:
            return
        try:
            server = self.stack.enter_context(self.our_server(engine, precision))
        except ProcessError as error:
            self.cases += [Case(key, str(error)) for key in keys]
        else:
            self.cases += [self.server_case(server, key) for key in keys]

    def our_server(self, engine: str, precision: str) -> AbstractContextManager[RunningServer]:
        """Return a context manager that runs an attnlens server."""
        label, setting = f"{server_name(engine)} {precision}", self.setting
        bundle = setting.int8_bundle if precision == "int8" else setting.bundle
        print(f"Starting {label} ...", file=sys.stderr, flush=True)
        return attnlens_server(bundle, precision, setting.our_threads, log_path(label), "--engine", engine)

    def _add_infinity(self) -> None:
        singles = RowKey(INFINITY, "fp32", "embed", "mixed", MANY)
        bulk = RowKey(INFINITY, "fp32", "embed, 64 texts a request", "mixed", 1)
        keys, setting = self._selected([singles, bulk]), self.setting
        if not keys:
            return
        print(f"Starting {INFINITY} ...", file=sys.stderr, flush=True)
        environment = setting.environment | ISOLATED
        try:
            server = self.stack.enter_context(
                infinity_server(
                    environment_python("infinity"), setting.checkpoint, environment, log_path(INFINITY)
                )
            )
        except ProcessError as error:
            self.cases += [Case(key, str(error)) for key in keys]
            return
        # A round of 64 clients takes seconds, so allow more time to settle than for attnlens.
        slow = {"protocol": "http", "settle_s": 3.0, "seconds": max(setting.seconds, 4.0)}
        self.cases += [
            self.server_case(server, key, texts_per_request=64 if key == bulk else 1, **slow) for key in keys
        ]

    def server_case(self, server: RunningServer, key: RowKey, **options: Any) -> ServerCase:  # noqa: ANN401
        """Return a case for a server."""
        setting = self.setting
        return ServerCase(
            self.load,
            server,
            key,
            setting.workloads[key.workload],
            setting.manifest.architecture,
            self.reference,
            threads=setting.threads,
            **{"seconds": setting.seconds, **options},
        )

    def _start(self, label: str, python: Path | str, module: str, arguments: Sequence[object]) -> LineProcess:
        print(f"Starting {label} ...", file=sys.stderr, flush=True)
        command = [python, "-m", module, *arguments]
        environment = self.setting.environment | ({} if python == sys.executable else ISOLATED)
        process = self.stack.enter_context(LineProcess(command, environment, log_path(label)))
        self.versions[label] = process.hello.get("versions", {})
        return process


def server_name(engine: str) -> str:
    return SERVER + (OPENVINO if engine == "openvino" else "")


def server_keys(engine: str, precision: str) -> list[RowKey]:
    """Return the row keys of a server: all tasks in fp32, embeddings in every precision."""
    name = server_name(engine)
    kinds = (("embed", "mixed"), ("tokens", "mixed"), *MAPS) if precision == "fp32" else (("embed", "mixed"),)
    return [
        *(RowKey(name, precision, *kind, clients) for kind in kinds for clients in CLIENTS),
        RowKey(name, precision, "embed", "passages", MANY),
        RowKey(name, precision, "embed", "sentences", 1),
    ]


def log_path(label: str) -> Path:
    """Return the path of a process's log, which has all output except the responses."""
    return DIRECTORY / "logs" / f"{label.replace(' ', '-')}.log"
