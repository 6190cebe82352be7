"""The targets, computed from the rows of one run."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.cases import MATMUL, Row
from bench.contestants import EAGER, ENGINE
from bench.field import INFINITY, MANY, SERVER


@dataclass(frozen=True, slots=True)
class Target:
    """A figure and what it should be at least.

    Attributes:
        what: what the figure is.
        value: None where a row that it needs is missing.
        at_least: what is enough.
        stretch: what would be better.
        lower_is_better: then `at_least` is a bound from above.
    """

    what: str
    value: float | None
    at_least: float
    stretch: float
    lower_is_better: bool = False

    @property
    def met(self) -> str:
        """`stretch`, `yes`, `no`, or `unknown`."""
        if self.value is None:
            return "unknown"
        sign = -1 if self.lower_is_better else 1
        if sign * self.value >= sign * self.stretch:
            return "stretch"
        return "yes" if sign * self.value >= sign * self.at_least else "no"


class Rows:
    """The rows that were measured."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = [row for row in rows if "tokens_per_s" in row]

    def find(
        self, name: str, precision: str, what: str, workload: str, clients: int | None = None
    ) -> Row | None:
        """Return a row, or None where it was not measured."""
        key = {"name": name, "precision": precision, "what": what, "workload": workload, "clients": clients}
        return next((row for row in self._rows if key.items() <= row.items()), None)

    def ceiling(self) -> Row | None:
        """Return the MatMul that was fastest."""
        ceilings = [row for row in self._rows if row["name"] == MATMUL]
        return max(ceilings, key=lambda row: row["gflop_per_s"]["median"], default=None)

    def best_fp32_peer(self, what: str, workload: str) -> Row | None:
        """Return the fastest in-process in fp32 that is not ours."""
        peers = [
            row
            for row in self._rows
            if (row["what"], row["workload"], row["precision"], row["clients"])
            == (what, workload, "fp32", None)
            and row["name"] != ENGINE
        ]
        return max(peers, key=lambda row: row["tokens_per_s"]["median"], default=None)


def ratio(row: Row | None, other: Row | None, unit: str = "tokens_per_s") -> float | None:
    """Return how many times faster `row` is than `other`: the median over the repetitions.

    The ratio is taken within each repetition, because a disturbance of the machine then slows both. None if a
    row is missing or nothing came back.
    """
    if row is None or other is None:
        return None
    pairs = list(zip(row[unit]["all"], other[unit]["all"], strict=True))
    if not all(another for _, another in pairs):
        return None
    return float(statistics.median(one / another for one, another in pairs))


def targets(rows: Rows, extras: dict[str, Any]) -> list[Target]:
    """Return every target; `extras` has what is measured beside the rows."""
    find = rows.find
    engine = find(ENGINE, "fp32", "embed", "passages")
    int8 = find(ENGINE, "int8", "embed", "passages")
    openvino = find("sentence-transformers OpenVINO", "bf16", "embed", "passages")
    served = find(SERVER, "fp32", "embed", "mixed", MANY)
    short, maps = (find(ENGINE, "fp32", what, "short") for what in ("embed", "attention"))
    served_maps = find(SERVER, "fp32", "attention", "short", MANY)
    eager_maps = find(EAGER, "fp32", "attention", "short")
    return [
        Target("engine fp32, passages, share of ORT's own MatMul rate",
               ratio(engine, rows.ceiling(), "gflop_per_s"), 0.65, 0.80),
        Target("engine fp32 / best fp32 peer at its best setting",
               ratio(engine, rows.best_fp32_peer("embed", "passages")), 1.25, 1.5),
        Target("int8 within the gate / our fp32", ratio(int8, engine), 1.6, 2.2),
        Target("int8 within the gate / sentence-transformers OpenVINO bf16",
               ratio(int8, openvino), 1.1, 1.5),
        Target("server with 64 clients, one text each / in-process engine",
               ratio(served, find(ENGINE, "fp32", "embed", "mixed")), 0.80, 0.92),
        Target("server with 64 clients / Infinity with 64 clients",
               ratio(served, find(INFINITY, "fp32", "embed", "mixed", MANY)), 5, 10),
        Target("all attention maps in-process / embeddings only (texts <= 128 tokens), time",
               ratio(short, maps), 1.15, 1.05, lower_is_better=True),
        Target("attention of every layer over gRPC / transformers eager in-process, texts per second",
               ratio(served_maps, eager_maps, "texts_per_s"), 1.5, 2.5),
        Target("padding share of computed tokens on the mixed workload at 64 clients",
               extras.get("padding_share"), 0.05, 0.02, lower_is_better=True),
        Target("RSS after the soak / after warm-up",
               extras.get("soak", {}).get("rss_ratio"), 1.05, 1.0, lower_is_better=True),
        Target("server start to first answer, s",
               extras.get("start_to_first_answer_s"), 1.5, 0.8, lower_is_better=True),
    ]  # fmt: skip


def as_json(target: Target) -> dict[str, Any]:
    return asdict(target) | {"met": target.met}
