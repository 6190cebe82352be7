"""Performance targets, computed from the rows of one run."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.accuracy import FP32, INT8, NEAR_LOSSLESS, STRICT_INT8, Tier, in_tier, of_row, tier_of
from bench.cases import MATMUL, MINILM, Row, RowKey
from bench.contestants import (
    COMPILED,
    CTRANSLATE2,
    EAGER,
    ENGINE,
    GENAI,
    ONE_BY_ONE,
    OPENVINO,
    SERVER,
    STRICT,
)
from bench.field import INFINITY, MANY
from bench.setting import BASE


@dataclass(frozen=True, slots=True)
class Target:
    """A metric with a required and a desired bound.

    Attributes:
        what: Description of the metric.
        value: Value of the metric. None if a required row is missing or not accurate enough.
        at_least: Required bound.
        stretch: Desired bound, if any.
        lower_is_better: Whether the bounds are upper bounds.
    """

    what: str
    value: float | None
    at_least: float
    stretch: float | None
    lower_is_better: bool = False

    @property
    def met(self) -> str:
        """`stretch`, `yes`, `no`, or `unknown`."""
        if self.value is None:
            return "unknown"
        sign = -1 if self.lower_is_better else 1
        if self.stretch is not None and sign * self.value >= sign * self.stretch:
            return "stretch"
        return "yes" if sign * self.value >= sign * self.at_least else "no"


class Rows:
    """Lookup of successfully measured rows."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = [row for row in rows if "tokens_per_s" in row]

    def find(
        self,
        name: str,
        precision: str,
        what: str,
        workload: str,
        clients: int | None = None,
        model: str = MINILM,
    ) -> Row | None:
        """Return the row with the given key, or None if it was not measured."""
        key = asdict(RowKey(name, precision, what, workload, clients, model))
        return next((row for row in self._rows if key.items() <= row.items()), None)

    def ceiling(self, model: str = MINILM) -> Row | None:
        """Return the fastest MatMul row of a model."""
        ceilings = [row for row in self._rows if (row["name"], row["model"]) == (MATMUL, model)]
        return max(ceilings, key=lambda row: row["gflop_per_s"]["median"], default=None)

    def embedding(self, workload: str, model: str = MINILM) -> list[Row]:
        """Return the in-process embedding rows of a workload."""
        key = ("embed", workload, None, model)
        return [
            row for row in self._rows if (row["what"], row["workload"], row["clients"], row["model"]) == key
        ]

    def ours(self, precision: str, tier: Tier, model: str = MINILM) -> Row | None:
        """Return the fastest attnlens engine on passages that meets the thresholds of `tier`.

        Args:
            precision: Precision of the rows. If empty, any.
            tier: Required accuracy tier.
            model: Model of the rows.
        """
        rows = [
            row
            for row in self.embedding("passages", model)
            if is_ours(row) and precision in ("", row["precision"])
        ]
        return fastest(in_tier(rows, tier))

    def best_peer(self, row: Row) -> Row | None:
        """Return the fastest in-process peer on the same workload that is at least in the tier of `row`."""
        accuracy = of_row(row)
        if accuracy is None:
            return None
        peers = [peer for peer in self.embedding(row["workload"], row["model"]) if not is_ours(peer)]
        return fastest(in_tier(peers, tier_of(accuracy)))


def is_ours(row: Row) -> bool:
    """Return whether a row belongs to attnlens."""
    return str(row["name"]).startswith("attnlens")


def fastest(rows: Sequence[Row]) -> Row | None:
    """Return the row with the highest median tokens per second."""
    return max(rows, key=lambda row: row["tokens_per_s"]["median"], default=None)


def ratio(row: Row | None, other: Row | None, unit: str = "tokens_per_s") -> float | None:
    """Return the speed of `row` relative to `other`, as the median over the repetitions.

    Ratios are computed within each repetition so that machine noise affects both rows. Returns None if a row
    is missing or `other` has a rate of zero.
    """
    if row is None or other is None:
        return None
    pairs = list(zip(row[unit]["all"], other[unit]["all"], strict=True))
    if not all(denominator for _, denominator in pairs):
        return None
    return float(statistics.median(numerator / denominator for numerator, denominator in pairs))


def latency_ratio(row: Row | None, other: Row | None) -> float | None:
    """Return the median latency of `row` relative to `other`."""
    if row is None or other is None or not row["latency_ms"] or not other["latency_ms"]:
        return None
    return float(row["latency_ms"]["p50"] / other["latency_ms"]["p50"])


def targets(rows: Rows, extras: dict[str, Any]) -> list[Target]:
    """Return all targets, computed from rows and additional measurements."""
    return [
        *engine_targets(rows),
        *server_targets(rows, extras),
        *attention_targets(rows),
        *extra_targets(extras),
    ]


