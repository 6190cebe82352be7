"""The result as Markdown tables.

Programs of different accuracy never stand in one block: each table of embeddings is sorted by tier, and only
then by speed, and a ratio with peers is one with peers that are at least as near to fp32.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from bench.accuracy import BELOW, TIERS, rank
from bench.cases import MATMUL, Row
from bench.contestants import ENGINE, ONE_BY_ONE
from bench.show.targets import Rows, ratio

Line = Mapping[str, object]


def report(result: Mapping[str, Any]) -> str:
    """Return the report: machine, embeddings by tier, single texts, servers, attention, checks, targets."""
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
            *section("Texts that arrive at a fixed rate", map(open_loop_line, result["open_loop"])),
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
    yield "Cosines are those with our vectors in fp32 with ONNX Runtime. A tier asks for at least:"
    yield ""
    yield from table(
        {"tier": tier.name, "mean cosine": f"{tier.mean_cosine:g}", "smallest": f"{tier.min_cosine:g}"}
        for tier in TIERS
        if tier is not BELOW
    )


def section(title: str, lines: Iterable[Line]) -> Iterator[str]:
    """Yield a table under a title; nothing if it is empty."""
    found = list(table(lines))
    if found:
        yield from (f"## {title}", "", *found)


def embeddings(measured: Sequence[Row], rows: Rows) -> Iterator[str]:
    """Yield a table for each model and kind of texts: embeddings in-process, tier by tier."""
    chosen = [row for row in measured if (row["what"], row["clients"]) == ("embed", None)]
    for model, workload in dict.fromkeys((row["model"], row["workload"]) for row in chosen):
        of_texts = [row for row in chosen if (row["model"], row["workload"]) == (model, workload)]
        lines = (embedding_line(row, rows) for row in sorted(of_texts, key=by_tier_and_speed))
        yield from section(f"{model}, {workload}: embeddings in-process", lines)


def by_tier_and_speed(row: Row) -> tuple[int, float]:
    """Return what rows are sorted by: the nearest to fp32 first, in a tier the fastest first."""
    return rank(row), -row["tokens_per_s"]["median"]


def embedding_line(row: Row, rows: Rows) -> Line:
    """Accuracy, rate and spread, and the ratios to peers, to our engine and to the ceiling."""
    rate, model = row["tokens_per_s"], row["model"]
    ours = rows.find(ENGINE, "fp32", "embed", row["workload"], model=model)
    return {
        "tier": tier_name(row),
        "program": program(row),
        "tokens/s": f"{rate['median']:,.0f}",
        **cosines(row),
        "of the best peer as near": number(ratio(row, rows.best_peer(row))),
        "of our fp32": number(ratio(row, ours)),
        "of MatMul": number(ratio(row, rows.ceiling(model), "gflop_per_s")),
        "spread": spread_of(row),
        "batch": row.get("choice", ""),
    }


def single_lines(measured: Sequence[Row]) -> Iterator[Line]:
    """Yield a line for each program that takes one text at a time, in-process or from one client."""
    chosen = [
        row
        for row in measured
        if row["what"] == ONE_BY_ONE or (row["clients"], row["workload"]) == (1, "sentences")
    ]
    for row in sorted(chosen, key=lambda row: (rank(row), row["latency_ms"]["p50"])):
        yield {
            "tier": tier_name(row),
            "program": program(row),
            "how": "in-process" if row["clients"] is None else "over gRPC",
            "p50, ms": f"{row['latency_ms']['p50']:.2f}",
            "p95, ms": f"{row['latency_ms']['p95']:.2f}",
            **cosines(row),
        }


def served_lines(measured: Sequence[Row]) -> Iterator[Line]:
    """Yield a line for each kind of requests to a server, the tiers one after the other."""
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
            "client's CPU": share(row.get("client_cpu_share")),
            "errors": sum(row.get("errors", {}).values()) or "",
        }


def other_lines(measured: Sequence[Row], rows: Rows) -> Iterator[Line]:
    """Yield a line for each row in-process that has no embeddings; all are in fp32."""
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
                "of our engine": number(ratio(row, ours)),
                "of MatMul": number(ratio(row, rows.ceiling(), "gflop_per_s")),
                "batch": row.get("choice", ""),
            }


def memory_lines(extras: Mapping[str, Any]) -> Iterator[Line]:
    """Yield a line for each server: its memory after the same texts."""
    for name, rss_mib in (extras.get("rss_mib") or {}).items():
        yield {"server": name, "resident, MiB": f"{rss_mib:,.0f}"}


def program(row: Row) -> str:
    return f"{row['name']} {row['precision']}"


def tier_name(row: Row) -> str:
    """Return the tier of a row, or nothing for one without embeddings."""
    return str(row.get("accuracy", {}).get("tier", ""))


def cosines(row: Row) -> Line:
    accuracy = row.get("accuracy")
    figures = (accuracy["mean_cosine"], accuracy["min_cosine"]) if accuracy else ()
    names = ("mean cosine", "smallest")
    return dict.fromkeys(names, "") | {
        name: f"{value:.6f}" for name, value in zip(names, figures, strict=False)
    }


def spread_of(row: Row) -> str:
    rate = row["tokens_per_s"]
    return share((rate["max"] - rate["min"]) / rate["median"] if rate["median"] else None)


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


def checks(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each server: how far replies under load are from those to the same text alone."""
    checked = [row for row in rows if row.get("compared")]
    for name in dict.fromkeys(program(row) for row in checked):
        of_name = [row for row in checked if program(row) == name]
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
        "stretch": "" if target["stretch"] is None else f"{bound} {target['stretch']:g}",
        "met": target["met"],
    }


def failures(rows: Sequence[Row]) -> Iterator[str]:
    """Say why rows are missing, once for each reason."""
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
