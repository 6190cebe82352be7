"""The result as Markdown tables."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from bench.cases import MATMUL, Row
from bench.contestants import ENGINE
from bench.show.targets import Rows, ratio

Line = Mapping[str, object]


def report(result: Mapping[str, Any]) -> str:
    """Return the report: machine, rows, open loops, checks, targets, failures."""
    all_rows: Sequence[Row] = result["rows"]
    rows = Rows(all_rows)
    measured = [row for row in all_rows if not row["failure"] and row["name"] != MATMUL]
    return "\n".join(
        [
            *head(result, rows.ceiling()),
            *table({"workload": name, **sizes} for name, sizes in result["workloads"].items()),
            *table(rate_line(row, rows) for row in measured),
            *table(open_loop_line(point) for point in result["open_loop"]),
            *table(agreement_line(name, cosines) for name, cosines in result["agreement"].items()),
            *checks(measured),
            *table(target_line(target) for target in result["targets"]),
            *failures(all_rows),
        ]
    )


def head(result: Mapping[str, Any], ceiling: Row | None) -> Iterator[str]:
    machine = result["machine"]
    cores = f"{result['threads']} threads of {machine['cores']} cores"
    yield f"{result['model']}; {machine['processor']}, {cores}."
    yield f"Medians of {result['repetitions']} interleaved repetitions."
    if ceiling is not None:
        gflop_per_s = ceiling["gflop_per_s"]["median"]
        yield f"ONNX Runtime's own MatMul, {ceiling['workload']}, fp32: {gflop_per_s:.0f} GFLOP/s."
    yield ""


def rate_line(row: Row, rows: Rows) -> Line:
    """Rate and spread, and the ratios to the ceiling and to our engine on the same texts."""
    what, rate = row["what"], row["tokens_per_s"]
    ours = rows.find(ENGINE, "fp32", what.split(",")[0], row["workload"])
    return {
        "": f"{row['name']} {row['precision']}",
        "what": what,
        "texts": row["workload"],
        "clients": row["clients"] or "",
        "batch": row.get("batch_size", ""),
        "texts/s": f"{row['texts_per_s']['median']:,.0f}",
        "tokens/s": f"{rate['median']:,.0f}",
        "spread": share((rate["max"] - rate["min"]) / rate["median"] if rate["median"] else None),
        "of MatMul": number(ratio(row, rows.ceiling(), "gflop_per_s")),
        "of our engine": number(ratio(row, ours)),
        "p50 / p95 / p99, ms": milliseconds(row.get("latency_ms", {})),
        "client's CPU": share(row.get("client_cpu_share")),
        "errors": sum(row.get("errors", {}).values()) or "",
    }


def open_loop_line(point: Row) -> Line:
    """The answers to requests that were sent at a fixed rate."""
    return {
        "open loop": f"{point['name']} {point['precision']}: {point['what']}, {point['workload']}",
        "arrivals/s": f"{point['rate']:,.0f}",
        "answers/s": f"{point['texts_per_s']:,.0f}",
        "p50 / p95 / p99, ms": milliseconds(point["latency_ms"]),
        "errors": sum(point["errors"].values()) + point["unanswered"],
        "latest sending, ms": f"{point['sent_late_ms']:.0f}",
        "client's CPU": share(point["client_cpu_share"]),
    }


def agreement_line(name: str, agreement: Mapping[str, float]) -> Line:
    """How near the vectors of a program are to those of our engine in fp32."""
    return {"vectors": name} | {key: f"{value:.6f}" for key, value in agreement.items()}


def checks(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each server: how far replies under load are from those to the same text alone."""
    checked = [row for row in rows if row.get("compared")]
    for name in dict.fromkeys(row["name"] for row in checked):
        of_name = [row for row in checked if row["name"] == name]
        worst = max(row["max_abs_difference_from_alone"] for row in of_name)
        count = sum(row["compared"] for row in of_name)
        yield f"{name}: {count} replies under load compared with the same text alone: within {worst:.1e}."
    yield ""


def target_line(target: Row) -> Line:
    """A target, and whether it is met."""
    bound = "<=" if target["lower_is_better"] else ">="
    return {
        "target": target["what"],
        "value": number(target["value"]),
        "at least": f"{bound} {target['at_least']:g}",
        "stretch": f"{bound} {target['stretch']:g}",
        "met": target["met"],
    }


def failures(rows: Sequence[Row]) -> Iterator[str]:
    """Say why rows are missing, once for each reason."""
    failed = [row for row in rows if row["failure"]]
    reasons = dict.fromkeys((f"{row['name']} {row['precision']}", row["failure"]) for row in failed)
    yield from (f"Not measured: {name}: {reason}" for name, reason in reasons)


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def milliseconds(latencies: Mapping[str, float]) -> str:
    return " / ".join(f"{latency:,.0f}" for latency in latencies.values())


def table(lines: Iterable[Line]) -> Iterator[str]:
    """Lay out a Markdown table whose columns are aligned in the source, too."""
    rows = list(lines)
    if not rows:
        return
    cells = [[str(cell) for cell in line] for line in (rows[0], *(row.values() for row in rows))]
    widths = [max(3, *(len(line[column]) for line in cells)) for column in range(len(cells[0]))]
    for index, line in enumerate(cells):
        yield "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        if index == 0:
            yield "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    yield ""