def engine_targets(rows: Rows) -> list[Target]:
    """Return the targets for in-process embeddings, each within an accuracy tier."""
    find = rows.find
    fp32 = find(ENGINE, "fp32", "embed", "passages")
    near, int8 = rows.ours("", NEAR_LOSSLESS), rows.ours("int8", INT8)
    genai = {
        precision: find(GENAI, precision, "embed", "passages")
        for precision in ("fp32", "bf16", "NNCF int8", "NNCF int8, bf16")
    }
    nncf = fastest([row for name, row in genai.items() if row and name.startswith("NNCF")])
    ctranslate2 = {
        precision: find(CTRANSLATE2, precision, "embed", "passages") for precision in ("fp32", "int8")
    }
    base = find(ENGINE, "fp32", "embed", "passages", model=BASE)
    return [
        Target("engine fp32, passages, share of ORT's own MatMul rate",
               ratio(fp32, rows.ceiling(), "gflop_per_s"), 0.65, 0.80),
        Target("fp32: best of our engines / openvino-genai fp32",
               ratio(rows.ours("fp32", FP32), genai["fp32"]), 1.05, 1.15),
        Target("fp32: best of our engines / CTranslate2 float32",
               ratio(rows.ours("fp32", FP32), ctranslate2["fp32"]), 1.0, 1.03),
        Target("near-lossless: best of our engines / openvino-genai bf16",
               ratio(near, genai["bf16"]), 1.08, 1.2),
        Target("near-lossless: best of our engines / PyTorch compiled, bf16",
               ratio(near, find(COMPILED, "bf16", "embed", "passages")), 1.15, 1.3),
        Target("near-lossless / our fp32 with ONNX Runtime", ratio(near, fp32), 1.7, 1.9),
        Target("int8 within the gate: best of our engines / NNCF's int8 in openvino-genai",
               ratio(int8, nncf), 1.0, 1.15),
        Target("int8 within the gate: best of our engines / CTranslate2 int8",
               ratio(int8, ctranslate2["int8"]), 1.0, 1.15),
        Target("int8 within the gate / our fp32 with ONNX Runtime", ratio(int8, fp32), 1.6, 2.2),
        Target(f"{STRICT} / our fp32 with ONNX Runtime",
               ratio(rows.ours(STRICT, STRICT_INT8), fp32), 1.5, 1.8),
        Target("int8 within the gate / our fp32 with ONNX Runtime, BERT-base's sizes",
               ratio(rows.ours("int8", INT8, BASE), base), 2.8, 3.2),
    ]  # fmt: skip


def server_targets(rows: Rows, extras: dict[str, Any]) -> list[Target]:
    """Return the targets for servers, relative to engines and to other programs."""
    find = rows.find

    def share(name: str, precision: str) -> float | None:
        served = find(SERVER + name, precision, "embed", "mixed", MANY)
        return ratio(served, find(ENGINE + name, precision, "embed", "mixed"))

    def single(name: str, precision: str) -> float | None:
        served = find(SERVER + name, precision, "embed", "sentences", 1)
        return latency_ratio(served, find(GENAI, precision, ONE_BY_ONE, "sentences"))

    memory = extras.get("rss_mib") or {}
    bf16_mib, fp32_mib = memory.get(f"{SERVER}{OPENVINO} bf16"), memory.get(f"{SERVER} fp32")
    infinity = find(INFINITY, "fp32", "embed", "mixed", MANY)
    return [
        Target("server with 64 clients / engine in-process, fp32", share("", "fp32"), 0.88, 0.95),
        Target("server with 64 clients / engine in-process, bf16", share(OPENVINO, "bf16"), 0.85, 0.95),
        Target("server with 64 clients / engine in-process, int8", share("", "int8"), 0.82, 0.95),
        Target("one client, one short text, fp32: p50 over gRPC / openvino-genai in-process",
               single("", "fp32"), 1.3, 1.1, lower_is_better=True),
        Target("one client, one short text, bf16: p50 over gRPC / openvino-genai in-process",
               single(OPENVINO, "bf16"), 1.3, 1.1, lower_is_better=True),
        Target("server with 64 clients / Infinity with 64 clients",
               ratio(find(SERVER, "fp32", "embed", "mixed", MANY), infinity), 5, 10),
        Target("RSS of the server in bf16 with OpenVINO / in fp32 with ONNX Runtime",
               bf16_mib / fp32_mib if bf16_mib and fp32_mib else None, 1.0, None, lower_is_better=True),
    ]  # fmt: skip


def attention_targets(rows: Rows) -> list[Target]:
    """Return the targets for attention, relative to embeddings and to PyTorch."""
    find = rows.find
    short, maps = (find(ENGINE, "fp32", what, "short") for what in ("embed", "attention"))
    served_maps = find(SERVER, "fp32", "attention", "short", MANY)
    eager_maps = find(EAGER, "fp32", "attention", "short")
    return [
        Target("all attention maps in-process / embeddings only (texts <= 128 tokens), time",
               ratio(short, maps), 1.15, 1.05, lower_is_better=True),
        Target("attention of every layer over gRPC / transformers eager in-process, texts per second",
               ratio(served_maps, eager_maps, "texts_per_s"), 1.5, 2.5),
    ]  # fmt: skip


def extra_targets(extras: dict[str, Any]) -> list[Target]:
    """Return the targets for padding, memory growth and startup time."""
    return [
        Target("padding share of computed tokens on the mixed workload at 64 clients",
               extras.get("padding_share"), 0.05, 0.02, lower_is_better=True),
        Target("RSS after the soak / after warm-up",
               extras.get("soak", {}).get("rss_ratio"), 1.05, 1.0, lower_is_better=True),
        Target("server start to first response, s",
               extras.get("start_to_first_answer_s"), 1.5, 0.8, lower_is_better=True),
    ]  # fmt: skip


def as_json(target: Target) -> dict[str, Any]:
    return asdict(target) | {"met": target.met}
