"""Markdown report.

Embedding tables are sorted by accuracy tier, then by speed. Ratios only compare a row with peers that are at
least as accurate.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from bench.accuracy import BELOW, TIERS, rank
from bench.cases import MATMUL, Row
from bench.contestants import ENGINE, ONE_BY_ONE
from bench.show.targets import Rows, ratio

Line = Mapping[str, object]


def report(result: Mapping[str, Any]) -> str:
    """Return the report as Markdown."""
    all_rows: Sequence[Row] = result["rows"]
    rows = Rows(all_rows)
    measured = [row for row in all_rows if not row["failure"] and row["name"] != MATMUL]
    return "\n".join(
        [
            *head(result, rows),
            *table(
                {"model": model, "workload": name, **sizes}
                for model, workloads in result["workloads"].items()
                for name, sizes in workloads.items()
            ),
            *embeddings(measured, rows),
            *section("One short text at a time", single_lines(measured)),
            *section("Servers", served_lines(measured)),
            *section("Attention and token vectors, in-process", other_lines(measured, rows)),
            *section("Open loop: fixed arrival rates", map(open_loop_line, result["open_loop"])),
            *section("Memory", memory_lines(result["extras"])),
            *checks(measured),
            *section("Targets", map(target_line, result["targets"])),
            *failures(all_rows),
        ]
    )


def head(result: Mapping[str, Any], rows: Rows) -> Iterator[str]:
    machine = result["machine"]
    yield f"{machine['processor']}, {result['threads']} threads of {machine['cores']} cores."
    yield f"Medians of {result['repetitions']} interleaved repetitions."
    for model, name in result["models"].items():
        ceiling = rows.ceiling(model)
        if ceiling is not None:
            gflop_per_s = ceiling["gflop_per_s"]["median"]
            yield (
                f"{model} is {name}; ONNX Runtime's own MatMul, {ceiling['workload']}, fp32: "
                f"{gflop_per_s:.0f} GFLOP/s."
            )
    yield ""
    yield "Cosines are relative to the fp32 engine with ONNX Runtime. Each tier requires at least:"
    yield ""
    yield from table(
        {"tier": tier.name, "mean cosine": f"{tier.mean_cosine:g}", "minimum": f"{tier.min_cosine:g}"}
        for tier in TIERS
        if tier is not BELOW
    )


def section(title: str, lines: Iterable[Line]) -> Iterator[str]:
    """Yield a table with a heading. Yields nothing if the table is empty."""
    rendered = list(table(lines))
    if rendered:
        yield from (f"## {title}", "", *rendered)


def embeddings(measured: Sequence[Row], rows: Rows) -> Iterator[str]:
    """Yield a table of in-process embeddings for each model and workload."""
    chosen = [row for row in measured if (row["what"], row["clients"]) == ("embed", None)]
    for model, workload in dict.fromkeys((row["model"], row["workload"]) for row in chosen):
        selected = [row for row in chosen if (row["model"], row["workload"]) == (model, workload)]
        lines = (embedding_line(row, rows) for row in sorted(selected, key=by_tier_and_speed))
        yield from section(f"{model}, {workload}: embeddings in-process", lines)


def by_tier_and_speed(row: Row) -> tuple[int, float]:
    """Return a sort key: most accurate tier first, then fastest first."""
    return rank(row), -row["tokens_per_s"]["median"]


def embedding_line(row: Row, rows: Rows) -> Line:
    """Return accuracy, speed, spread and speed ratios of an embedding row."""
    rate, model = row["tokens_per_s"], row["model"]
    ours = rows.find(ENGINE, "fp32", "embed", row["workload"], model=model)
    return {
        "tier": tier_name(row),
        "program": program(row),
        "tokens/s": f"{rate['median']:,.0f}",
        **cosines(row),
        "vs best peer": number(ratio(row, rows.best_peer(row))),
        "vs attnlens fp32": number(ratio(row, ours)),
        "vs MatMul": number(ratio(row, rows.ceiling(model), "gflop_per_s")),
        "spread": spread_of(row),
        "batch": row.get("choice", ""),
    }


def single_lines(measured: Sequence[Row]) -> Iterator[Line]:
    """Yield a line for each single-text row, in-process or over gRPC."""
    chosen = [
        row
        for row in measured
        if row["what"] == ONE_BY_ONE or (row["clients"], row["workload"]) == (1, "sentences")
    ]
    for row in sorted(chosen, key=lambda row: (rank(row), row["latency_ms"]["p50"])):
        yield {
            "tier": tier_name(row),
            "program": program(row),
            "transport": "in-process" if row["clients"] is None else "over gRPC",
            "p50, ms": f"{row['latency_ms']['p50']:.2f}",
            "p95, ms": f"{row['latency_ms']['p95']:.2f}",
            **cosines(row),
        }


def served_lines(measured: Sequence[Row]) -> Iterator[Line]:
    """Yield a line for each server row, grouped by task and workload."""
    chosen = [row for row in measured if row["clients"] is not None]
    chosen.sort(key=lambda row: (row["what"], row["workload"], row["clients"], *by_tier_and_speed(row)))
    for row in chosen:
        yield {
            "what": row["what"],
            "texts": row["workload"],
            "clients": row["clients"],
            "tier": tier_name(row),
            "program": program(row),
            "texts/s": f"{row['texts_per_s']['median']:,.0f}",
            "spread": spread_of(row),
            **cosines(row),
            "p50 / p95 / p99, ms": milliseconds(row.get("latency_ms", {})),
            "client CPU": share(row.get("client_cpu_share")),
            "errors": sum(row.get("errors", {}).values()) or "",
        }


def other_lines(measured: Sequence[Row], rows: Rows) -> Iterator[Line]:
    """Yield a line for each in-process row without embeddings. All of them are in fp32."""
    for row in measured:
        if row["clients"] is None and not row["what"].startswith("embed"):
            ours = rows.find(ENGINE, "fp32", row["what"], row["workload"])
            yield {
                "what": row["what"],
                "texts": row["workload"],
                "program": program(row),
                "texts/s": f"{row['texts_per_s']['median']:,.0f}",
                "tokens/s": f"{row['tokens_per_s']['median']:,.0f}",
                "spread": spread_of(row),
                "vs attnlens engine": number(ratio(row, ours)),
                "vs MatMul": number(ratio(row, rows.ceiling(), "gflop_per_s")),
                "batch": row.get("choice", ""),
            }


def memory_lines(extras: Mapping[str, Any]) -> Iterator[Line]:
    """Yield the memory of each server after the same load."""
    for name, rss_mib in (extras.get("rss_mib") or {}).items():
        yield {"server": name, "resident, MiB": f"{rss_mib:,.0f}"}


def program(row: Row) -> str:
    return f"{row['name']} {row['precision']}"


def tier_name(row: Row) -> str:
    """Return the tier of a row, or an empty string if it has no embeddings."""
    return str(row.get("accuracy", {}).get("tier", ""))


def cosines(row: Row) -> Line:
    accuracy = row.get("accuracy")
    figures = (accuracy["mean_cosine"], accuracy["min_cosine"]) if accuracy else ()
    names = ("mean cosine", "minimum")
    return dict.fromkeys(names, "") | {
        name: f"{value:.6f}" for name, value in zip(names, figures, strict=False)
    }


def spread_of(row: Row) -> str:
    rate = row["tokens_per_s"]
    return share((rate["max"] - rate["min"]) / rate["median"] if rate["median"] else None)


def open_loop_line(point: Row) -> Line:
    """Return the throughput and latencies at one arrival rate."""
    return {
        "open loop": f"{point['name']} {point['precision']}: {point['what']}, {point['workload']}",
        "arrivals/s": f"{point['rate']:,.0f}",
        "responses/s": f"{point['texts_per_s']:,.0f}",
        "p50 / p95 / p99, ms": milliseconds(point["latency_ms"]),
        "errors": sum(point["errors"].values()) + point["unanswered"],
        "max send delay, ms": f"{point['sent_late_ms']:.0f}",
        "client CPU": share(point["client_cpu_share"]),
    }


def checks(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the largest deviation of each server's responses under load from single requests."""
    checked = [row for row in rows if row.get("compared")]
    for name in dict.fromkeys(program(row) for row in checked):
        server_rows = [row for row in checked if program(row) == name]
        worst = max(row["max_abs_difference_from_alone"] for row in server_rows)
        count = sum(row["compared"] for row in server_rows)
        yield f"{name}: {count} responses under load match single requests within {worst:.1e}."
    yield ""


def target_line(target: Row) -> Line:
    """Return the value and bounds of a target, and whether it is met."""
    bound = "<=" if target["lower_is_better"] else ">="
    return {
        "target": target["what"],
        "value": number(target["value"]),
        "at least": f"{bound} {target['at_least']:g}",
        "stretch": "" if target["stretch"] is None else f"{bound} {target['stretch']:g}",
        "met": target["met"],
    }


def failures(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the failure of each program, without duplicates."""
    failed = [row for row in rows if row["failure"]]
    reasons = dict.fromkeys((row["model"], program(row), row["failure"]) for row in failed)
    yield from (f"Not measured: {model}: {name}: {reason}" for model, name, reason in reasons)


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def milliseconds(latencies: Mapping[str, float]) -> str:
    return " / ".join(f"{latency:,.0f}" for latency in latencies.values())


def table(lines: Iterable[Line]) -> Iterator[str]:
    """Yield the lines of a Markdown table with padded columns."""
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
